"""Port: redis. What a scheduler asks of the store: what is due, who keeps the time, and the schedules.

Called by the scheduler, on a connection of its own. Must never enqueue an occurrence but together with the move of its
schedule, so that no second scheduler can enqueue it again. Every method raises StoreAwayError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from node_agent.errors import InvariantError, StoreAwayError
from node_agent.storelink import answered
from runner.scripts import loader, payload, rows
from runner.wire.keys import Keys
from runner.wire.spec import JobSpec

__all__ = ["Look", "StoredSchedule", "Tick", "TimeStore"]

#: Jobs moved, and schedules told, in one call: few of these, since each of them is a call of its own.
LIMIT: Final = 500
TICKS: Final = 50
#: What enqueue.lua says of an occurrence that is not to be: the schedule has moved on.
_NOT_TO_BE: Final = ("DUPLICATE", "TAKEN", "REPEATED", "UNKNOWN_AFTER", "CROWDED_AFTER", "CROWDED_LANES")
#: So many lanes are never forgotten; of the others, one that is empty and saw no end for so long, in seconds.
KEPT_LANES: Final = 256
LANE_IDLE_S: Final = 3600


@dataclass(frozen=True, slots=True)
class Tick:
    """A schedule (``TENANT/NAME``) and the time at which it is due, in Unix milliseconds."""

    member: str
    due_ms: int

    @property
    def tenant(self) -> str:
        """The schedule's tenant."""
        return self.member.partition("/")[0]

    @property
    def name(self) -> str:
        """The schedule's name."""
        return self.member.partition("/")[2]


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found. Times in milliseconds; ``now_ms`` is the store's clock, ``wait_ms`` None: nothing waits.

    ``leads``: the caller enqueues what ``ticks`` says, under ``token``. ``more``: look again at once.
    """

    moved: int
    more: bool
    wait_ms: int | None
    leads: bool
    token: int
    now_ms: int
    ticks: tuple[Tick, ...]
    leader: str


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """A schedule as the client signed it; nothing is verified."""

    record: bytes
    signature: str


class TimeStore:
    """The store as one scheduler sees it. ``member``: a name that no other running scheduler has."""

    def __init__(self, client: Redis, member: str, keys: Keys | None = None, ttl_s: int = 7 * 86_400) -> None:
        """``ttl_s``: how long the ends of occurrences are kept."""
        self._client = client
        self._keys = keys or Keys()
        self._member = member
        self._ttl_s = ttl_s

    async def look(self, lease_ms: int) -> Look:
        """Move what is due, and keep or take the leadership for ``lease_ms``; 0 gives it up."""
        keys = self._keys
        reply = await self._run(
            "due",
            [keys.due(), keys.ticks(), keys.leader()],
            {
                "member": self._member,
                "lease": lease_ms,
                "limit": LIMIT,
                "ticks": TICKS,
                "keep": KEPT_LANES,
                "idle": LANE_IDLE_S,
            },
        )
        moved, more, wait, leads, token, now, flat, leader = cast("list[object]", reply)
        words = [_text(word) for word in cast("list[object]", flat)]
        ticks = tuple(Tick(words[i], int(float(words[i + 1]))) for i in range(0, len(words), 2))
        return Look(
            moved=_number(moved),
            more=more == 1,
            wait_ms=None if wait == -1 else _number(wait),
            leads=leads == 1,
            token=_number(token),
            now_ms=_number(now),
            ticks=ticks,
            leader=_text(leader),
        )

    async def schedule(self, tick: Tick) -> StoredSchedule | None:
        """Return what is stored of a schedule that is due; None if it is gone."""
        key = self._keys.schedules(tick.tenant)
        try:
            found = cast("bytes | None", await answered(self._client.hget(key, tick.name)))
        except StoreAwayError as error:
            if not (isinstance(error.__cause__, ResponseError) and "WRONGTYPE" in str(error.__cause__)):
                raise
            # Another tenant's key must not hold up everybody's schedules.
            return None
        _, _, rest = (found or b"").partition(b" ")
        signature, _, text = rest.partition(b" ")
        return StoredSchedule(text, signature.decode("utf-8", "replace")) if text else None

    async def enqueue(self, tick: Tick, next_ms: int | None, token: int, job: JobSpec, origin: StoredSchedule) -> str:
        """Enqueue the job of a tick and move its schedule on: ``done``, or ``stale``: others were first, or lead now.

        A job that may not be (it is known already, or its unique name is taken) is ``skipped``, and the schedule moved.
        """
        keys, row = self._keys, rows.row(job, job.not_before_ms)
        lane = str(row["lane"])
        places = [keys.seq(), keys.lanes(), keys.queues(), keys.job(job.id), keys.queue(lane), keys.active(job.tenant)]
        document: dict[str, object] = {"jobs": [row], "tick": self._tick(tick, next_ms, token)}
        data = payload.pack(origin.record, origin.signature, job.not_before_ms)
        try:
            await self._run("enqueue", places, document, data)
        except StoreAwayError as error:
            word = str(error.__cause__).partition(" ")[0] if isinstance(error.__cause__, ResponseError) else ""
            if word == "STALE_TICK":
                return "stale"
            if word in _NOT_TO_BE:
                return "skipped"
            raise
        return "done"

    async def move(self, tick: Tick, next_ms: int | None, token: int) -> str:
        """Move a schedule on without a job: ``done`` or ``stale``."""
        keys = self._keys
        places = [keys.schedules(tick.tenant), keys.ticks(), keys.leader()]
        return _text(await self._run("schedule", places, {"op": "move", **self._tick(tick, next_ms, token)}))

    async def woken(self, timeout_s: float) -> bool:
        """Wait until a job is put off for less than the usual look; False after ``timeout_s``. Blocks a connection."""
        return await answered(self._client.blpop([self._keys.wake("-due")], timeout=timeout_s)) is not None

    def _tick(self, tick: Tick, next_ms: int | None, token: int) -> dict[str, object]:
        return {"member": tick.member, "due": tick.due_ms, "next": next_ms or 0, "token": token}

    async def _run(self, name: str, keys: Sequence[str], document: Mapping[str, object], *blobs: bytes) -> object:
        script = loader.load(name)
        head = {"rq": self._keys.rq, "rf": self._keys.rf, "ttl": self._ttl_s}
        words = [*keys, json.dumps({**head, **document}, separators=(",", ":")), *blobs]
        try:
            return await answered(self._client.evalsha(script.sha, len(keys), *words))  # type: ignore[arg-type]  # redis-py types words as str, it sends bytes as they are
        except StoreAwayError as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        return await answered(self._client.eval(script.text, len(keys), *words))  # type: ignore[arg-type]  # as above


def _text(value: object) -> str:
    if not isinstance(value, bytes):
        raise InvariantError("a script answered in another form than expected")
    return value.decode("utf-8", "replace")


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise InvariantError("a script answered in another form than expected")
    return value
