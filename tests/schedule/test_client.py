"""The client's side of time: options, schedules in the store, and what lists show."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest

from runner import Grants, signing
from runner.errors import InsideJobError, UsageError
from runner.request import JobOptions, build
from runner.task import Task
from runner.wire import schedule as schedules
from runner.wire.envelope import Domain
from runner.wire.schedule import Schedule
from tests.client import sample
from tests.client.paper import KEYS, Fleet, on_paper
from tests.support.valkey import Valkey

NOW_MS = 1_900_000_000_000
NOW = datetime.fromtimestamp(NOW_MS / 1000, UTC)
DAY = timedelta(days=1)


@pytest.fixture
def fleet(valkey: Valkey) -> Iterator[Fleet]:
    """A home with keys, an app and an empty store."""
    with on_paper(valkey) as made:
        yield made


def window(**options: object) -> tuple[int, int]:
    """From when until when a job may start, in milliseconds from now."""
    spec = build(JobOptions(**options), argv=["true"], now_ms=NOW_MS)  # type: ignore[typeddict-item]  # given by name
    return spec.not_before_ms - NOW_MS, spec.not_after_ms - NOW_MS


def test_times_of_a_job() -> None:
    """ETA and countdown move the start, expires the end; by default there are 7 days between them."""
    week = 7 * 86_400_000
    berlin = timezone(timedelta(hours=1))
    assert window() == (0, week)
    assert window(countdown=1.5) == (1500, 1500 + week)
    assert window(eta=NOW + DAY) == (86_400_000, 86_400_000 + week)
    assert window(eta=(NOW + DAY).astimezone(berlin)) == (86_400_000, 86_400_000 + week)
    assert window(eta=NOW - DAY) == (0, week)
    assert window(expires=10) == (0, 10_000)
    assert window(countdown=5, expires=NOW + DAY) == (5000, 86_400_000)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"eta": NOW.replace(tzinfo=None)}, "zone"),
        ({"eta": 5}, "zone"),
        ({"eta": NOW, "countdown": 1}, "one of them"),
        ({"countdown": -1}, "countdown"),
        ({"countdown": 367 * 86_400}, "366 days"),
        ({"eta": NOW + 367 * DAY}, "366 days"),
        ({"countdown": 10, "expires": 5}, "later than"),
        ({"expires": 0}, "later than"),
        ({"expires": NOW - DAY}, "later than"),
        ({"expires": 400 * 86_400}, "390 days"),
        ({"expires": NOW.replace(tzinfo=None)}, "zone"),
    ],
)
def test_times_that_mean_nothing_are_refused(options: dict[str, object], word: str) -> None:
    """Naive times, both ways at once, an end before the start, and too far ahead."""
    with pytest.raises(UsageError, match=word):
        window(**options)


def stored(fleet: Fleet, name: str) -> Schedule:
    """A stored schedule, its signature checked."""
    value: object = fleet.store.hget(KEYS.schedules("main"), name)
    assert isinstance(value, bytes)
    paused, signature, text = value.split(b" ", 2)
    assert paused in {b"0", b"1"}
    assert signing.verify(fleet.app.client().signer.public, Domain.SCHEDULE, text, signature.decode())
    return schedules.decode(text)


def test_a_command_and_a_task_on_schedule(fleet: Fleet) -> None:
    """What is signed is the rule and the job with its own options; a task's options count."""
    app = fleet.app
    view = app.schedule(
        "poll", ["poll", "--once"], every=60, queue="slow", grants=Grants(memory="1G"), expires=30, missed="skip"
    )
    assert (view.state, view.task, view.queue, view.every_s, view.verified) == ("active", "poll", "slow", 60.0, True)
    poll = stored(fleet, "poll")
    assert (poll.template.argv, poll.template.schedule, poll.missed) == (("poll", "--once"), "poll", "skip")
    assert (poll.template.grants.memory_bytes, poll.expires_ms) == (1 << 30, 30_000)
    task = Task(sample.add.function, app.place, sample.add.options)
    app.schedule("sum", task, (1,), {"right": 2}, cron="0 3 * * *", zone="Europe/Berlin")
    template = stored(fleet, "sum").template
    assert (template.task, template.args, template.kwargs) == ("tests.client.sample:add", (1,), {"right": 2})
    assert template.retry.count == 2
    assert [view.name for view in app.schedules()] == ["poll", "sum"]
    assert fleet.store.zcard(KEYS.ticks()) == 2


def test_declaring_the_same_again_changes_nothing(fleet: Fleet) -> None:
    """A program may declare its schedules at every start; only a change is written."""
    app = fleet.app
    app.schedule("poll", ["poll"], every=60)
    before = stored(fleet, "poll")
    app.schedule("poll", ["poll"], every=60)
    assert stored(fleet, "poll") == before
    app.schedule("poll", ["poll"], every=61)
    assert stored(fleet, "poll").every_ms == 61_000
    assert fleet.store.hlen(KEYS.schedules("main")) == 1


