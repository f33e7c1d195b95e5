"""Port: redis. What becomes of the jobs that a service job watches: their events, as their nodes signed them.

Made by the desk. Must never tell a job of one that its own signed words do not let it watch, nor pass on an event that
claims a node's signature and has none.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, cast

from redis.exceptions import RedisError

from node_agent.kernel.bucket import Bucket
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seals import Seals
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from runner import trust
from runner.wire import codec, record
from runner.wire import spec as specs
from runner.wire.calls import ErrorCode
from runner.wire.card import NodeCard
from runner.wire.codec import Json
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.event import Event
from runner.wire.spec import JobSpec
from runner.wire.states import State

__all__ = ["Watch"]

MAX_WAIT_S: Final = 60.0
#: Most events of one answer, and most that are looked at for it.
MOST: Final = 32
_LOOK: Final = 128
#: How often a waiting watcher looks again, in seconds.
STEP_S: Final = 0.25
#: How often an attempt may look, and how many of its calls may wait.
PER_S: Final = 10.0
BURST: Final = 20.0
_MOST_WAITING: Final = 2
_MOST_JOBS: Final = 4096
_MOST_EVENT_BYTES: Final = 16 * 1024
WAIT_S: Final = 2.0
_MOST_TEXT: Final = 160
_TOLD: Final = ("state", "reason", "exit_code", "signal", "by", "outcome")


@dataclass(frozen=True, slots=True)
class WatchAsk:
    """``after``: the answer's of the last call; empty: from now on. ``wait_s``: for something to happen."""

    after: str = ""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What a job may be watched by, and where it waits: what says which nodes may serve it."""

    names: frozenset[str]
    lane: str


class Watch:
    """What jobs of one boot see of others."""

    def __init__(self, around: Around, seals: Seals) -> None:
        self._around, self._seals = around, seals
        #: Jobs as they were signed; None for one that nobody trusted signed.
        self._known: OrderedDict[str, _Known | None] = OrderedDict()
        self._buckets: dict[str, Bucket] = {}
        self._waiting: dict[str, int] = {}
        around.ending.append(self.ended)

    def entries(self) -> tuple[Entry, ...]:
        """Return every call of this part."""
        what = "Tell what became of the jobs that this one watches, since the last call."
        answer = "{events: [{type, job, attempt, node, at_ms, signed, …}], after}"
        errors = (ErrorCode.QUOTA, ErrorCode.UNAVAILABLE)
        return (Entry("job.watch", WatchAsk, self._watch, what, answer, "watch", errors=errors),)

    def ended(self, caller: Caller) -> None:
        """An attempt is over."""
        self._buckets.pop(caller.attempt, None)
        self._waiting.pop(caller.attempt, None)

    async def _watch(self, caller: Caller, asked: WatchAsk) -> Json:
        caller.needs(bool(caller.spec.grants.watch), "to watch others (--watch SELECTOR)")
        if not 0 <= asked.wait_s <= MAX_WAIT_S:
            raise CallError(ErrorCode.BAD_REQUEST, f"wait_s is 0 to {MAX_WAIT_S:g} seconds")
        if asked.after and not _is_id(asked.after):
            raise CallError(ErrorCode.BAD_REQUEST, "after is what the last answer said")
        if not self._buckets.setdefault(caller.attempt, Bucket(PER_S, BURST)).take():
            raise CallError(ErrorCode.SLOW_DOWN, f"at most {PER_S:g} looks a second; wait_s waits for news")
        if self._waiting.get(caller.attempt, 0) >= _MOST_WAITING:
            raise CallError(ErrorCode.QUOTA, f"at most {_MOST_WAITING} calls of a job watch at a time")
        self._waiting[caller.attempt] = self._waiting.get(caller.attempt, 0) + 1
        try:
            return await self._news(caller, asked)
        finally:
            if caller.attempt in self._waiting:
                self._waiting[caller.attempt] -= 1

    async def _news(self, caller: Caller, asked: WatchAsk) -> Json:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + asked.wait_s
        after = asked.after or await self._newest(caller.tenant)
        while True:
            events, after, more = await self._look(caller, after)
            if caller.attempt not in self._waiting:
                # A cancellation can get lost on its way (cancelling.py): whoever is over looks no more.
                raise CallError(ErrorCode.ENDED, "the attempt is over")
            left_s = until_s - loop.time()
            if events or (left_s <= 0 and not more):
                return {"events": events, "after": after}
            if not more:
                await asyncio.sleep(min(left_s, STEP_S))

    async def _look(self, caller: Caller, after: str) -> tuple[list[Json], str, bool]:
        """Return the watched events behind ``after``, up to where was looked, and whether there is more."""
        key = self._around.keys.events(caller.tenant)
        rows = cast(
            "list[tuple[bytes, dict[bytes, bytes] | None]]",
            await self._asked(self._around.redis.xrange(key, f"({after}", "+", count=_LOOK)),
        )
        found: list[Json] = []
        for entry, fields in rows:
            after = entry.decode("ascii", "replace")
            event = await self._seen(caller, fields or {})
            if event is not None:
                found.append(event)
            if len(found) >= MOST:
                return found, after, True
            # Each may cost two signatures: the loop belongs to others in between (attack 41).
            await asyncio.sleep(0)
        return found, after, len(rows) == _LOOK

    async def _seen(self, caller: Caller, fields: dict[bytes, bytes]) -> Json:
        data, signature = fields.get(b"event", b""), fields.get(b"sig", b"").decode("ascii", "replace")
        try:
            # A script's event has more fields than a node's; only what both have is told.
            event = _event_of(data, signed=bool(signature))
        except WireError:
            return None
        known = await self._watched(caller, event.job) if event.type.startswith("job.") else None
        if known is None:
            return None
        if signature:
            signer = await self._seals.signer(Domain.EVENT, data, signature, caller.tenant)
            if signer is None or signer.node != event.node or not _may_tell(signer, event, caller.tenant, known.lane):
                return None
        return {
            "type": event.type,
            "job": event.job,
            "attempt": event.attempt,
            "node": event.node,
            "at_ms": event.at_ms,
            "signed": bool(signature),
            **{name: _short(event.detail[name]) for name in _TOLD if name in event.detail},
        }

    async def _watched(self, caller: Caller, job: str) -> _Known | None:
        if job not in self._known:
            spec = await self._seals.known(job, caller.tenant)
            self._known[job] = None if spec is None else _Known(_names_of(spec), specs.lane_of(spec))
            while len(self._known) > _MOST_JOBS:
                self._known.popitem(last=False)
        known = self._known.get(job)
        # Its own tenant's stream, and a job of that tenant: both were looked up under its name.
        if known is None or not job.startswith(f"{caller.tenant}-"):
            return None
        return None if known.names.isdisjoint(caller.spec.grants.watch) else known

    async def _newest(self, tenant: str) -> str:
        call = self._around.redis.xrevrange(self._around.keys.events(tenant), count=1)
        rows = cast("list[tuple[bytes, object]]", await self._asked(call))
        return rows[0][0].decode("ascii", "replace") if rows else "0-0"

    async def _asked(self, call: object) -> object:
        try:
            async with asyncio.timeout(WAIT_S):
                return await cast("Awaitable[object]", call)
        except (RedisError, TimeoutError, OSError) as error:
            raise _away(error) from None


def _away(error: BaseException) -> CallError:
    return CallError(ErrorCode.UNAVAILABLE, f"the store does not answer ({type(error).__name__}); ask again")


def _may_tell(signer: NodeCard, event: Event, tenant: str, lane: str) -> bool:
    """Whether a node may serve a job, and so tell of it; that one was lost, any that serves its queue may tell."""
    lost = event.detail.get("state") == State.LOST and signer.may_serve(tenant, lane.partition("@")[0])
    return lost or trust.serves(signer, tenant, lane)


def _names_of(spec: JobSpec) -> frozenset[str]:
    return frozenset((*specs.selectors_of(spec), f"job:{spec.id}"))


def _event_of(data: bytes, *, signed: bool) -> Event:
    """Return one event. Raises WireError."""
    if signed:
        return record.loads(Event, data, limit_bytes=_MOST_EVENT_BYTES)
    found = codec.load(data, limit_bytes=_MOST_EVENT_BYTES)
    named = found if isinstance(found, dict) else {}
    return record.decode(Event, {name: named[name] for name in ("type", "at_ms", "job", "attempt") if name in named})


def _short(value: str | int | float | bool) -> str | int | float | bool:
    """Return a fact so that an answer of many fits into one record."""
    if not isinstance(value, str):
        return value
    return "".join(sign if sign.isprintable() else "?" for sign in value[:_MOST_TEXT])


def _is_id(text: str) -> bool:
    head, dash, tail = text.partition("-")
    return bool(dash) and head.isascii() and head.isdigit() and tail.isascii() and tail.isdigit() and len(text) < 44
