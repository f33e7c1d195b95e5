"""Kills at every moment of a job's life: it ends once, as killed, and its slot is free (acceptance 4, A-K01, A-K02)."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner.job import Job
from runner.wire.receipt import Receipt
from tests.support.rig import Rig, ends_of, rigged
from tests.support.wait import pause, wait_until

SEED = random.SystemRandom().randrange(2**32)
ROUNDS = 300
AT_A_TIME = 2
LONGEST_MS = 60


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """Two agents of three slots, and a folder for markers."""
    with rigged(slots=3) as found:
        found.start("a")
        found.start("b")
        yield found


@pytest.fixture(autouse=True)
def few_connections(rig: Rig) -> Iterator[None]:
    """Threads open connections to the store; none is left after a test."""
    yield
    rig.app.close()


def confirmed(receipt: Receipt) -> bool:
    """Return whether this is a signed proof that nothing of the job is left."""
    return receipt.outcome in {"killed", "killed_before_start"} and receipt.survivors == 0 and bool(receipt.signature)


@pytest.mark.timeout(180)
def test_k02_three_hundred_kills_at_random_moments(rig: Rig) -> None:
    """Acceptance 4: one end state, one end event, a signed receipt and a free slot for every job, whenever hit."""
    print(f"seed {SEED}")  # noqa: T201 - shown when the test fails
    chance = random.Random(SEED)
    pauses = [chance.uniform(0, LONGEST_MS) / 1000 for _ in range(ROUNDS)]
    jobs: list[Job[None]] = []
    guard = threading.Lock()

    def one(index: int) -> tuple[Receipt, Path, int]:
        job, marker = rig.pulse(f"race-{index}")
        with guard:
            jobs.append(job)
        pause(pauses[index])
        receipt = job.kill()
        return receipt, marker, marker.stat().st_size

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = list(pool.map(one, range(ROUNDS)))

    assert [receipt for receipt, _, _ in found if not confirmed(receipt)] == []
    grown = [marker for _, marker, size in found if marker.stat().st_size != size]
    assert grown == [], "a pulse after the receipt"
    ran_anyway = [m for receipt, m, size in found if receipt.outcome == "killed_before_start" and size]
    assert ran_anyway == []
    assert Counter(ends_of(rig, jobs).values()) == Counter({("killed", 1): ROUNDS})
    rig.wait_idle()
    outcomes = Counter(receipt.outcome for receipt, _, _ in found)
    print(outcomes)  # noqa: T201 - for the log
    assert len(outcomes) == 2, f"the kills did not cover both sides of the start: {outcomes}"


def test_k01_a_waiting_job_is_killed_at_once_and_never_runs(rig: Rig) -> None:
    """While every slot is taken, a kill of a waiting job is confirmed in under a second; its neighbours go on."""
    blockers = [rig.command("sleep", "20") for _ in range(6)]
    for job in blockers:
        rig.wait_state(job, "running")
    (second, marker_2), (third, marker_3) = rig.pulse("k01-2"), rig.pulse("k01-3")
    begun = time.monotonic()
    receipt = second.kill()
    assert time.monotonic() - begun < 1
    assert (receipt.outcome, confirmed(receipt)) == ("killed_before_start", True)
    for job in blockers:
        assert job.kill().outcome == "killed"
    wait_until(lambda: marker_3.stat().st_size > 0, "the third job to run")
    assert third.kill().outcome == "killed"
    assert marker_2.stat().st_size == 0
    assert set(ends_of(rig, [*blockers, second, third]).values()) == {("killed", 1)}
    rig.wait_idle()


@pytest.mark.parametrize("by", ["tag", "all"])
@pytest.mark.timeout(120)
def test_k02_selectors_hit_waiting_claimed_and_running_jobs(rig: Rig, by: str) -> None:
    """A kill by tag or of all, in the middle of an enqueue storm, ends every job it may hit, and no later one."""
    print(f"seed {SEED}")  # noqa: T201 - for the log
    chance = random.Random(SEED)
    for round_number in range(10):
        tag = f"storm={by}-{round_number}"
        jobs = [rig.pulse(f"{by}-{round_number}-{i}", tags={"storm": f"{by}-{round_number}"})[0] for i in range(12)]
        pause(chance.uniform(0, LONGEST_MS) / 1000)
        receipts = rig.app.kill(tag=tag) if by == "tag" else rig.app.kill(all=True)
        assert [receipt for receipt in receipts if not confirmed(receipt)] == []
        assert sorted(receipt.job for receipt in receipts) == sorted(job.id for job in jobs)
        assert set(ends_of(rig, jobs).values()) == {("killed", 1)}
        later = rig.command("true", tags={"storm": f"{by}-{round_number}"})
        assert later.outcome(20).state == "finished"
    rig.wait_idle()


def test_k02_a_storm_of_jobs_each_killed_once_by_two_clients(rig: Rig) -> None:
    """Two kills of one job at the same moment: both are answered truly, and the job ends once."""
    jobs = [rig.pulse(f"twice-{index}")[0] for index in range(20)]
    with ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda job: job.kill(), [job for job in jobs for _ in range(2)]))
    assert {receipt.outcome for receipt in receipts} <= {"killed", "killed_before_start", "already_ended"}
    assert all(receipt.state == "killed" for receipt in receipts)
    assert Counter(ends_of(rig, jobs).values()) == Counter({("killed", 1): 20})
    rig.wait_idle()


@pytest.mark.parametrize("by", ["id", "all"])
def test_a_node_that_may_serve_the_job_signs_its_kill(rig: Rig, by: str) -> None:
    """Many kills at once of jobs that wait for one busy node: each is confirmed by that node, not by the idle one."""
    name = rig.nodes["a"].name
    blockers = [rig.command("sleep", "30", node=name) for _ in range(rig.slots)]
    for job in blockers:
        rig.wait_state(job, "running")
    jobs = [rig.command("true", node=name) for _ in range(24)]
    if by == "id":
        with ThreadPoolExecutor(12) as pool:
            receipts = list(pool.map(lambda job: job.kill(), jobs))
    else:
        receipts = [receipt for receipt in rig.app.kill(all=True) if receipt.outcome != "killed"]
    assert len(receipts) == len(jobs)
    assert {(receipt.outcome, receipt.node, confirmed(receipt)) for receipt in receipts} == {
        ("killed_before_start", name, True)
    }
    assert {job.outcome(5).state for job in jobs} == {"killed"}
    for job in blockers:
        job.kill()
    rig.wait_idle()
