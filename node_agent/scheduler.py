"""The scheduler: moves jobs to their lanes when they are due, and enqueues the occurrences of schedules.

Called by the agent's session and by `ringfence scheduler` (both run the same code). Any number may run: each moves what
is due, one of them leads and enqueues occurrences. Must never sign anything: an occurrence carries the schedule as the
client signed it, and every node works out for itself whether it is one (attack 4).

A schedule's time is *missed* when the next one has come, or when it is LATE_MS past. What a schedule says of missed
times: ``skip`` drops them, ``once`` makes up for all of them with the newest, ``all`` makes up for each, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import dataclass
from typing import Final, Protocol

from node_agent.cancelling import end_all
from node_agent.errors import StoreAwayError
from node_agent.scheduler_store import Look, StoredSchedule, Tick
from node_agent.spread import spread
from runner.wire import schedule as schedules
from runner.wire.errors import RecordError, WireError
from runner.wire.schedule import Schedule
from runner.wire.spec import JobSpec

__all__ = ["LATE_MS", "LEASE_MS", "Scheduler", "Step", "step"]

log = logging.getLogger(__name__)

#: A time that is past by more is missed, in milliseconds.
LATE_MS: Final = 30_000
#: How long a leader leads without a word, in milliseconds: the longest delay of an occurrence after its death.
LEASE_MS: Final = 4000
#: Everybody looks this often, so only what is due sooner has to wake the leader (prelude.lua, DUE_LOOK_MS).
LOOK_S: Final = 1.0
#: A schedule that can't be read is tried again so much later, in milliseconds: a newer scheduler may know its form.
_UNREAD_MS: Final = 60_000
_SHORTEST_S: Final = 0.001
_MINUTE_MS: Final = 60_000
BACKOFF_S: Final = (0.05, 2.0)


class Timekeeper(Protocol):
    """What the scheduler needs of the store. See scheduler_store.py."""

    async def look(self, lease_ms: int) -> Look:
        """Move what is due; keep, take or give up the leadership."""

    async def schedule(self, tick: Tick) -> StoredSchedule | None:
        """Return a schedule as it was signed."""

    async def enqueue(self, tick: Tick, next_ms: int | None, token: int, job: JobSpec, origin: StoredSchedule) -> str:
        """Enqueue an occurrence and move its schedule on."""

    async def move(self, tick: Tick, next_ms: int | None, token: int) -> str:
        """Move a schedule on."""

    async def woken(self, timeout_s: float) -> bool:
        """Wait for a job that is due sooner than the next look."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule: the due time to enqueue, if any, and the one that follows, if any."""

    enqueue_ms: int | None
    next_ms: int | None


def step(schedule: Schedule, due_ms: int, now_ms: int) -> Step:
    """Return what becomes of a schedule whose time ``due_ms`` has come. Pure.

    A time whose job would be void by now is never made up for; one that is not the rule's counts as the next that is.
    """
    genuine_ms = schedules.next_due(schedule, due_ms - 1)
    if genuine_ms is None or genuine_ms > now_ms:
        return Step(None, genuine_ms)
    due_ms = genuine_ms
    if due_ms + schedule.expires_ms <= now_ms:
        alive_ms = schedules.next_due(schedule, now_ms - schedule.expires_ms)
        if alive_ms is None or alive_ms > now_ms:
            return Step(None, alive_ms)
        due_ms = alive_ms
    if schedule.missed == "all":
        return Step(due_ms, schedules.next_due(schedule, due_ms))
    newest = _newest(schedule, due_ms, now_ms)
    too_late = schedule.missed == "skip" and now_ms - newest > LATE_MS
    return Step(None if too_late else newest, schedules.next_due(schedule, max(newest, now_ms)))


def _newest(schedule: Schedule, due_ms: int, now_ms: int) -> int:
    """Return the last due time up to ``now_ms``, ``due_ms`` at least."""
    span = _MINUTE_MS
    while now_ms - span > due_ms:
        first = schedules.next_due(schedule, now_ms - span)
        if first is not None and first <= now_ms:
            due_ms = first
            break
        span *= 2
    while (following := schedules.next_due(schedule, due_ms)) is not None and following <= now_ms:
        due_ms = following
    return due_ms


