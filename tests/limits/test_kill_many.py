"""A kill of many freezes all of them before the first dies, and never waits long for that."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

from node_agent.containment.freezing import FREEZE_TIMEOUT_S, Still
from node_agent.control import Control
from node_agent.lifecycle import Ending
from node_agent.pausing import KILL_FREEZE_S
from node_agent.run import KillOrder, Proof, Run, now_ms
from runner.wire.states import State


class Tree:
    """The processes of one attempt, on paper: notes what is done to them; ``stuck`` ones never stand still."""

    def __init__(self, run: Run, done: list[str], *, stuck: bool = False) -> None:
        self._run = run
        self._done = done
        self._stuck = stuck

    async def freeze(self, frozen: bool, timeout_s: float = FREEZE_TIMEOUT_S) -> Still:
        """Stand still, or wait for as long as it is given."""
        self._done.append(f"freeze {self._run.job_id}")
        if self._stuck:
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=timeout_s)
        return Still(not self._stuck, 1, "paper")

    def terminate(self) -> None:
        """End as if by itself."""
        self._done.append(f"term {self._run.job_id}")
        self._end()

    def tell(self, number: int) -> None:
        """Note a signal."""
        self._done.append(f"signal {number} {self._run.job_id}")

    def kill(self) -> None:
        """Die, with proof."""
        self._done.append(f"kill {self._run.job_id}")
        self._end()

    def cpu_s(self) -> float:
        """It uses none."""
        return 0.0

    def sockets(self) -> int:
        """None."""
        return 0

    def _end(self) -> None:
        if not self._run.acknowledged.done():
            self._run.settle(Proof(Ending(State.KILLED, "kill"), None, now_ms()))
            self._run.acknowledged.set_result(True)


def killed(count: int, *, grace_s: float = 0.0, stuck: bool = False) -> list[str]:
    """Kill so many jobs in one order; return what was done, in order."""
    done: list[str] = []

    async def main() -> None:
        control = Control.__new__(Control)
        control._mail = SimpleNamespace(receipt=lambda receipt: None)  # type: ignore[assignment]  # on paper
        control._notary = SimpleNamespace(receipt=lambda *facts: None)  # type: ignore[assignment]  # on paper
        runs = [Run(f"j{number}", 1, number, number) for number in range(count)]
        for run in runs:
            run.tree = Tree(run, done, stuck=stuck)
        await control._end(runs, KillOrder("c1", now_ms(), grace_s=grace_s))

    asyncio.run(main())
    return done


def test_all_are_frozen_before_the_first_dies() -> None:
    """Freeze, freeze, freeze; then kill, kill, kill."""
    assert killed(3) == ["freeze j0", "freeze j1", "freeze j2", "kill j0", "kill j1", "kill j2"]


def test_one_alone_and_jobs_with_a_grace_are_not_frozen() -> None:
    """There is nobody to react to one; and who gets a grace is to use it."""
    assert killed(1) == ["kill j0"]
    assert killed(2, grace_s=5) == ["term j0", "term j1"]


def test_what_does_not_stand_still_delays_no_kill() -> None:
    """A job that can't be frozen holds the others up for a quarter of a second, and dies like them."""
    began = time.monotonic()
    done = killed(3, stuck=True)
    assert time.monotonic() - began < KILL_FREEZE_S + 2
    assert done[3:] == ["kill j0", "kill j1", "kill j2"]
