"""A node with an egress process and a policy that names destinations, and short ways to run jobs on it.

Called by the tests of net grants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from runner import Grants
from runner.cli import ceiling
from runner.job import Job
from runner.wire.states import END_STATES
from tests.containment.rig import python
from tests.net.support import Process, egress_process
from tests.support.rig import PROGRAMS, Node, Rig, rigged

__all__ = ["Net", "Seen", "netted", "python"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one job did."""

    job: Job[None]
    state: str
    output: str


@dataclass(slots=True)
class Net:
    """A rig whose jobs may have net grants."""

    rig: Rig
    egress: Process
    node: Node

    def run(self, argv: Sequence[str], net: Sequence[str], **options: object) -> Seen:
        """Run a command with net grants to its end."""
        job = self.start(argv, net, **options)
        self.rig.wait_state(job, *END_STATES, timeout_s=50)
        return Seen(job, self.rig.state(job), self.rig.logs(job))

    def start(self, argv: Sequence[str], net: Sequence[str], **options: object) -> Job[None]:
        """Start a command with net grants."""
        grants = Grants(net=net, **options)  # type: ignore[arg-type] # each test names real fields
        return self.rig.command(*argv, grants=grants)


@contextmanager
def netted(net: Sequence[str] = ("*",), *, egress: Sequence[str] = (), tag: str = "", slots: int = 2) -> Iterator[Net]:
    """Yield a node whose policy lists ``net``; ``egress`` are options of its egress process."""
    with rigged(slots=slots, tag=tag) as rig, egress_process(rig.home, *egress) as process:
        text = ceiling.policy_text([rig.work, PROGRAMS], rig.imports)
        listed = ", ".join(f'"{entry}"' for entry in net)
        (rig.home / "policy.toml").write_text(text.replace('net = ["*"]', f"net = [{listed}]"))
        yield Net(rig, process, rig.start("n"))
