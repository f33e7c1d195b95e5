"""Port: redis, runner.signing. What keeps a node's flight record true from outside: disk, signed heads, anchors.

Called by the session, one loop per boot. Must never anchor a head that is not on disk, wait for a disk on the agent's
loop, or hold back that something of the record is gone.

An anchor is the record's signed head in the stream ``rf:anchor:<node>``, which the node's own user may only add to
(attack 31). It is made whenever the head has changed, at most every ANCHOR_S, and when the agent stops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from node_agent.kernel.recorder import Recorder
from node_agent.kernel.recordlines import Field
from node_agent.records import Notary, Signed
from runner import signing
from runner.wire import flight, record
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.event import EventType
from runner.wire.flight import FlightHead
from runner.wire.keys import Keys

__all__ = ["LOW", "SYNC_S", "Anchors"]

log = logging.getLogger(__name__)

#: How often what was written is put on disk.
SYNC_S: Final = 1.0
#: Less of the disk free than this, and the node warns: the record's reserve is for emergencies.
LOW: Final = 0.10
#: How long the store may take.
STORE_S: Final = 2.0
_MAX_HEAD_BYTES: Final = 1024
#: Anchors that a start looks back at: so many at a time, so many times.
_LOOK_BACK: Final = 32
_MOST_LOOKS: Final = 64


class Anchors:
    """Of one boot. ``emit`` stores a signed event of the node."""

    def __init__(
        self,
        recorder: Recorder,
        redis: Redis,
        keys: Keys,
        notary: Notary,
        emit: Callable[[str | None, Signed], None],
        *,
        every_s: float = flight.ANCHOR_S,
        store_s: float = STORE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recorder, self._redis, self._notary, self._emit = recorder, redis, notary, emit
        self._key = keys.anchor(notary.node)
        self._every_s, self._store_s, self._clock = every_s, store_s, clock
        self._anchored_s = clock()
        #: Lines up to the last anchor, its own line included.
        self._upto = 0
        self._syncing: asyncio.Future[OSError | None] | None = None
        self._low = self._failed = self._unfit = False
        self._stirred = asyncio.Event()
        recorder.hurry = self._stirred.set

    async def run(self) -> None:
        """Look after the record until cancelled."""
        await self.compare()
        while True:
            self._stirred.clear()
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(SYNC_S):
                    await self._stirred.wait()

    async def look(self) -> None:
        """Do once what is due: heal, put on disk, warn, anchor."""
        recorder = self._recorder
        if recorder.failed:
            recorder.heal()
        self._warn()
        on_disk = await self._sync()
        if on_disk and self._clock() >= self._anchored_s + self._every_s:
            await self.anchor()

    async def anchor(self) -> bool:
        """Sign the head, have the store keep it and note that; return whether there is a new anchor."""
        recorder = self._recorder
        if recorder.count == self._upto or recorder.failed:
            return False
        self._anchored_s = self._clock()
        at_ms = time.time_ns() // 1_000_000
        head = FlightHead(self._notary.node, self._notary.boot, recorder.count, recorder.link.hex(), at_ms)
        payload = record.dumps(head)
        signature = self._notary.signer.sign(Domain.HEAD, payload)
        entry, added = await self._send(payload, signature)
        fields: dict[str, Field] = {"head": head.text, "boot": head.boot, "head_at_ms": at_ms, "sig": signature}
        recorder.note(flight.HEAD, fields={**fields, "entry": entry, "added": added})
        self._upto = recorder.count if entry else self._upto
        return bool(entry)

    async def stop(self) -> None:
        """Put everything on disk and anchor it; a store that hangs holds this up for a moment only."""
        self._recorder.note("record.stopping")
        if await self._sync(STORE_S):
            await self.anchor()
            await self._sync(STORE_S)

    async def compare(self) -> None:
        """Compare the end that was found on disk with the last anchor: what is missing is told at once."""
        try:
            async with asyncio.timeout(self._store_s):
                last = await self._last()
        except (RedisError, TimeoutError):
            return
        fault = self._recorder.fault
        if last > self._recorder.count:
            fault = f"the record ends at line {self._recorder.count}, and line {last} was anchored"
        if fault:
            self._degraded(f"flight record: {fault}; `ringfence audit verify` says more")
            self._recorder.note("record.fault", fields={"what": fault})

    async def _last(self) -> int:
        """Return the count of the newest anchors that are this node's, behind whatever others have added."""
        before = "+"
        for _ in range(_MOST_LOOKS):
            rows = await self._redis.xrevrange(self._key, max=before, count=_LOOK_BACK)
            found = cast("list[tuple[bytes, dict[bytes, bytes] | None]]", rows)
            last = max((self._own(fields or {}) for _, fields in found), default=0)
            if last or not found:
                return last
            before = f"({found[-1][0].decode('ascii', 'replace')}"
            # Each costs a signature: the loop belongs to others in between (attack 41).
            await asyncio.sleep(0)
        return 0

    def _own(self, fields: dict[bytes, bytes]) -> int:
        """Return the count of a head in the store, 0 unless this node signed it: others may write there, too."""
        payload, signature = fields.get(b"head", b""), fields.get(b"sig", b"").decode("ascii", "replace")
        if not signing.verify(self._notary.signer.public, Domain.HEAD, payload, signature):
            return 0
        try:
            return record.loads(FlightHead, payload, limit_bytes=_MAX_HEAD_BYTES).count
        except WireError:
            return 0

    async def _send(self, payload: bytes, signature: str) -> tuple[str, int]:
        """Add an anchor; return its id there, and how many the stream has ever taken, by the store's own count."""
        oldest_ms = time.time_ns() // 1_000_000 - int(flight.KEEP_ANCHORS_S * 1000)
        try:
            async with asyncio.timeout(self._store_s):
                entry = await self._redis.xadd(self._key, {"head": payload, "sig": signature}, minid=f"{oldest_ms}-0")
                facts = await self._redis.xinfo_stream(self._key)
        except ResponseError as error:
            # Not away: somebody made the key one that takes no anchor, and this node must not remove it.
            if not self._unfit:
                self._degraded(f"flight record: the store takes no anchor of it ({error}); look at {self._key} there")
            self._unfit = True
            return "", 0
        except (RedisError, TimeoutError) as error:
            log.warning("the flight record's head is not anchored, the store is away", extra={"error": str(error)})
            return "", 0
        self._unfit = False
        return cast("bytes", entry).decode("ascii", "replace"), int(facts.get("entries-added", 0))

    async def _sync(self, wait_s: float = SYNC_S) -> bool:
        """Have what was written put on disk by a thread; return whether all of it is there by now."""
        if self._syncing is None:
            work = self._recorder.syncing()
            if work is None:
                return not self._recorder.failed
            self._syncing = asyncio.get_running_loop().create_future()
            # Not of a pool: the interpreter's end would wait for one that hangs.
            told = (work, asyncio.get_running_loop(), self._syncing)
            threading.Thread(target=_carry_out, args=told, name="record", daemon=True).start()
        done, _ = await asyncio.wait([self._syncing], timeout=wait_s)
        if not done:
            return False
        error, self._syncing = self._syncing.result(), None
        if error is not None:
            self._recorder.unsynced(error)
        return error is None

    def _warn(self) -> None:
        """Say once that the record can't be written, and once that its disk gets full."""
        failed = bool(self._recorder.failed)
        if failed and not self._failed:
            self._degraded(f"flight record: {self._recorder.failed}; the node takes no jobs until it can be written")
        elif self._failed and not failed:
            what = "the flight record is written again"
            self._emit(None, self._notary.event(EventType.NODE_HEALTHY, detail={"what": what}))
        self._failed = failed
        with suppress(OSError):
            room = os.statvfs(self._recorder.path)
            low = room.f_bavail < LOW * room.f_blocks
            if low and not self._low:
                self._degraded(f"flight record: less than {LOW:.0%} of the disk of {self._recorder.path} is free")
            self._low = low

    def _degraded(self, what: str) -> None:
        log.warning(what)
        self._emit(None, self._notary.event(EventType.NODE_DEGRADED, detail={"what": what}))


def _carry_out(
    work: Callable[[], None], loop: asyncio.AbstractEventLoop, answer: asyncio.Future[OSError | None]
) -> None:
    found: OSError | None = None
    try:
        work()
    except OSError as error:
        found = error
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(lambda: None if answer.done() else answer.set_result(found))
