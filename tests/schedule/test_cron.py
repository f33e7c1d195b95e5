"""Cron rules: what they mean, what is refused, and every change of the clock against zoneinfo."""

from __future__ import annotations

import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.wire import cron
from runner.wire.cron import Cron
from runner.wire.errors import RecordError

MINUTE = timedelta(minutes=1)
#: Half-hour changes, changes at midnight, a day that is skipped, changes the other way round, and none.
ZONES = (
    *("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Pacific/Apia"),
    *("Europe/Dublin", "Africa/Casablanca", "Asia/Beirut", "America/Havana", "Antarctica/Troll"),
    *("Asia/Kolkata", "Asia/Kathmandu", "Pacific/Chatham", "America/St_Johns", "Africa/Cairo", "UTC"),
)


def at(text: str) -> int:
    """Unix milliseconds of an ISO time."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def following(rule: str, zone: str, after: str, count: int = 1) -> list[str]:
    """The next times of a rule, in UTC to the minute."""
    found, moment = [], at(after)
    for _ in range(count):
        due = cron.next_after(cron.parse(rule), cron.zone_of(zone), moment)
        assert due is not None
        found.append(datetime.fromtimestamp(due / 1000, UTC).strftime("%Y-%m-%d %H:%M"))
        moment = due
    return found


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("0 3 * * *", ["2030-01-01 03:00", "2030-01-02 03:00"]),
        ("*/20 * * * *", ["2030-01-01 00:20", "2030-01-01 00:40"]),
        ("5,7 1-2 * * *", ["2030-01-01 01:05", "2030-01-01 01:07"]),
        ("0 0 1 jan,JUL *", ["2030-07-01 00:00", "2031-01-01 00:00"]),
        ("0 0 * * 7", ["2030-01-06 00:00", "2030-01-13 00:00"]),
        ("0 0 * * fri-sun", ["2030-01-04 00:00", "2030-01-05 00:00"]),
        ("0 12 13 * 5", ["2030-01-04 12:00", "2030-01-11 12:00"]),
        ("0 12 */2 * 5", ["2030-01-11 12:00", "2030-01-25 12:00"]),
        ("0 0 29 2 *", ["2032-02-29 00:00", "2036-02-29 00:00"]),
        ("@weekly", ["2030-01-06 00:00", "2030-01-13 00:00"]),
        ("@Hourly", ["2030-01-01 01:00", "2030-01-01 02:00"]),
        ("10-40/15 * * * *", ["2030-01-01 00:10", "2030-01-01 00:25"]),
    ],
)
def test_a_rule_means_what_cron_means(rule: str, expected: list[str]) -> None:
    """Lists, ranges, steps, names, both day fields and the short forms."""
    assert following(rule, "UTC", "2030-01-01T00:00:30+00:00", 2) == expected


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        *(("* * * *", "five fields"), ("", "five fields"), ("@reboot", "five fields"), ("60 * * * *", "minute")),
        *(("* 24 * * *", "hour"), ("* * 0 * *", "day of month"), ("* * L * *", "L, W, # and ?")),
        *(("* * * 13 *", "month"), ("* * * * 8", "day of week"), ("* * * * 5#2", "not supported")),
        *(("5-3 * * * *", "upwards"), ("*/0 * * * *", "step"), ("5/10 * * * *", "write 5-59/10")),
        *(("0 0 31 2 *", "no day"), ("0 0 * mon *", "month"), ("-1 * * * *", "minute"), ("* * ? * *", "not supported")),
        (f"{'1,' * 200}1 * * * *", "five fields"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_field(rule: str, word: str) -> None:
    """Nothing is guessed: the message names the field or the form that is meant."""
    with pytest.raises(RecordError, match=word):
        cron.parse(rule)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../etc/passwd", "/etc/localtime", "", "europe/nowhere", "A" * 200])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    """A zone is a name of the IANA list and never a path."""
    with pytest.raises(RecordError, match="no such time zone"):
        cron.zone_of(zone)


def test_a_skipped_wall_time_takes_place_at_the_change() -> None:
    """Berlin 2030-03-31: 02:00 to 03:00 is skipped; 02:30 takes place at 03:00 (01:00 UTC), once."""
    assert following("30 2 * * *", "Europe/Berlin", "2030-03-30T12:00Z", 2) == ["2030-03-31 01:00", "2030-04-01 00:30"]
    assert following("*/10 2-3 * * *", "Europe/Berlin", "2030-03-31T00:00Z", 2) == [
        "2030-03-31 01:00",
        "2030-03-31 01:10",
    ]


def test_a_wall_time_that_happens_twice_takes_place_the_first_time() -> None:
    """Berlin 2030-10-27: 02:30 is at 00:30 and 01:30 UTC; the first counts."""
    assert following("30 2 * * *", "Europe/Berlin", "2030-10-26T12:00Z", 2) == ["2030-10-27 00:30", "2030-10-28 01:30"]


def test_an_hourly_rule_follows_elapsed_time() -> None:
    """A rule of every hour has one time per elapsed hour across both changes."""
    spring = following("30 * * * *", "Europe/Berlin", "2030-03-31T00:00Z", 3)
    assert spring == ["2030-03-31 00:30", "2030-03-31 01:30", "2030-03-31 02:30"]
    autumn = following("30 * * * *", "Europe/Berlin", "2030-10-26T23:59Z", 4)
    assert autumn == ["2030-10-27 00:30", "2030-10-27 01:30", "2030-10-27 02:30", "2030-10-27 03:30"]


def test_a_day_that_a_zone_left_out_takes_place_at_the_change() -> None:
    """Samoa had no 2011-12-30: its 03:00 takes place when the 31st begins."""
    assert following("0 3 30 12 *", "Pacific/Apia", "2011-12-29T00:00Z") == ["2011-12-30 10:00"]


def expected_after(rule: Cron, zone: zoneinfo.ZoneInfo, start: datetime, minutes: int) -> Iterator[int]:
    """Every time in the minutes after ``start``: by looking at each minute of UTC and what zoneinfo says of it."""
    for number in range(1, minutes + 1):
        here = (start + number * MINUTE).astimezone(zone)
        before = (start + (number - 1) * MINUTE).astimezone(zone)
        local, last = here.replace(tzinfo=None, fold=0), before.replace(tzinfo=None, fold=0)
        skipped = []
        while not rule.every_hour and last + MINUTE < local:
            last += MINUTE
            skipped.append(last)
        fits = fitting(rule, local) and (rule.every_hour or here.fold == 0)
        if fits or any(fitting(rule, each) for each in skipped):
            yield round(here.timestamp() * 1000)


def fitting(rule: Cron, local: datetime) -> bool:
    return local.hour * 60 + local.minute in rule.times and rule.covers(local.date())


def changes(zone: str, year: int) -> list[datetime]:
    """The hours of a year in which the zone's clock changes."""
    info = zoneinfo.ZoneInfo(zone)

    def changed(moment: datetime, span: timedelta) -> bool:
        return moment.astimezone(info).utcoffset() != (moment + span).astimezone(info).utcoffset()

    hour, day = timedelta(hours=1), timedelta(days=1)
    days = [datetime(year, 1, 1, tzinfo=UTC) + number * day for number in range(365)]
    changing = [each for each in days if changed(each, day)]
    return [each + (n + 1) * hour for each in changing for n in range(24) if changed(each + n * hour, hour)]


