"""No slot is lost, whatever ends its jobs: exactly as many run at a time as the node has (scenario A-F04)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from runner import Grants
from tests.containment.rig import marked
from tests.support.rig import Node, Rig, rigged
from tests.support.wait import wait_until

SLOTS = 2
ROUNDS = 4
LAST_JOBS = 20
MARK = "rf-slots-mark"
ENDED = ("finished", "failed", "killed", "refused", "lost")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A node of two slots whose agent can be made to die between claim and start."""
    with rigged(slots=SLOTS) as found:
        found.redis.ping()
        yield found


def killed(rig: Rig, node: Node) -> None:
    """A job that is killed while it runs."""
    job = rig.command("sh", "-c", "echo up; sleep 30")
    rig.wait_output(job, "up")
    assert job.kill().outcome == "killed"


def worker_killed(rig: Rig, node: Node) -> None:
    """A job whose processes are killed by somebody else."""
    job = rig.command("sh", "-c", "echo up; exec sleep 30", env={"MARK": MARK})
    rig.wait_output(job, "up")
    for pid in marked(MARK):
        os.kill(pid, signal.SIGKILL)
    rig.wait_state(job, "failed")


def refused(rig: Rig, node: Node) -> None:
    """A job whose grant is not allowed."""
    rig.wait_state(rig.command("true", grants=Grants(read=("/root",))), "refused")


def too_long(rig: Rig, node: Node) -> None:
    """A job that meets its time limit."""
    rig.wait_state(rig.command("sleep", "30", timeout=0.3), "failed")


def agent_killed(rig: Rig, node: Node) -> None:
    """A job that was claimed by an agent that then died."""
    rig.fault.write_text("claim")
    job = rig.command("true")
    wait_until(node.dead, "the agent to die between claim and start", 10)
    rig.restart(node)
    rig.wait_state(job, *ENDED)


def test_f04_every_slot_is_there_in_the_end(rig: Rig) -> None:
    """After every kind of end in turn, 20 jobs run exactly two at a time, and no slot is taken afterwards."""
    node = rig.start("slots", faulty=True)
    for number in range(ROUNDS):
        for end in (killed, worker_killed, refused, too_long):
            end(rig, node)
        if number % 2:
            agent_killed(rig, node)
    diary = rig.work / "diary"
    diary.touch()
    script = f"echo in >>{diary}; sleep 0.2; echo out >>{diary}"
    jobs = [rig.command("sh", "-c", script, grants=Grants(write=(str(rig.work),))) for _ in range(LAST_JOBS)]
    for job in jobs:
        rig.wait_state(job, *ENDED, timeout_s=30)
    inside = most = 0
    for line in diary.read_text().split():
        inside += 1 if line == "in" else -1
        most = max(most, inside)
    assert (most, inside, len(diary.read_text().split())) == (SLOTS, 0, 2 * LAST_JOBS)
    rig.wait_idle()
    wait_until(lambda: rig.record(node)["busy"] == 0, "the node to tell that no slot is taken", 5)
    assert rig.record(node)["slots"] == SLOTS
    node.stop()
    rig.app.close()
