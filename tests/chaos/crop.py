"""The jobs of a chaos run: a random mix of everything a job may ask, sent and killed whatever the store does.

Called by test_chaos.py. One thread sows; it sends again what got no answer, as a client may. Must never count a job
that the store did not accept.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

from redis.exceptions import RedisError

from runner import Grants, request
from runner.client import BATCH_JOBS
from runner.control import Order, kill_job
from runner.errors import DuplicateJobError, StoreError
from runner.request import JobOptions
from runner.wire.flow import Backoff, Concurrency, Rate, Unique
from runner.wire.spec import JobSpec
from tests.scale.fleet import TASK, Fleet
from tests.support.wait import pause

__all__ = ["Crop", "Planned"]

#: How much of each kind, in hundredths.
KINDS: Final = {
    "plain": 44,
    "long": 6,
    "flaky": 12,
    "hopeless": 3,
    "eta": 6,
    "after": 8,
    "unique": 5,
    "concurrency": 6,
    "rate": 4,
    "once": 3,
    "priority": 3,
}
PLACES, STARTS, PERIOD_S = 2, 20, 1.0
KILLED = 0.12
LATEST_KILL_S = 1.5
PATIENCE_S = 120.0


@dataclass(slots=True)
class Planned:
    """One accepted job. ``fails``: how many attempts raise. ``killed``: a kill of it was sent, by id or cutoff."""

    spec: JobSpec
    kind: str
    fails: int = 0
    killed: bool = False


@dataclass(slots=True)
class Shape:
    """A job in the making."""

    hold_ms: int
    options: JobOptions
    fails: int = 0


def _long(shape: Shape, chance: random.Random) -> None:
    shape.hold_ms = chance.randrange(500, 3000)


def _flaky(shape: Shape, chance: random.Random) -> None:
    shape.fails = chance.randrange(1, 4)
    shape.options = JobOptions(retries=9)
    if shape.fails > 1:
        shape.options = JobOptions(retries=12, backoff=Backoff(0.1, 2.0, 0.8, jitter=0.5))


def _hopeless(shape: Shape, chance: random.Random) -> None:
    shape.fails, shape.options = 100, JobOptions(retries=chance.randrange(1, 3), backoff=0.1)


def _eta(shape: Shape, chance: random.Random) -> None:
    shape.options["countdown"] = chance.uniform(0.2, 4.0)


def _unique(shape: Shape, chance: random.Random) -> None:
    shape.options["unique"] = Unique(f"name{chance.randrange(8)}", chance.choice(("end", "end", "start")))


def _concurrency(shape: Shape, chance: random.Random) -> None:
    shape.options["concurrency"] = Concurrency(f"key{chance.randrange(3)}", PLACES)
    shape.hold_ms = chance.choice((5, 60, 200))


def _rate(shape: Shape, chance: random.Random) -> None:
    shape.options["rate"] = Rate("mail", STARTS, PERIOD_S)


def _once(shape: Shape, chance: random.Random) -> None:
    shape.options, shape.hold_ms = JobOptions(at_most_once=True), chance.choice((5, 100))


def _priority(shape: Shape, chance: random.Random) -> None:
    shape.options["priority"] = chance.randrange(-1, 3)


SHAPES: Final[dict[str, Callable[[Shape, random.Random], None]]] = {
    "long": _long,
    "flaky": _flaky,
    "hopeless": _hopeless,
    "eta": _eta,
    "unique": _unique,
    "concurrency": _concurrency,
    "rate": _rate,
    "once": _once,
    "priority": _priority,
}


@dataclass(slots=True)
class Crop:
    """Sows ``count`` jobs, about ``per_s`` a second."""

    fleet: Fleet
    seed: int
    count: int
    per_s: float
    batch: int = 20
    jobs: dict[str, Planned] = field(default_factory=dict)
    duplicates: int = 0
    #: The share that goes to agents with real sandboxes.
    real: float = 0.0
    sown: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = field(default=None, repr=False)
    #: The newest entry of the tenant's events after each cutoff, with the jobs that it hit.
    cutoffs: list[tuple[bytes, list[str]]] = field(default_factory=list)
    _kills: list[tuple[float, str]] = field(default_factory=list)
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.seed}/crop")

    def start(self) -> threading.Thread:
        """Sow in a thread of its own; ``sown`` is set at the end."""
        thread = threading.Thread(target=self._work, daemon=True)
        thread.start()
        return thread

    def _work(self) -> None:
        try:
            self._sow()
        except BaseException as error:  # noqa: BLE001 - told by the test, which waits for ``sown``
            self.error = error
        finally:
            self.sown.set()

    def _sow(self) -> None:
        made = 0
        while made < self.count:
            due_s = time.monotonic() + self.batch / self.per_s
            batch = [self._plan() for _ in range(min(self.batch, self.count - made))]
            made += len(batch)
            self._send([one for one in batch if one.spec.unique is None])
            for one in batch:
                if one.spec.unique is not None:
                    self._send([one])
            self._reap(time.monotonic())
            if self._chance.random() < self.batch / 600:
                self._cut(made)
            pause(max(0.0, due_s - time.monotonic()))
        while self._kills:
            self._reap(time.monotonic())
            pause(0.01)

    def _plan(self) -> Planned:
        chance = self._chance
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        shape = Shape(chance.choice((0, 0, 5, 20, 60)), JobOptions(retries=chance.choice((0, 2, 4, 4))))
        if kind == "after":
            known = list(self.jobs)[-60:]
            shape.options["after"] = chance.sample(known, min(len(known), chance.randrange(1, 4)))
            shape.options["on_failure"] = chance.choice(("refuse", "run"))
        elif kind in SHAPES:
            SHAPES[kind](shape, chance)
        options = shape.options
        options["tags"] = {"cut": str(chance.randrange(12))}
        kwargs: dict[str, object] = {"hold_ms": shape.hold_ms, "fails": shape.fails}
        kwargs["says"] = chance.choice(("", "", "a line\n"))
        if chance.random() < self.real:
            options["queue"], kwargs["journal"] = "real", str(self.fleet.work / "journal")
            options["grants"] = Grants(write=(str(self.fleet.work),))
        return Planned(request.build(options, task=TASK, kwargs=kwargs), kind, shape.fails)

    def _send(self, planned: list[Planned]) -> None:
        """Send until there is an answer."""
        assert len(planned) <= BATCH_JOBS
        until = time.monotonic() + PATIENCE_S
        while planned:
            try:
                self.fleet.app.client().enqueue([one.spec for one in planned])
            except DuplicateJobError as error:
                if error.holder == planned[0].spec.id:
                    raise AssertionError("a job that was sent again is refused because of itself") from error
                self.duplicates += 1
                return
            except StoreError:
                if time.monotonic() >= until:
                    raise
                pause(0.05)
                continue
            break
        now = time.monotonic()
        for one in planned:
            self.jobs[one.spec.id] = one
            if self._chance.random() < KILLED:
                self._kills.append((now + self._chance.uniform(0, LATEST_KILL_S), one.spec.id))

    def _reap(self, now: float) -> None:
        due = [job for at, job in self._kills if at <= now]
        self._kills = [entry for entry in self._kills if entry[0] > now]
        for job in due:
            self._asked(partial(kill_job, self.fleet.app.client(), job, Order(wait_s=0.0)))
            self.jobs[job].killed = True

    def _cut(self, made: int) -> None:
        """Kill by a selector; what was accepted before may never start again."""
        tag = str(self._chance.randrange(12))
        hit = [job for job, one in self.jobs.items() if one.spec.tags.get("cut") == tag]
        self._asked(partial(self.fleet.app.kill, tag=f"cut={tag}", wait=0.0, reason=f"after {made}"))
        last = self._asked(partial(self.fleet.redis.xrevrange, self.fleet.keys.events("main"), count=1))
        self.cutoffs.append((cast("list[tuple[bytes, object]]", last)[0][0], hit))
        for job in hit:
            self.jobs[job].killed = True

    def _asked(self, call: Callable[[], object]) -> object:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call()
            except (StoreError, RedisError):
                if time.monotonic() >= until:
                    raise
                pause(0.05)
