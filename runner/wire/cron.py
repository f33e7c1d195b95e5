"""Cron rules in an IANA zone: five fields, and the next time after a moment, exact across clock changes.

Called by the client (checks a rule before it is signed), the scheduler (what is due next) and admission (whether a due
time is one of the rule's). Pure. Must never guess: what it does not know is an error that names the field.

    minute 0-59   hour 0-23   day of month 1-31   month 1-12 or jan-dec   day of week 0-7 or sun-sat (0 and 7: Sunday)

A field is ``*`` or a list of numbers and ranges ``a-b``, each range or ``*`` with an optional step ``/n``. If neither
day field begins with ``*``, a day that fits either one counts; else it has to fit both. ``@hourly``, ``@daily``,
``@midnight``, ``@weekly``, ``@monthly``, ``@yearly`` and ``@annually`` are short forms.

Clock changes: a rule that fits every hour follows elapsed time, so what is skipped does not take place and what happens
twice takes place twice. Any other rule means wall times: a time that is skipped takes place at the moment of the
change, all of them as one, and a time that happens twice takes place the first time.
"""

from __future__ import annotations

import bisect
import functools
import re
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final, NoReturn

from runner.wire.errors import RecordError

__all__ = ["Cron", "next_after", "parse", "zone_of"]

_ZONE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,31}(/[A-Za-z0-9_+-]{1,31}){0,3}")
_PART: Final = re.compile(r"(\*|(\w+)(?:-(\w+))?)(?:/(\d{1,4}))?")
_NICKNAMES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_NAMES: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTHS: Final = {name: number for number, name in enumerate(_NAMES, 1)}
_WEEKDAYS: Final = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}
_FIELDS: Final[tuple[tuple[str, int, int, dict[str, int]], ...]] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("day of week", 0, 7, _WEEKDAYS),
)
_HOURS: Final = 24
_SUNDAY: Final = 7
#: February 29 comes back after at most 8 years (2096 to 2104).
_MOST_DAYS: Final = 8 * 366 + 3
#: No rule has a time after this year.
_LAST_YEAR: Final = 2200
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE: Final = timedelta(minutes=1)
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Cron:
    """One parsed rule. ``times``: minutes of the day, ascending; ``either``: both day fields are restricted."""

    times: tuple[int, ...]
    every_hour: bool
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either: bool

    def covers(self, day: date) -> bool:
        """Return whether the rule has times on this day."""
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % _SUNDAY in self.weekdays
        return by_month or by_week if self.either else by_month and by_week


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Cron:
    """Return the rule. Raises RecordError: says which field, and what to write instead."""
    fields = _NICKNAMES.get(text.strip().lower(), text).split()
    if len(text) > 256 or len(fields) != len(_FIELDS):
        raise RecordError(
            "a cron rule has five fields (minute hour day month weekday), such as '0 3 * * *', or is one of "
            f"{', '.join(_NICKNAMES)}",
            path="cron",
        )
    minutes, hours, days, months, weekdays = (
        _field(part.lower(), *known) for part, known in zip(fields, _FIELDS, strict=True)
    )
    found = Cron(
        times=tuple(hour * 60 + minute for hour in sorted(hours) for minute in sorted(minutes)),
        every_hour=len(hours) == _HOURS,
        days=days,
        months=months,
        weekdays=frozenset(day % _SUNDAY for day in weekdays),
        either=not fields[2].startswith("*") and not fields[4].startswith("*"),
    )
    if not any(found.covers(date(2000, 1, 1) + n * _DAY) for n in range(_MOST_DAYS)):
        raise RecordError("this cron rule fits no day of any year", path="cron")
    return found


@functools.lru_cache(maxsize=256)
def zone_of(name: str) -> zoneinfo.ZoneInfo:
    """Return an IANA zone. Raises RecordError: no such zone on this host."""
    if _ZONE.fullmatch(name):
        try:
            return zoneinfo.ZoneInfo(name)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
            pass
    raise RecordError(
        "no such time zone on this host: names are the IANA list's, such as Europe/Berlin or UTC (package tzdata)",
        path="zone",
    )


