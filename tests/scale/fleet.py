"""A store, a home and as many agents as a test wants, each a process that it may kill, stop and start again.

Called by tests/chaos and tests/scale. Must never outlive its block: the kernel ends everything with the test process.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import redis

from node_agent.containment.cgroup import NodeGroups
from runner import App, keyring
from runner.cli import ceiling, launch
from runner.cli.ceiling import Import
from runner.home import Home
from runner.wire.keys import Keys
from tests.scale import stacks
from tests.scale import store as stores
from tests.scale.clocks import Clock
from tests.scale.floor import Line
from tests.scale.store import Store
from tests.support import scratch
from tests.support.wait import wait_until

__all__ = ["JOBS", "TASK", "Agent", "Fleet", "running"]

JOBS = Path(__file__).with_name("jobs")
TASK = "sim_jobs:work"
NURSERY = Path(__file__).with_name("nursery.py")
READY_S = 60.0
STOP_S = 30.0
STACKS_S = 5.0


@dataclass(slots=True)
class Agent:
    """One agent by name; ``pid`` and ``pidfd`` are those of its present process."""

    name: str
    order: dict[str, object]
    clock: Clock | None
    pid: int = 0
    pidfd: int = -1
    stopped: bool = False

    @property
    def simulated(self) -> bool:
        """Whether its sandboxes are."""
        return bool(self.order["simulated"])

    def dead(self) -> bool:
        """Whether its process has ended."""
        return self.pidfd < 0 or bool(select.select([self.pidfd], [], [], 0)[0])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process and to no other, however late."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self) -> None:
        """Wait for its end."""
        try:
            wait_until(self.dead, f"{self.name} to end", STOP_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.stacks()}") from None

    def stacks(self) -> str:
        """Return where its tasks and threads stand; for a process that should have ended."""
        log = Path(str(self.order["log"]))
        at = log.stat().st_size if log.exists() else 0

        def said() -> str:
            return log.read_text(errors="replace")[at:] if log.exists() else ""

        self.signal(signal.SIGCONT)
        self.signal(stacks.SIGNAL)
        with suppress(AssertionError):
            wait_until(lambda: stacks.DONE in said(), "the stacks", STACKS_S)
        return said()

    def forget(self) -> None:
        """Close what is held of it."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass(slots=True)