def test_an_unsigned_schedule_is_shown_as_such_and_replaced(fleet: Fleet) -> None:
    """What another wrote into the store is not taken for ours."""
    app = fleet.app
    app.schedule("poll", ["poll"], every=60)
    value = fleet.store.hget(KEYS.schedules("main"), "poll")
    assert isinstance(value, bytes)
    fleet.store.hset(KEYS.schedules("main"), "poll", value.replace(b"60000", b"61000"))
    assert [view.verified for view in app.schedules()] == [False]
    assert app.schedule("poll", ["poll"], every=61).verified
    assert [view.verified for view in app.schedules()] == [True]


def test_pause_resume_and_remove(fleet: Fleet) -> None:
    """A paused one is due at no time and stays paused when it is replaced; a removed one leaves nothing."""
    app = fleet.app
    app.schedule("poll", ["poll"], every=60)
    app.pause_schedule("poll")
    assert [(view.state, view.next_at) for view in app.schedules()] == [("paused", None)]
    assert fleet.store.exists(KEYS.ticks()) == 0
    assert app.schedule("poll", ["poll"], every=90).state == "paused"
    assert fleet.store.exists(KEYS.ticks()) == 0
    assert len(app.schedule_times("poll", 3)) == 3
    app.resume_schedule("poll")
    assert [view.state for view in app.schedules()] == ["active"]
    app.unschedule("poll")
    assert app.schedules() == []
    assert fleet.store.exists(KEYS.ticks(), KEYS.schedules("main")) == 0
    for call in (app.pause_schedule, app.resume_schedule, app.unschedule, app.schedule_times):
        with pytest.raises(UsageError, match="no schedule"):
            call("poll")


def test_an_interval_begins_one_interval_from_now_or_at_its_start(fleet: Fleet) -> None:
    """With a start, the start itself is the first time."""
    app = fleet.app
    start = datetime.now(UTC).replace(microsecond=0) + DAY
    app.schedule("later", ["true"], every=3600, start=start)
    assert app.schedule_times("later", 2) == [
        f"{moment:%Y-%m-%dT%H:%M:%S}.000Z" for moment in (start, start + timedelta(hours=1))
    ]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "exactly one"),
        ({"every": 1, "cron": "* * * * *"}, "exactly one"),
        ({"cron": "* * * *"}, "five fields"),
        ({"cron": "0 3 * * *", "zone": "Nowhere/Else"}, "no such time zone"),
        ({"every": 0.5}, "1 second"),
        ({"every": 60, "eta": NOW}, "start="),
        ({"every": 60, "countdown": 5}, "start="),
        ({"every": 60, "start": datetime(2030, 1, 1)}, "zone"),
        ({"every": 60, "end": datetime(2001, 1, 1, tzinfo=UTC)}, "ends after|in the future"),
        ({"every": 60, "expires": NOW}, "seconds"),
        ({"every": 60, "args": (1,)}, "list of words"),
        ({"every": 60, "on_duplicate": "return"}, "unique"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused_before_it_is_stored(
    fleet: Fleet, options: dict[str, object], word: str
) -> None:
    """The message names what is wrong; nothing is written."""
    with pytest.raises(UsageError, match=word):
        fleet.app.schedule("poll", ["poll"], **options)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UsageError):
        fleet.app.schedule("no name", ["poll"], every=60)
    assert fleet.store.exists(KEYS.schedules("main")) == 0


def test_what_a_task_asks_for_by_itself_is_not_left_out(fleet: Fleet) -> None:
    """A task whose own options mean nothing on a schedule is refused, not run without them."""
    task = Task(sample.add.function, fleet.app.place, {**sample.add.options, "countdown": 5.0})
    with pytest.raises(UsageError, match="countdown is not for schedules"):
        fleet.app.schedule("sum", task, (1,), {"right": 2}, every=60)


def test_a_job_puts_nothing_on_schedule(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a job there is no key that could sign it."""

    def inside(what: str) -> None:
        raise InsideJobError(what)

    monkeypatch.setattr("runner.context.refuse_inside", inside)
    with pytest.raises(InsideJobError):
        fleet.app.schedule("poll", ["poll"], every=60)


def test_lists_say_until_when_a_job_is_put_off(fleet: Fleet) -> None:
    """`ps` and `show` have the state and the due time."""
    app = fleet.app
    handle = app.command(["true"], countdown=3600)
    view = handle.status()
    assert view.state == "scheduled"
    assert view.due_at is not None
    assert view.due_at in (view.waiting or "")
    assert [(each.state, each.due_at) for each in app.jobs()] == [("scheduled", view.due_at)]
    assert [event.type for event in handle.events()] == ["job.scheduled"]
