"""Port: redis. The node's bell: one short stream on which other nodes say that something waits here.

Called by mail (a letter came, one was taken) and signals (one came, one was answered). Must never be believed: a ring
says "look", or carries a record with a signature of its own. One blocking read per node, whatever its jobs wait for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from node_agent.cancelling import end_all
from node_agent.kernel.errors import CallError
from node_agent.run import now_ms
from node_agent.spread import spread
from runner.wire.calls import ErrorCode
from runner.wire.keys import Keys

__all__ = ["Bell", "Ring"]

log = logging.getLogger(__name__)

#: What a ring carries: texts, and bytes where a record is signed.
Ring: TypeAlias = "Mapping[str, bytes]"

#: One read waits so long, in milliseconds: below the connection's own bound.
_BLOCK_MS: Final = 5000
_COUNT: Final = 16
#: After each full read, in seconds: hundreds of rings a second are heard, each may cost two signatures.
_PACE_S: Final = 0.02
BACKOFF_S: Final = (0.05, 2.0)
#: As mail.lua has them.
LIFE_S: Final = 3600
MOST: Final = 1000
#: An entry further ahead of this clock makes the stream useless, in milliseconds.
_AHEAD_MS: Final = 3_600_000
WAIT_S: Final = 2.0


class Bell:
    """One node's. ``start`` and ``stop`` are idempotent."""

    def __init__(self, redis: Redis, keys: Keys, node: str) -> None:
        self._redis, self._keys, self._node = redis, keys, node
        self._heard: dict[str, Callable[[Ring], None]] = {}
        self._task: asyncio.Task[None] | None = None

    def on(self, kind: str, hear: Callable[[Ring], None]) -> None:
        """Call ``hear`` for each ring of that kind; it must neither wait nor raise."""
        self._heard[kind] = hear

    def start(self) -> None:
        """Begin to listen."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())

    async def stop(self) -> None:
        """Listen no more."""
        task, self._task = self._task, None
        if task is not None:
            await end_all([task])

    async def ring(self, node: str, kind: str, word: bytes, signature: str) -> None:
        """Hand a signed record to a node. Raises CallError(UNAVAILABLE)."""
        key = self._keys.bell(node)
        fields: dict[str, str | bytes] = {"kind": kind, "word": word, "sig": signature}
        try:
            async with asyncio.timeout(WAIT_S):
                try:
                    await self._add(key, fields)
                except ResponseError:
                    # It is no stream, or one that has no ids left: nobody could ring there any more.
                    await self._redis.delete(key)
                    await self._add(key, fields)
        except (RedisError, TimeoutError, OSError) as error:
            why = f"the store does not answer ({type(error).__name__}); ask again"
            raise CallError(ErrorCode.UNAVAILABLE, why) from None

    async def _add(self, key: str, fields: Mapping[str, str | bytes]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        pipe.xadd(key, fields, maxlen=MOST, approximate=True)  # type: ignore[arg-type]  # redis' own field type is invariant
        pipe.expire(key, LIFE_S)
        await pipe.execute()

    async def _listen(self) -> None:
        after, wait_s = "0", BACKOFF_S[0]
        key = self._keys.bell(self._node)
        while True:
            try:
                after = await self._read(key, after)
                wait_s = BACKOFF_S[0]
            except (RedisError, OSError) as error:
                log.warning("the bell is not heard, the store is away", extra={"error": str(error)})
                if isinstance(error, ResponseError):
                    after = await self._renewed(key)
                await asyncio.sleep(spread(wait_s))
                wait_s = min(2 * wait_s, BACKOFF_S[1])

    async def _read(self, key: str, after: str) -> str:
        found = await self._redis.xread({key: after}, count=_COUNT, block=_BLOCK_MS)
        rows = cast("list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes] | None]]]]", found or [])
        for _, entries in rows:
            if len(entries) == _COUNT:
                # Whoever rings without end has a share of this loop, and not all of it.
                await asyncio.sleep(_PACE_S)
            for entry, fields in entries:
                after = entry.decode("ascii")
                if int(after.partition("-")[0]) > now_ms() + _AHEAD_MS:
                    # Nothing could be added after it, and no other entry would be seen.
                    return await self._renewed(key)
                named = {name.decode("utf-8", "replace"): value for name, value in (fields or {}).items()}
                hear = self._heard.get(named.get("kind", b"").decode("utf-8", "replace"))
                if hear is not None:
                    try:
                        hear(named)
                    except Exception:
                        # What one ring holds must not keep the node from hearing the next.
                        log.exception("a ring could not be heard", extra={"entry": after})
        return after

    async def _renewed(self, key: str) -> str:
        """Remove a stream that can't serve; whoever rings makes it anew."""
        try:
            await self._redis.delete(key)
        except (RedisError, OSError) as error:
            log.warning("the bell's stream can't be made anew", extra={"error": str(error)})
        return "0"
