"""Tasks of these tests, run by a real node and in place."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from runner import App, Failure, current_job

app = App()


class Colour(enum.Enum):
    """An enum that travels."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    """A dataclass that travels."""

    x: int
    y: float


@dataclass
class Drawing:
    """One that holds others."""

    points: list[Point]
    colour: Colour | None = None


@app.task
def add(a: int, b: int = 1) -> int:
    """Return the sum."""
    return a + b


@app.task
def total(numbers: list[int]) -> int:
    """Return the sum of a list."""
    return sum(numbers)


@app.task
def fail(*_: object) -> int:
    """Raise."""
    raise ValueError("on purpose")


@app.task
def tell(found: list[int | Failure]) -> list[str]:
    """Say of each result what it is; results that are missing arrive as Failure."""
    return [f"{one.state}({one.reason})" if isinstance(one, Failure) else str(one) for one in found]


@app.task
def here() -> list[str]:
    """Return what the job knows of itself."""
    return [current_job.id, current_job.task, str(current_job.attempt), *current_job.tags.values()]


@app.task
def wait(seconds: float) -> None:
    """Do nothing for a while."""
    time.sleep(seconds)


@app.task
def turn(drawing: Drawing, colour: Colour) -> Drawing:
    """Return a drawing of another colour; both arrive as what the annotations say."""
    return Drawing([Point(int(point.y), point.x) for point in drawing.points], colour)


@app.task
def same(value: object) -> object:
    """Return the argument."""
    return value


@app.task
def kinds(values: list[object]) -> list[str]:
    """Return the type names of what arrived."""
    return [type(one).__name__ for one in values]


class NeedsKey(Exception):
    """Can't be made anew from its arguments."""

    def __init__(self, *, key: str) -> None:
        super().__init__(f"no {key}")
        self.key = key


class Locked(Exception):
    """Holds what can't travel."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class Unspeakable(Exception):
    """Can't even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@app.task
def break_down(how: str) -> None:
    """Raise an exception that is hard to carry."""
    if how == "keyword":
        raise NeedsKey(key="answer")
    if how == "lock":
        raise Locked
    if how == "silent":
        raise Unspeakable
    if how == "group":
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
    if how == "exit":
        raise SystemExit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    error: BaseException = ValueError("the first")
    for number in range(500):
        later = RuntimeError(f"number {number}")
        later.__cause__ = error
        error = later
    raise error


def _endless() -> object:
    found: list[object] = []
    found.append(found)
    return found


class Unpicklable:
    """Fights back when somebody looks."""

    def __reduce__(self) -> str:
        raise RuntimeError("no")


UNSTORABLE: dict[str, Callable[[], object]] = {
    "file": lambda: open("/dev/null"),  # noqa: SIM115 - never travels
    "lambda": lambda: lambda: None,
    "generator": lambda: (number for number in range(3)),
    "nan": lambda: {"deep": [1.0, float("nan")]},
    "infinity": lambda: float("inf"),
    "surrogate": lambda: "\ud800",
    "set": lambda: {1, 2},
    "large": lambda: 2**80,
    "reduce": Unpicklable,
    "cycle": _endless,
    "naive": lambda: dt.datetime(2020, 1, 1),
    "key": lambda: {1: 2},
}


@app.task
def unstorable(kind: str) -> object:
    """Return what has no form on the wire, and say each time that it ran."""
    print("ran", flush=True)  # noqa: T201 - its output is what the test counts
    return UNSTORABLE[kind]()


STORABLE = [
    b"\x00\xff",
    decimal.Decimal("1.10"),
    uuid.UUID(int=7),
    dt.datetime(2026, 3, 29, 2, 30, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    {"$": "mine", "a": [1, 2.5, None, True]},
    "ü\n",
]
