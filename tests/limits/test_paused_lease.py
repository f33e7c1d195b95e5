"""A paused job and its lease (attack 36): the mould is never stopped, so the job dies with its agent all the same."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator

import pytest

from node_agent.containment.slots import boottime_ns
from runner.job import Job
from tests.containment.rig import Rig as SlotRig
from tests.containment.rig import in_rig, marked, python
from tests.limits.test_freeze import COUNTERS, WAYS, on
from tests.support import rig as rigs
from tests.support.fleet import processes_with
from tests.support.rig import Rig
from tests.support.wait import wait_until

TREE = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(60)
        os._exit(0)
print("up", flush=True)
time.sleep(60)
"""
RENEWALS = 10_000


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store and a home with a heartbeat of 1 s; the test starts the agents."""
    with rigs.rigged(slots=1) as found:
        yield found


def paused(rig: Rig, **options: int) -> tuple[Job[None], str]:
    """Start a detached tree and pause it; return the job and its mark."""
    mark = secrets.token_hex(8)
    job = rig.command("python3", "-c", TREE, mark, **options)  # type: ignore[arg-type]  # options of a job
    rig.wait_output(job, "up")
    assert job.pause().outcome == "paused"
    assert len(processes_with(mark)) == 4
    return job, mark


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_attack_36_nothing_of_a_paused_job_outlives_its_agent(rig: Rig, number: signal.Signals) -> None:
    """Agent killed: gone at once. Agent stopped: gone with the deadline on the lifeline, within one lease."""
    node = rig.start("one")
    job, mark = paused(rig)
    node.signal(number)
    wait_until(lambda: not processes_with(mark), "the paused tree to be gone", 2 * rig.heartbeat_s + 3)
    node.crash()
    rig.restart(node)
    rig.wait_state(job, "lost")


def test_a_paused_job_keeps_its_lease(rig: Rig) -> None:
    """Paused for longer than a lease, with its agent alive: no other node takes it, and it goes on."""
    rig.start("one")
    job, mark = paused(rig)
    rig.start("two")
    before = rig.redis.time()[0]
    wait_until(lambda: rig.redis.time()[0] - before > 4 * rig.heartbeat_s, "two leases to pass")
    assert (rig.state(job), rig.attempt(job), len(processes_with(mark))) == ("paused", 1, 4)
    assert job.resume().outcome == "resumed"
    rig.wait_state(job, "running")
    assert job.kill().outcome == "killed"


@pytest.mark.parametrize("way", WAYS)
def test_attack_36_ten_thousand_renewals_do_not_block_and_the_newest_counts(node_name: str, way: str) -> None:
    """All renewals of a long pause are read: no write blocks, and after the pause the job runs on the newest one."""

    async def scenario(rig: SlotRig) -> None:
        held = on(rig, way)
        attempt, mark = await held.running(python(COUNTERS))
        assert (await attempt.freeze(True)).done
        for number in range(RENEWALS):
            held.slot.renew(boottime_ns() + 20_000_000_000 + number)
        assert (await attempt.freeze(False)).done
        assert marked(mark)
        assert not attempt.verdict.done()
        attempt.kill()
        assert (await held.finish(attempt)).verdict.proved
        await held.slot.close()

    in_rig(node_name, scenario)
