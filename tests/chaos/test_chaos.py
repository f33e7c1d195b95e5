"""Acceptance 1 of the queue: whatever dies, stops or jumps, each job ends once and never runs twice at a time."""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress

import pytest

from runner.wire.event import EventType
from runner.wire.states import END_STATES
from tests.chaos import verdict
from tests.chaos.crop import Crop
from tests.chaos.faults import Weather
from tests.scale import clocks
from tests.scale.fleet import Fleet, running
from tests.support.wait import wait_until

FULL = os.environ.get("RINGFENCE_TEST_FULL") == "1"
SEED = int(os.environ.get("RINGFENCE_TEST_SEED") or random.SystemRandom().randrange(2**32))
AGENTS, REAL_AGENTS, REAL = ("abcd", "xy", 0.06) if FULL else ("abc", "", 0.0)
JOBS, PER_S = (5200, 60.0) if FULL else (200, 60.0)
MEAN_S = 0.7 if FULL else 0.3
OUTAGES_S = (5.0, 30.0) if FULL else ()
SETTLE_S = 150.0 if FULL else 40.0


def unended(fleet: Fleet, crop: Crop) -> list[str]:
    """Return the jobs that have not ended."""
    pipe = fleet.redis.pipeline(transaction=False)
    for job in crop.jobs:
        pipe.hget(fleet.keys.job(job), "rf_state")
    return [
        job for job, state in zip(crop.jobs, pipe.execute(), strict=True) if (state or b"").decode() not in END_STATES
    ]


@pytest.mark.alone
@pytest.mark.endurance
@pytest.mark.timeout(600)
def test_every_job_ends_once_whatever_happens() -> None:
    """One end state and one end event each, no two attempts at a time, kills win over retries, nothing stays behind."""
    print(f"seed {SEED}: RINGFENCE_TEST_SEED={SEED} repeats the choices")  # noqa: T201 - shown when the test fails
    undo = clocks.skewed()
    try:
        with running(moving=True) as fleet:
            found, told = storm(fleet)
    finally:
        undo()
    print(told)  # noqa: T201 - the figures of a long run
    print("\n".join(found))  # noqa: T201 - as above
    assert not found, f"{len(found)} complaints, seed {SEED}"


def storm(fleet: Fleet) -> tuple[list[str], str]:
    """Run it; return the complaints, and the figures."""
    for name in AGENTS:
        fleet.start(name, wait=False, RINGFENCE_QUEUES="agents")
    for name in REAL_AGENTS:
        fleet.start(name, simulated=False, wait=False, RINGFENCE_QUEUES="real")
    fleet.wait_all_up()
    crop = Crop(fleet, SEED, JOBS, PER_S, real=REAL)
    weather = Weather(fleet, SEED)
    thread = crop.start()
    for outage_s in OUTAGES_S:
        until = len(crop.jobs) + JOBS // 3
        weather.throw(lambda until=until: len(crop.jobs) >= until or crop.sown.is_set(), MEAN_S)  # type: ignore[misc]  # late binding
        weather.away(outage_s)
    weather.throw(crop.sown.is_set, MEAN_S)
    weather.calm()
    thread.join()
    assert crop.error is None, crop.error
    _settle(fleet, crop)
    left = _left(fleet)
    found = verdict.complaints(crop, verdict.told(fleet.redis), verdict.awake(fleet.lines(), weather.naps), fleet.redis)
    signed = {event.job for event in fleet.app.events() if event.type == EventType.JOB_ENDED and event.verified}
    found += [f"{job}: no node of the fleet signed its end" for job in crop.jobs if job not in signed]
    ends = Counter(job.kind for job in crop.jobs.values())
    told = f"{len(crop.jobs)} jobs {dict(ends)}, {crop.duplicates} duplicates refused, faults {dict(weather.counts)}"
    return [*found, *(f"left behind: {key}" for key in left)], told


def _settle(fleet: Fleet, crop: Crop) -> None:
    """Wait until every job has ended; what has not by then is among the complaints."""
    with suppress(AssertionError):
        wait_until(lambda: not unended(fleet, crop), "every job to end", SETTLE_S)


def _left(fleet: Fleet) -> list[str]:
    try:
        wait_until(lambda: not verdict.leftovers(fleet.redis), "nothing to be left", 10.0)
    except AssertionError:
        return verdict.leftovers(fleet.redis)
    return []