class Scheduler:
    """One scheduler. ``run`` until cancelled, then ``stop``; both leave nothing behind."""

    def __init__(self, store: Timekeeper, *, lease_ms: int = LEASE_MS) -> None:
        self._store = store
        self._lease_ms = lease_ms
        self._wake = asyncio.Event()
        self._leads = asyncio.Event()

    @property
    def leads(self) -> bool:
        """Whether this one enqueued the occurrences at its last look."""
        return self._leads.is_set()

    async def run(self) -> None:
        """Serve until cancelled; a store that is away is asked again."""
        listener = asyncio.get_running_loop().create_task(self._listen())
        wait_s = BACKOFF_S[0]
        try:
            while True:
                try:
                    look = await self._store.look(self._lease_ms)
                    self._note(look)
                    for tick in look.ticks:
                        await self._tick(tick, look)
                except StoreAwayError as error:
                    log.warning("the scheduler waits, the store is away", extra={"error": str(error)})
                    self._leads.clear()
                    await asyncio.sleep(spread(wait_s))
                    wait_s = min(2 * wait_s, BACKOFF_S[1])
                    continue
                wait_s = BACKOFF_S[0]
                if not look.more and not look.ticks:
                    await self._rest(look)
        finally:
            await end_all((listener,))

    async def stop(self) -> None:
        """Give the leadership up, so that another one need not wait for its end. Idempotent."""
        if self._leads.is_set():
            self._leads.clear()
            with contextlib.suppress(StoreAwayError, TimeoutError):
                await asyncio.wait_for(self._store.look(0), LOOK_S)

    def _note(self, look: Look) -> None:
        if look.leads and not self._leads.is_set():
            log.info("this scheduler leads now", extra={"token": look.token})
            self._leads.set()
        elif not look.leads:
            self._leads.clear()

    async def _rest(self, look: Look) -> None:
        """Wait for the next look: the leader comes to the millisecond, the others only see to it that one leads."""
        if not look.leads:
            await asyncio.sleep(LOOK_S * random.uniform(0.9, 1.1))  # noqa: S311 - spreads looks, no secret
            return
        pause_s = LOOK_S if look.wait_ms is None else min(LOOK_S, max(_SHORTEST_S, look.wait_ms / 1000))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), pause_s)
        self._wake.clear()

    async def _listen(self) -> None:
        """Wake the leader when a job is put off for less than a look."""
        while True:
            await self._leads.wait()
            try:
                if await self._store.woken(LOOK_S):
                    self._wake.set()
            except StoreAwayError:
                await asyncio.sleep(LOOK_S)

    async def _tick(self, tick: Tick, look: Look) -> None:
        stored = await self._store.schedule(tick)
        if stored is None:
            await self._store.move(tick, None, look.token)
            return
        try:
            schedule = _read(stored, tick)
            then = step(schedule, tick.due_ms, look.now_ms)
            job = None if then.enqueue_ms is None else schedules.occurrence(schedule, then.enqueue_ms)
        except (WireError, ValueError, OverflowError) as error:
            # Nobody has verified it: whatever it says, the others' times and this process must not suffer.
            log.warning("a schedule can't be read", extra={"schedule": tick.member[:100], "error": str(error)})
            await self._store.move(tick, look.now_ms + _UNREAD_MS, look.token)
            return
        if job is None:
            await self._store.move(tick, then.next_ms, look.token)
            return
        answer = await self._store.enqueue(tick, then.next_ms, look.token, job, stored)
        if answer != "done":
            log.info("an occurrence was not enqueued", extra={"schedule": tick.member, "job": job.id, "why": answer})


def _read(stored: StoredSchedule, tick: Tick) -> Schedule:
    schedule = schedules.decode(stored.record)
    if (schedule.tenant, schedule.name) != (tick.tenant, tick.name):
        raise RecordError("it is stored under another name")
    return schedule
