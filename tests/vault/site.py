"""A fleet of one node with a vault, and the API on it: looking in this process is faster than a command each time."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import pytest

from broker.vault import operator
from broker.vault.errors import VaultError
from runner import App, Grants, Secret
from runner.job import Job
from runner.wire.view import EventView, JobView
from tests.support import fleet as fleets
from tests.support.fleet import Fleet
from tests.support.wait import wait_until

__all__ = ["Site", "standing"]


@dataclass(frozen=True, slots=True)
class Site:
    """The fleet and the API."""

    fleet: Fleet
    app: App

    def command(self, *argv: str, secrets: Sequence[Secret] = (), retries: int = 0) -> Job[None]:
        """Enqueue a program."""
        return self.app.command(argv, grants=Grants(secrets=secrets), retries=retries)

    def decide(self, op: Literal["approve", "deny"], job: str, secret: str) -> str:
        """Decide for the first attempt from afar; returns the receipt's outcome."""
        return self.app.job(job).decide(secret, op == "approve").outcome

    def output(self, job: Job[None]) -> str:
        """Wait for the job's end; return all that it wrote."""
        return b"".join(data for _, data in job.logs(follow=True)).decode("utf-8", "replace")

    def view(self, job: str) -> JobView:
        """Return the job as it stands."""
        return self.app.job(job).status()

    def wait(self, job: str, state: str) -> JobView:
        """Wait until the job is in a state."""
        wait_until(lambda: self.view(job).state == state, f"{job} to be {state}")
        return self.view(job)

    def node(self) -> str:
        """Return the node's state."""
        return next((one.state for one in self.app.nodes()), "none")

    def event(self, job: str, kind: str) -> EventView:
        """Wait for a job's event of a kind."""

        def found() -> list[EventView]:
            return [one for one in self.app.events() if (one.job, one.type) == (job, kind)]

        wait_until(lambda: bool(found()), f"{kind} of {job}")
        return found()[0]

    def leases(self) -> int:
        """Return how many leases the broker holds; 0 while there is none."""
        try:
            return int(str(operator.ask(self.fleet.home / "s" / "vault", {"op": "status"})["leases"]))
        except VaultError:
            return 0


@contextmanager
def standing(secrets: dict[str, str], rules: str, *options: str) -> Iterator[Site]:
    """Yield a fleet with a heartbeat of a second, these secrets and these rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGFENCE_HEARTBEAT_S", "1")
        with fleets.running("--nodes", "1", "--slots", "3", *options) as fleet:
            line = fleet.home / "s" / "vault"
            for name, value in secrets.items():
                text = base64.b64encode(value.encode()).decode()
                assert operator.ask(line, {"op": "put", "name": name, "value": text, "note": ""})["version"] == 1
            (fleet.home / "vault-policy.toml").write_text(rules)
            assert operator.ask(line, {"op": "reload"})["ok"]
            app = App(home=fleet.home)
            # Connected before a test begins, so that no test leaves it behind.
            app.nodes()
            yield Site(fleet, app)
            app.close()