class Fleet:
    """What a test works with. ``journal``: where simulated jobs note begin and end."""

    home: Path
    work: Path
    store: Store
    app: App
    redis: redis.Redis
    tag: str
    journal: Path | None
    moving: bool
    nursery: subprocess.Popen[str]
    keys: Keys = field(default_factory=Keys)
    agents: dict[str, Agent] = field(default_factory=dict)

    def start(
        self,
        name: str,
        *,
        simulated: bool = True,
        slots: int = 4,
        heartbeat_s: float = 1.0,
        wait: bool = True,
        **env: str,
    ) -> Agent:
        """Start a new agent ``TAG-name``."""
        full = f"{self.tag}-{name}"
        home = Home(self.home)
        keyring.issue_card(home, full, level="B")
        words = ["--home", str(self.home), "--name", full, "--slots", str(slots)]
        words += ["--policy", str(self.home / "policy.toml"), "--import", "sim_jobs", "--task-path", str(JOBS)]
        clock = Clock(self.home.parent / f"{full}.clock") if self.moving else None
        order: dict[str, object] = {
            "words": words,
            "env": {"PATH": os.defpath, "LANG": "C.UTF-8", "RINGFENCE_HEARTBEAT_S": str(heartbeat_s), **env},
            "log": str(self.home.parent / f"{full}.log"),
            "clock": None if clock is None else str(clock.path),
            "journal": None if self.journal is None else str(self.journal),
            "simulated": simulated,
        }
        agent = self.agents[name] = Agent(full, order, clock)
        self.launch(agent)
        if wait:
            self.wait_up(agent)
        return agent

    def launch(self, agent: Agent) -> None:
        """Start the agent's process anew."""
        source, sink = self.nursery.stdout, self.nursery.stdin
        assert source is not None
        assert sink is not None
        agent.forget()
        sink.write(json.dumps(agent.order) + "\n")
        sink.flush()
        agent.pid = int(json.loads(source.readline())["pid"])
        with suppress(ProcessLookupError):
            agent.pidfd = os.pidfd_open(agent.pid)
        agent.stopped = False

    def wait_up(self, agent: Agent) -> None:
        """Wait until its present process is registered. Fails with its last words if it ends."""

        def up() -> bool:
            assert not agent.dead(), self.words_of(agent)
            return self.records().get(agent.name, {}).get("pid") == agent.pid

        wait_until(up, f"{agent.name} to be registered", READY_S)

    def wait_all_up(self) -> None:
        """Wait until every agent's present process is registered."""
        wait_until(
            lambda: (
                {name: record.get("pid") for name, record in self.records().items()}
                == {agent.name: agent.pid for agent in self.agents.values()}
            ),
            "all agents to be registered",
            READY_S,
        )

    def records(self) -> dict[str, dict[str, object]]:
        """Return what each node last published of itself."""
        found = cast("dict[bytes, bytes]", self.redis.hgetall(self.keys.nodes()))
        return {name.decode(): json.loads(data) for name, data in found.items()}

    def words_of(self, agent: Agent) -> str:
        """Return the end of what an agent said."""
        log = Path(str(agent.order["log"]))
        return log.read_text(errors="replace")[-4000:] if log.exists() else ""

    def lines(self) -> list[Line]:
        """Return the journal in the order of time."""
        notes = [self.work / "journal", *([] if self.journal is None else [self.journal])]
        text = "".join(note.read_text() for note in notes if note.exists())
        found: list[Line] = []
        last: dict[tuple[str, int, str], Line] = {}
        for kind, job, attempt, agent, at_ns, how in (line.split(" ") for line in text.splitlines()):
            line = Line(kind == "S", job, int(attempt), agent, int(at_ns), how)
            last[line.job, line.attempt, agent] = line
            if kind != "B":
                found.append(line)
                if kind == "E":
                    del last[line.job, line.attempt, agent]
        # A job in a real sandbox can't note its own violent end, which came soon after its last word.
        found += [
            replace(line, begins=False, at_ns=line.at_ns + 1, how="killed")
            for line in last.values()
            if line.agent.startswith("sandbox.")
        ]
        return sorted(found, key=lambda line: line.at_ns)

    def stop(self) -> None:
        """End all agents in order; the store must serve. Idempotent."""
        for agent in self.agents.values():
            agent.signal(signal.SIGCONT)
            agent.signal(signal.SIGTERM)
        try:
            for agent in self.agents.values():
                agent.wait()
        finally:
            for agent in self.agents.values():
                agent.signal(signal.SIGKILL)
                agent.forget()
                if not agent.simulated:
                    self._sweep(agent)

    def _sweep(self, agent: Agent) -> None:
        groups = NodeGroups.open(agent.name, home=self.home)
        if groups is not None:
            groups.sweep()
            groups.close()


@contextmanager
def running(*, journal: bool = True, moving: bool = False, options: Sequence[str] = ()) -> Iterator[Fleet]:
    """Yield a fleet without agents. ``moving``: clocks can be moved (clocks.py)."""
    with scratch.folder(mode=0o711) as folder, stores.running(options) as store:
        work, home = folder / "work", folder / "h"
        work.mkdir()
        (work / "journal").touch()
        keyring.init(Home(home), redis_url=store.url)
        (home / "policy.toml").write_text(ceiling.policy_text([work], [Import("sim_jobs", JOBS)]))
        head = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(signal.SIGKILL)), launch.NO_UID]
        nursery = subprocess.Popen(
            [*head, sys.executable, "-I", str(NURSERY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        client = store.client()
        notes = folder / "journal" if journal else None
        tag = f"s{secrets.token_hex(3)}"
        with App(home=home) as app:
            fleet = Fleet(home, work, store, app, client, tag, notes, moving, nursery)
            try:
                yield fleet
            finally:
                try:
                    fleet.stop()
                finally:
                    _end(nursery)
                    client.close()


def _end(nursery: subprocess.Popen[str]) -> None:
    """End the nursery, and with it whatever it still has."""
    nursery.kill()
    nursery.wait(STOP_S)
    for pipe in (nursery.stdin, nursery.stdout):
        if pipe is not None:
            pipe.close()
