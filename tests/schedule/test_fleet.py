"""Time on a real fleet: jobs that are put off are killed, run once, and not early (A-K01, A-L02); occurrences run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from runner import Grants
from runner.wire import schedule as schedules
from runner.wire.times import parse_ms
from tests.support.rig import Rig, ends_of, rigged
from tests.support.wait import wait_until

#: Longer than the agents' leases (2 s).
AHEAD_S = 2.5
JOBS = 10
COMPUTE = "import time\nend = time.time() + 2.5\nn = 0\nwhile time.time() < end: n += 1"


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A store and a home; the test says how many slots each node has."""
    with rigged(slots=request.param) as found:
        yield found
        found.app.close()


def mark(rig: Rig, path: Path) -> tuple[list[str], Grants]:
    """A command that adds the present time to a file, and the grant it needs."""
    return ["sh", "-c", f"date +%s%3N >> {path}"], Grants(write=(str(rig.work),))


def marks(path: Path) -> list[int]:
    """The times in a file, in Unix milliseconds."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize("rig", [1], indirect=True)
def test_k01_a_job_that_is_put_off_is_killed_at_once(rig: Rig) -> None:
    """One slot is busy; a waiting job and one that is put off are killed: at once, once, and they never run."""
    rig.start("one")
    busy = rig.command("sleep", "1")
    rig.wait_state(busy, "running")
    paths = [rig.work / name for name in ("j2", "j3", "j4")]
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    waits, goes_on = (rig.app.command(words, grants=grant) for words, grant in (mark(rig, path) for path in paths[:2]))
    words, grant = mark(rig, paths[2])
    put_off = rig.app.command(words, grants=grant, eta=due)
    assert rig.state(put_off) == "scheduled"
    for job in (waits, put_off):
        asked = time.monotonic()
        receipt = job.kill()
        assert (receipt.outcome, receipt.survivors) == ("killed_before_start", 0)
        assert time.monotonic() - asked < 1
    assert rig.redis.exists(rig.keys.due(), rig.keys.registry("scheduled", "agents")) == 0
    assert goes_on.outcome(20).state == busy.outcome(20).state == "finished"
    wait_until(lambda: datetime.now(UTC) > due + timedelta(seconds=0.3), "the due time to pass")
    assert [len(marks(path)) for path in paths] == [0, 1, 0]
    found = ends_of(rig, [busy, waits, goes_on, put_off])
    assert [found[job.id] for job in (waits, put_off)] == [("killed", 1), ("killed", 1)]


@pytest.mark.parametrize("rig", [2], indirect=True)
def test_l02_due_later_than_the_lease_runs_once_and_not_early(rig: Rig) -> None:
    """Jobs due after several leases run once each, none early, none late; long computations are not given out again."""
    for name in ("a", "b"):
        rig.start(name)
    path = rig.work / "l02"
    words, grant = mark(rig, path)
    long = [rig.command("python3", "-c", COMPUTE) for _ in range(2)]
    view = rig.app.schedule("each", ["true"], every=1, tags={"by": "each"})
    due = datetime.now(UTC) + timedelta(seconds=AHEAD_S)
    jobs = [rig.app.command(words, grants=grant, eta=due) for _ in range(JOBS)]
    assert Counter(rig.state(job) for job in jobs) == {"scheduled": JOBS}
    for job in (*jobs, *long):
        assert job.outcome(25).state == "finished"
    rig.app.unschedule("each")
    due_ms = round(due.timestamp() * 1000)
    ran = marks(path)
    assert len(ran) == JOBS
    assert min(ran) >= due_ms
    queued = [
        event for event in rig.app.events() if event.type == "job.queued" and event.job in {job.id for job in jobs}
    ]
    assert len(queued) == JOBS
    # When it is handed out, by the store's clock: how soon it starts then is up to the slots and the machine.
    assert all(due_ms <= (parse_ms(event.at) or 0) < due_ms + 2000 for event in queued)
    assert Counter(ends_of(rig, [*jobs, *long]).values()) == {("finished", 1): JOBS + 2}
    assert {rig.attempt(job) for job in long} == {1}
    occurrences(rig, view.next_at or "")


def occurrences(rig: Rig, first: str) -> None:
    """Each second's occurrence ran once, under the id that follows from its time, and its end is verified."""
    first_ms = parse_ms(first)
    assert first_ms is not None
    wait_until(lambda: not rig.redis.exists(rig.keys.due(), rig.keys.queue("agents")), "nothing to wait any more")
    found = [view.job for view in rig.app.jobs(limit=200) if view.tags == {"by": "each"}]
    assert len(found) >= AHEAD_S - 1
    assert sorted(found) == [schedules.occurrence_id("main", "each", first_ms + 1000 * n) for n in range(len(found))]
    handles = [rig.app.job(job) for job in found]
    assert {handle.outcome(10).state for handle in handles} == {"finished"}
    assert all(handle.status().verified for handle in handles)