CHANGES = {(zone, year): changes(zone, year) for zone in ZONES for year in (2011, 2024, 2030)}

hours = st.one_of(
    st.just("*"),
    st.sampled_from(["0", "1", "2", "3", "23", "0-4", "1,2,3", "*/2", "22-23"]),
    st.integers(0, 23).map(str),
)
minutes = st.one_of(st.sampled_from(["0", "30", "*/15", "*", "59", "5-50/9"]), st.integers(0, 59).map(str))
days = st.sampled_from(["*", "*", "*", "1-15", "30,31", "*/2"])
weekdays = st.sampled_from(["*", "*", "*", "sun", "1-5"])


@settings(max_examples=200)
@given(
    st.sampled_from(sorted(key for key, found in CHANGES.items() if found)), st.data(), minutes, hours, days, weekdays
)
def test_every_change_of_the_clock_against_zoneinfo(
    where: tuple[str, int], data: st.DataObject, minute: str, hour: str, day: str, weekday: str
) -> None:
    """200 rules around changes of the clock: exactly the times that the definition gives, none missed, none twice."""
    zone = zoneinfo.ZoneInfo(where[0])
    change = data.draw(st.sampled_from(CHANGES[where]))
    rule = cron.parse(f"{minute} {hour} {day} * {weekday}")
    start = change - timedelta(hours=4, minutes=data.draw(st.integers(0, 59)))
    span = 9 * 60
    wanted = list(expected_after(rule, zone, start, span))
    found, moment = [], round(start.timestamp() * 1000)
    end = moment + span * 60_000
    while (due := cron.next_after(rule, zone, moment)) is not None and due <= end:
        found.append(due)
        moment = due
    assert found == wanted


@settings(max_examples=50)
@given(st.sampled_from(ZONES), st.integers(at("1990-01-01T00:00Z"), at("2090-01-01T00:00Z")), minutes, hours, days)
def test_the_next_time_is_later_and_stable(zone: str, moment: int, minute: str, hour: str, day: str) -> None:
    """The next time is later than the moment, and the same from every moment in between."""
    rule, info = cron.parse(f"{minute} {hour} {day} * *"), cron.zone_of(zone)
    due = cron.next_after(rule, info, moment)
    assert due is not None
    assert due > moment
    assert cron.next_after(rule, info, (moment + due) // 2) == due
    assert cron.next_after(rule, info, due - 1) == due
