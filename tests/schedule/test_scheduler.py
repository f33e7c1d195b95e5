"""Who enqueues occurrences, when, and how often: once, whatever happens to the schedulers and their clocks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent import scheduler
from node_agent.cancelling import end_all
from node_agent.scheduler import LATE_MS, Scheduler, Step, step
from node_agent.scheduler_store import Look, StoredSchedule, Tick, TimeStore
from runner.wire import schedule as schedules
from runner.wire.schedule import Missed, Schedule
from runner.wire.spec import JobSpec
from tests.agent.build import signer
from tests.schedule.clock import KEYS, Keeper, put, schedule, signed
from tests.store.desk import Desk
from tests.support.valkey import Valkey
from tests.support.wait import apause, await_until

KEY = signer()
MINUTE_MS = 60_000
NOW_MS = 1_900_000_000_000


@pytest.fixture
def keepers(valkey: Valkey) -> Iterator[Callable[[str], Keeper]]:
    """Makes schedulers by name."""
    with ExitStack() as stack:
        yield lambda member: stack.enter_context(Keeper(valkey, member))


def lapse(desk: Desk) -> None:
    """Let the leadership end, as if the leader had been silent for long."""
    desk.redis.hset(KEYS.leader(), "until", "1")


def take(keeper: Keeper, tick: Tick, look: Look, what: Schedule) -> str:
    """Enqueue the occurrence of a tick as the scheduler does."""
    due = schedules.next_due(what, tick.due_ms)
    job = schedules.occurrence(what, tick.due_ms)
    return keeper.run(keeper.store.enqueue(tick, due, look.token, job, signed(KEY, what)))


def test_one_leads_until_it_gives_up_or_lapses(desk: Desk, keepers: Callable[[str], Keeper]) -> None:
    """The first one leads and keeps leading; another follows at once when it leaves, or once it is silent too long."""
    first, second = keepers("a"), keepers("b")
    assert first.look().leads
    assert not second.look().leads
    assert second.look().leader == "a"
    token = first.look().token
    assert not first.look(0).leads
    taken = second.look()
    assert (taken.leads, taken.token) == (True, token + 1)
    lapse(desk)
    again = second.look()
    assert (again.leads, again.token) == (True, token + 2), "a leadership that lapsed is a new one"


def test_a_leadership_outlives_no_clock_that_goes_back(desk: Desk, keepers: Callable[[str], Keeper]) -> None:
    """Taken before Redis TIME went an hour back, it would last for an hour: it counts as lapsed."""
    first, second = keepers("a"), keepers("b")
    token = first.look().token
    desk.redis.hincrby(KEYS.leader(), "until", 3_600_000)
    taken = second.look()
    assert (taken.leads, taken.token) == (True, token + 1)
    assert not first.look().leads


def test_only_the_leader_is_told_what_is_due(desk: Desk, keepers: Callable[[str], Keeper]) -> None:
    """The others get no schedule."""
    tick = put(desk, KEY, schedule(), 1000)
    first, second = keepers("a"), keepers("b")
    assert first.look().ticks == (tick,)
    assert second.look().ticks == ()


def test_an_occurrence_and_the_move_of_its_schedule_are_one(desk: Desk, keepers: Callable[[str], Keeper]) -> None:
    """The job is in its lane with its own id, and the schedule is due next; a second call changes nothing."""
    what = schedule()
    tick = put(desk, KEY, what, 5000)
    keeper = keepers("a")
    look = keeper.look()
    assert take(keeper, tick, look, what) == "done"
    assert desk.waiting() == [schedules.occurrence_id("main", "tick", 5000)]
    assert desk.redis.zscore(KEYS.ticks(), "main/tick") == 6000
    assert take(keeper, tick, look, what) == "stale"
    assert len(desk.waiting()) == 1


def test_a_leader_that_was_stopped_enqueues_nothing(desk: Desk, keepers: Callable[[str], Keeper]) -> None:
    """It saw what was due, was stopped, another took over: neither the old tick nor a new one is its to take."""
    one, two = schedule("one"), schedule("two")
    ticks = [put(desk, KEY, one, 5000), put(desk, KEY, two, 5000)]
    stopped, successor = keepers("a"), keepers("b")
    old = stopped.look()
    lapse(desk)
    new = successor.look()
    assert take(successor, ticks[0], new, one) == "done"
    assert take(stopped, ticks[0], old, one) == "stale"
    assert take(stopped, ticks[1], old, two) == "stale", "its leadership is over, although nobody took this tick yet"
    assert stopped.run(stopped.store.move(ticks[1], 9000, old.token)) == "stale"
    assert take(successor, ticks[1], new, two) == "done"
    assert len(desk.waiting()) == len(set(desk.waiting())) == 2


def test_a_job_that_is_known_already_is_left_out(desk: Desk, keepers: Callable[[str], Keeper]) -> None:
    """A store that was restored from a copy may hand out a tick again: the id is the same, and one job stays."""
    what = schedule()
    tick = put(desk, KEY, what, 5000)
    keeper = keepers("a")
    assert take(keeper, tick, keeper.look(), what) == "done"
    put(desk, KEY, what, 5000)
    assert take(keeper, tick, keeper.look(), what) == "skipped"
    assert len(desk.waiting()) == 1
    assert desk.redis.zscore(KEYS.ticks(), "main/tick") == 6000


@pytest.mark.parametrize("op", ["pause", "remove"])
def test_what_was_paused_or_removed_meanwhile_is_not_enqueued(
    desk: Desk, keepers: Callable[[str], Keeper], op: str
) -> None:
    """The operator's word between look and tick wins, and the schedule does not come back."""
    what = schedule()
    tick = put(desk, KEY, what, 5000)
    keeper = keepers("a")
    look = keeper.look()
    document: dict[str, object] = {"op": op, "name": "tick", "member": "main/tick", "next": 0}
    desk.script("schedule", [KEYS.schedules("main"), KEYS.ticks(), KEYS.leader()], document)
    assert take(keeper, tick, look, what) == "stale"
    assert desk.waiting() == []
    assert desk.redis.exists(KEYS.ticks()) == 0