def next_after(rule: Cron, zone: zoneinfo.ZoneInfo, after_ms: int) -> int | None:
    """Return the rule's first time later than ``after_ms``, both Unix milliseconds; None after the year 2200."""
    day = (_EPOCH + timedelta(milliseconds=after_ms)).astimezone(zone).date() - _DAY
    best: int | None = None
    more = _MOST_DAYS
    while more and day.year <= _LAST_YEAR:
        more -= 1
        if rule.covers(day):
            found = _first(rule, zone, day, after_ms)
            if found is not None:
                best = found if best is None else min(best, found)
                # A change of the clock may move a time of the next days before one of this day, by at most a day.
                more = min(more, 2)
        day += _DAY
    return best


def _first(rule: Cron, zone: zoneinfo.ZoneInfo, day: date, after_ms: int) -> int | None:
    """Return the first time of a local day later than ``after_ms``."""
    midnight = datetime(day.year, day.month, day.day)
    offset = _steady(midnight, zone)
    if offset is None:
        moments = _on_changing_day(rule, midnight, zone)
        index = bisect.bisect_right(moments, after_ms)
        return moments[index] if index < len(moments) else None
    start_ms = _ms(midnight - offset)
    index = bisect.bisect_right(rule.times, (after_ms - start_ms) // 60_000)
    return start_ms + rule.times[index] * 60_000 if index < len(rule.times) else None


def _steady(midnight: datetime, zone: zoneinfo.ZoneInfo) -> timedelta | None:
    """Return the day's one offset from UTC; None if the clock changes on it."""
    offsets = {_offset(midnight + timedelta(hours=hour), zone) for hour in range(_HOURS + 1)}
    return offsets.pop() if len(offsets) == 1 else None


@functools.lru_cache(maxsize=64)
def _on_changing_day(rule: Cron, midnight: datetime, zone: zoneinfo.ZoneInfo) -> tuple[int, ...]:
    """Return the times of a day on which the clock changes, ascending."""
    return tuple(sorted(set(_moments(rule, midnight, zone))))


def _moments(rule: Cron, midnight: datetime, zone: zoneinfo.ZoneInfo) -> Iterator[int]:
    """Yield the times of a day on which the clock changes, in any order."""
    for minute in rule.times:
        local = midnight + minute * _MINUTE
        first, second = _offset(local, zone), _offset(local.replace(fold=1), zone)
        if first < second and not rule.every_hour:
            yield _ms(_change(local, first, second, zone))
        elif first >= second:
            yield _ms(local - first)
        if first > second and rule.every_hour:
            yield _ms(local - second)


def _change(local: datetime, before: timedelta, after: timedelta, zone: zoneinfo.ZoneInfo) -> datetime:
    """Return the UTC moment at which the clock skipped ``local``, to the second."""
    low, high = local - after, local - before
    while high - low > timedelta(seconds=1):
        middle = low + timedelta(seconds=(high - low) // timedelta(seconds=1) // 2)
        here = middle.replace(tzinfo=UTC).astimezone(zone).utcoffset()
        low, high = (middle, high) if here == before else (low, middle)
    return high


def _offset(local: datetime, zone: zoneinfo.ZoneInfo) -> timedelta:
    return local.replace(tzinfo=zone).utcoffset() or timedelta()


def _ms(moment: datetime) -> int:
    return (moment.replace(tzinfo=UTC, fold=0) - _EPOCH) // timedelta(milliseconds=1)


def _field(text: str, name: str, low: int, high: int, words: dict[str, int]) -> frozenset[int]:
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            _refuse(name, part)
        every, first, last, step = match.groups()
        if every == "*":
            start, end = low, high
        else:
            start = _number(first, name, low, high, words)
            end = start if last is None else _number(last, name, low, high, words)
            # "fri-sun": Sunday is 0 and 7.
            end = _SUNDAY if words is _WEEKDAYS and last is not None and end == 0 < start else end
            if step is not None and last is None:
                raise RecordError(f"write {start}-{high}/{step} instead of {part} in the {name}", path="cron")
        if end < start or step == "0":
            raise RecordError(f"the {name} {part!r} is empty: a range goes upwards, a step is 1 or more", path="cron")
        found.update(range(start, end + 1, int(step or 1)))
    return frozenset(found)


def _number(text: str, name: str, low: int, high: int, words: dict[str, int]) -> int:
    if text in words:
        return words[text]
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        _refuse(name, text)
    return int(text)


def _refuse(name: str, text: str) -> NoReturn:
    raise RecordError(
        f"{text[:32]!r} is no {name}: numbers, names, *, lists, ranges and steps are; L, W, # and ? are not supported",
        path="cron",
    )
