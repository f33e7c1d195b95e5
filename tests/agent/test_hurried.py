"""A real agent: a worker that stands and dies before it is ready costs its job nothing but another worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import Rig, ends_of, rigged
from tests.support.wait import wait_until


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Agents of one slot, with leases that a slow machine does not lose."""
    with rigged(slots=1, heartbeat_s=10.0) as found:
        yield found


def below(pid: int) -> list[int]:
    """Return the children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def standing(agent: int) -> int:
    """Return the worker that was forked ahead in the agent's one slot and waits for its plan; 0 if there is none."""
    for zygote in below(agent):
        for mould in below(zygote):
            for worker in below(mould):
                if state_of(worker) == "S":
                    return worker
    return 0


def state_of(pid: int) -> str:
    """Return the state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]


def test_a_dead_worker_that_stood_is_replaced(rig: Rig) -> None:
    """It died with plan and payload on their way: another one runs the job, which ends once, in its first attempt."""
    node = rig.start("a")
    first = rig.command("true")
    rig.wait_state(first, "finished")
    worker = wait_until(lambda: standing(node.pid), "the next worker to stand")
    os.kill(worker, signal.SIGSTOP)
    job = rig.command("echo", "ran")
    rig.wait_state(job, "running")
    os.kill(worker, signal.SIGKILL)
    rig.wait_state(job, "finished")
    assert ends_of(rig, [job]) == {job.id: ("finished", 1)}
    assert rig.attempt(job) == 1
    assert rig.logs(job) == "ran\n"
    started = [event for event in rig.app.events() if event.type == "job.started" and event.job == job.id]
    assert len(started) == 1


def test_a_kill_reaches_a_job_whose_worker_is_not_ready(rig: Rig) -> None:
    """The receipt says killed and no survivors; nothing of the job ran."""
    node = rig.start("a")
    first = rig.command("true")
    rig.wait_state(first, "finished")
    worker = wait_until(lambda: standing(node.pid), "the next worker to stand")
    os.kill(worker, signal.SIGSTOP)
    job = rig.command("echo", "ran")
    rig.wait_state(job, "running")
    receipt = job.kill()
    assert (receipt.outcome, receipt.survivors) == ("killed", 0)
    assert rig.logs(job) == ""