def test_attack_56_equal_names_of_two_tenants_are_two_schedules(desk: Desk, keepers: Callable[[str], Keeper]) -> None:
    """Pausing one leaves the other; their occurrences have ids of their own."""
    ours, theirs = schedule(), schedule(tenant="acme")
    put(desk, KEY, ours, 5000)
    tick = put(desk, KEY, theirs, 5000)
    document: dict[str, object] = {"op": "pause", "name": "tick", "member": "main/tick", "next": 0}
    desk.script("schedule", [KEYS.schedules("main"), KEYS.ticks(), KEYS.leader()], document)
    keeper = keepers("a")
    look = keeper.look()
    assert look.ticks == (tick,)
    assert take(keeper, tick, look, theirs) == "done"
    assert desk.waiting() == [schedules.occurrence_id("acme", "tick", 5000)]


def test_a_schedule_that_nobody_can_read_stops_no_other(desk: Desk, valkey: Valkey) -> None:
    """Text of another form, another name and a lost record are left out; the good one is enqueued."""
    now = int(desk.redis.time()[0]) * 1000
    good = put(desk, KEY, schedule("good", start_ms=now, every_ms=366 * 86_400_000), now)
    for name, value in (
        ("junk", "0 sig {}"),
        ("none", ""),
        ("other", f"0 s {signed(KEY, schedule()).record.decode()}"),
    ):
        desk.redis.hset(KEYS.schedules("main"), name, value)
        desk.redis.zadd(KEYS.ticks(), {f"main/{name}": 1})
    desk.redis.zadd(KEYS.ticks(), {"main/lost": 1, "no tenant": 1})

    async def serve(store: TimeStore) -> None:
        async with running(Scheduler(store)):
            await await_until(lambda: desk.waiting(), "the good one to be enqueued")
            await await_until(lambda: desk.redis.zcount(KEYS.ticks(), 0, now) == 0, "all ticks to move on")

    with Keeper(valkey, "a") as keeper:
        keeper.drive(serve)
    assert len(desk.waiting()) == 1
    assert desk.redis.zscore(KEYS.ticks(), good.member) > now
    assert desk.redis.zscore(KEYS.ticks(), "main/lost") is None


