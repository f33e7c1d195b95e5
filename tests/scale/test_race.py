"""Acceptance 2 of the queue: kills by id and by tenant while four agents work; each job ran or never started."""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from runner import App, request
from runner.control import Order, kill_job
from runner.wire.receipt import Receipt
from runner.wire.spec import JobSpec
from runner.wire.states import END_STATES
from tests.scale.fleet import TASK, Fleet, running
from tests.scale.floor import Line
from tests.support.wait import wait_until

FULL = os.environ.get("RINGFENCE_TEST_FULL") == "1"
SEED = int(os.environ.get("RINGFENCE_TEST_SEED") or random.SystemRandom().randrange(2**32))
JOBS = 3000 if FULL else 200
BATCH = 50
OTHER = "rival"
PROVED = {"killed", "killed_before_start", "already_ended"}


@pytest.mark.endurance
@pytest.mark.timeout(300)
def test_k02_half_of_three_thousand_jobs_killed_by_id_and_a_tenant_cut_off() -> None:
    """No job is lost, none that was killed before its start ever ran, none ran twice, and receipts tell it truly."""
    print(f"seed {SEED}")  # noqa: T201 - shown when the test fails
    chance = random.Random(SEED)
    with running() as fleet:
        for name in "abcd":
            fleet.start(name, heartbeat_s=5.0, wait=False)
        fleet.wait_all_up()
        specs, receipts = storm(fleet, chance)
        state = states(fleet, specs)
        runs: dict[str, list[Line]] = defaultdict(list)
        for line in fleet.lines():
            runs[line.job].append(line)
        ends = Counter(
            event.job for event in [*fleet.app.events(), *fleet.app.events(tenant=OTHER)] if event.type == "job.ended"
        )
    outcomes = Counter(receipt.outcome for receipt in receipts.values())
    print(f"{len(specs)} jobs: {dict(Counter(state.values()))}; receipts {dict(outcomes)}")  # noqa: T201 - figures
    assert set(state.values()) == {"finished", "killed"}
    assert {job: ends[job] for job in state if ends[job] != 1} == {}
    assert [job for job in state if len(runs[job]) not in {0, 2}] == [], "a job ran twice, or its run has no end"
    assert [
        job for job, end in state.items() if end == "finished" and [x.how for x in runs[job]] != ["-", "done"]
    ] == []
    assert set(outcomes) <= PROVED
    assert [job for job, receipt in receipts.items() if receipt.outcome == "killed_before_start" and runs[job]] == []
    assert [job for job, receipt in receipts.items() if receipt.outcome == "killed" and not runs[job]] == []
    unkilled = [spec.id for spec in specs if spec.id not in receipts and spec.tenant != OTHER]
    assert {state[job] for job in unkilled} == {"finished"}
    rivals = Counter(state[spec.id] for spec in specs if spec.tenant == OTHER and not spec.tags)
    assert rivals["killed"], "the cutoff came too late to hit anything"
    assert {state[spec.id] for spec in specs if spec.tags} == {"finished"}, "a job that came after the cutoff was hit"


def storm(fleet: Fleet, chance: random.Random) -> tuple[list[JobSpec], dict[str, Receipt]]:
    """Enqueue, kill half by id from eight threads, cut the other tenant off in the middle; wait for every end."""
    client = fleet.app.client()
    specs: list[JobSpec] = []
    futures: dict[str, Future[Receipt]] = {}

    def kill(job: str) -> Receipt:
        return kill_job(client, job, Order(wait_s=30.0))

    with ThreadPoolExecutor(8) as pool, App(home=fleet.home, tenant=OTHER) as rival:
        for start in range(0, JOBS, BATCH):
            if start == JOBS // 2:
                got = rival.kill(tenant=OTHER, wait=30.0)
                assert [receipt for receipt in got if receipt.outcome not in PROVED] == []
            batch = [plan(chance, after=start >= JOBS // 2) for _ in range(BATCH)]
            client.enqueue(batch)
            specs += batch
            own = [spec for spec in batch if spec.tenant != OTHER]
            for spec in chance.sample(own, min(len(own), BATCH // 2)):
                futures[spec.id] = pool.submit(kill, spec.id)
        receipts = {job: future.result() for job, future in futures.items()}
    wait_until(lambda: set(states(fleet, specs).values()) <= END_STATES, "every job to end", 120.0)
    return specs, receipts


def plan(chance: random.Random, *, after: bool) -> JobSpec:
    """Return a job of one of the two tenants; one of the other tenant that comes after its cutoff is marked."""
    kwargs = {"hold_ms": chance.choice((5, 40, 120, 200))}
    if chance.random() < 0.25:
        tags = {"after": "yes"} if after else {}
        return request.build({"tenant": OTHER, "tags": tags}, task=TASK, kwargs=kwargs)
    return request.build({}, task=TASK, kwargs=kwargs)


def states(fleet: Fleet, specs: list[JobSpec]) -> dict[str, str]:
    """Return each job's stored state."""
    pipe = fleet.redis.pipeline(transaction=False)
    for spec in specs:
        pipe.hget(fleet.keys.job(spec.id), "rf_state")
    return {spec.id: (state or b"").decode() for spec, state in zip(specs, pipe.execute(), strict=True)}