@contextlib.asynccontextmanager
async def running(*those: Scheduler) -> AsyncIterator[None]:
    """Run schedulers while the block runs."""
    tasks = [asyncio.get_running_loop().create_task(each.run()) for each in those]
    try:
        yield
    finally:
        await end_all(tasks)
        for each in those:
            await each.stop()


def test_the_leader_comes_to_the_moment_and_is_woken_for_it(
    valkey: Valkey, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps until the next due time, and a job that is put off for less wakes it: no waiting for the next look."""
    monkeypatch.setattr(scheduler, "LOOK_S", 60.0)

    async def serve(store: TimeStore) -> None:
        leader = Scheduler(store)
        async with running(leader):
            await await_until(lambda: leader.leads, "it to lead")
            for _ in range(2):
                job = desk.enqueue(due=int(float(desk.redis.time()[0]) + 1) * 1000 + 200)
                assert desk.waiting() == []
                await await_until(lambda: desk.waiting() == [job], "the job to be moved")  # noqa: B023 - awaited here
                desk.redis.delete(KEYS.queue("agents"))

    with Keeper(valkey, "a") as keeper:
        keeper.drive(serve)


class Simulated:
    """A store without Redis, whose clock the test sets."""

    def __init__(self, what: Schedule, due_ms: int) -> None:
        self.now_ms = due_ms
        self.stored = signed(KEY, what)
        self.due_ms: int | None = due_ms
        self.jobs: list[JobSpec] = []

    async def look(self, lease_ms: int) -> Look:
        due = self.due_ms if self.due_ms is not None and self.due_ms <= self.now_ms else None
        ticks = () if due is None else (Tick("main/tick", due),)
        wait = None if self.due_ms is None or ticks else self.due_ms - self.now_ms
        return Look(0, False, wait, True, 1, self.now_ms, ticks, "a")

    async def schedule(self, tick: Tick) -> StoredSchedule:
        return self.stored

    async def enqueue(self, tick: Tick, next_ms: int | None, token: int, job: JobSpec, origin: StoredSchedule) -> str:
        self.jobs.append(job)
        return await self.move(tick, next_ms, token)

    async def move(self, tick: Tick, next_ms: int | None, token: int) -> str:
        self.due_ms = next_ms
        return "done"

    async def woken(self, timeout_s: float) -> bool:
        await apause(timeout_s)
        return False


def dues(what: Schedule, moments: list[int]) -> list[int]:
    """The due times of the jobs that a scheduler enqueues while the store's clock shows these moments one by one."""
    store = Simulated(what, moments[0])

    async def pass_by() -> None:
        async with running(Scheduler(store)):
            for moment in moments:
                store.now_ms = moment
                await await_until(lambda: store.due_ms is None or store.due_ms > store.now_ms, "what is due to be done")

    asyncio.run(pass_by())
    return [job.not_before_ms for job in store.jobs]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers that look every few milliseconds."""
    monkeypatch.setattr(scheduler, "LOOK_S", 0.002)


def test_a_clock_that_jumps_doubles_and_loses_nothing(quick: None) -> None:
    """An hour ahead, two back, on again: with `all` each time comes once, in order, and none before its time."""
    what = schedule(every_ms=10 * MINUTE_MS, missed="all")
    start = NOW_MS - NOW_MS % (10 * MINUTE_MS)
    hour = 60 * MINUTE_MS
    found = dues(
        what, [start, start + hour, start - hour, start + MINUTE_MS, start + hour, start + hour + 10 * MINUTE_MS]
    )
    assert found == [start + n * 10 * MINUTE_MS for n in range(8)]


@pytest.mark.parametrize(("missed", "made_up"), [("skip", []), ("once", [120]), ("all", [0, 30, 60, 90, 120])])
def test_missed_times_follow_the_rule(quick: None, missed: Missed, made_up: list[int]) -> None:
    """Every 30 minutes, no scheduler for 2 hours 5 minutes: nothing, the newest, or each."""
    what = schedule(every_ms=30 * MINUTE_MS, missed=missed)
    start = NOW_MS - NOW_MS % (30 * MINUTE_MS)
    store = Simulated(what, start)
    store.now_ms = start + 125 * MINUTE_MS

    async def catch_up() -> None:
        async with running(Scheduler(store)):
            await await_until(lambda: store.due_ms == start + 150 * MINUTE_MS, "the schedule to be due next")

    asyncio.run(catch_up())
    assert [(job.not_before_ms - start) // MINUTE_MS for job in store.jobs] == made_up


@pytest.mark.parametrize("missed", ["skip", "once", "all"])
def test_a_time_that_would_be_void_is_not_made_up_for(missed: Missed) -> None:
    """Jobs live a minute, nobody enqueued for an hour: at most those of the last minute come."""
    what = schedule(every_ms=20_000, expires_ms=MINUTE_MS, missed=missed)
    start = NOW_MS - NOW_MS % 20_000
    now = start + 60 * MINUTE_MS + 5000
    first = step(what, start, now).enqueue_ms
    assert first == {"skip": now - 5000, "once": now - 5000, "all": now - 45_000}[missed]
    seldom = schedule(every_ms=60 * MINUTE_MS, expires_ms=MINUTE_MS, missed=missed)
    start = NOW_MS - NOW_MS % (60 * MINUTE_MS)
    assert step(seldom, start, start + 2 * MINUTE_MS) == Step(None, start + 60 * MINUTE_MS)


@given(
    missed=st.sampled_from(["skip", "once", "all"]),
    every_s=st.integers(1, 100_000),
    late_ms=st.integers(0, 10_000_000),
    cron=st.sampled_from([None, "*/7 * * * *", "0 3 * * *", "0 0 1 * *"]),
)
def test_a_step_never_repeats_and_never_runs_ahead(
    missed: Missed, every_s: int, late_ms: int, cron: str | None
) -> None:
    """What is enqueued is a time of the rule, not before the due one nor after now; the next is later than both."""
    rule: dict[str, Any] = {"cron": cron, "zone": "Europe/Berlin"} if cron else {"every_ms": 1000 * every_s}
    what = schedule(missed=missed, **rule)
    due = schedules.next_due(what, NOW_MS)
    assert due is not None
    now = due + late_ms
    then = step(what, due, now)
    if then.enqueue_ms is not None:
        assert due <= then.enqueue_ms <= now
        assert schedules.is_due(what, then.enqueue_ms)
    assert then.next_ms is not None
    assert then.next_ms > (then.enqueue_ms or now if missed == "all" else now)
    if late_ms <= LATE_MS:
        assert then.enqueue_ms is not None, "a time that is hardly past is never left out"


def test_a_schedule_ends(quick: None) -> None:
    """After its end nothing is due any more."""
    start = NOW_MS - NOW_MS % 1000
    what = dataclasses.replace(schedule(missed="all"), end_ms=start + 2000)
    assert dues(what, [start, start + 10_000]) == [start, start + 1000, start + 2000]


def test_three_schedulers_enqueue_each_time_once(valkey: Valkey, desk: Desk) -> None:
    """Three at work, the leader changing all the while: each second once, in order, none left out."""
    now = int(float(desk.redis.time()[0])) * 1000
    what = schedule(missed="all", end_ms=now)
    put(desk, KEY, what, now - 200_000)

    async def serve(store: TimeStore) -> None:
        others = [TimeStore(store._client, name) for name in ("b", "c")]
        async with running(*(Scheduler(each) for each in (store, *others))):
            while desk.redis.exists(KEYS.ticks()):
                lapse(desk)
                await apause(0.01)

    with Keeper(valkey, "a") as keeper:
        keeper.drive(serve)
    wanted = [schedules.occurrence_id("main", "tick", due) for due in range(now - 200_000, now + 1, 1000)]
    assert desk.waiting() == wanted
    assert Counter(kind for kind, _ in desk.events()) == {"job.queued": len(wanted)}
