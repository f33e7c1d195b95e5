"""Port: redis. Commands on one connection of its own, without the client's bookkeeping around each.

Called by rq_store for turns: a node makes hundreds a second, and a pool, a retry object, and a task with a timer for
each write cost it more than the call itself. Must never leave an unread answer behind: whatever interrupts a call
closes the connection, and the next call opens it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from redis.exceptions import RedisError

from node_agent.errors import StoreAwayError

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.connection import AbstractConnection

__all__ = ["Line", "packed"]

#: How long one call may take, its connection's opening included.
TIMEOUT_S: Final = 10.0


class Line:
    """One call at a time; others wait. Its connection is taken from the client's pool once, and ends with that."""

    def __init__(self, client: Redis, timeout_s: float = TIMEOUT_S) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._lock = asyncio.Lock()

    async def call(self, words: Sequence[bytes | str]) -> object:
        """Send one command and return its answer. Raises StoreAwayError, with redis' own error as its cause."""
        data = packed(words)
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout_s):
                    connection = self._connection or await self._open()
                    await connection.send_packed_command(data, check_health=False)
                    return await connection.read_response()
            except RedisError as error:
                raise StoreAwayError(f"{type(error).__name__}: {error}") from error
            except TimeoutError as error:
                raise StoreAwayError(f"no answer in {self._timeout_s:g} s") from error

    async def _open(self) -> AbstractConnection:
        pool = self._client.connection_pool
        connection = cast("AbstractConnection", await pool.get_connection())  # type: ignore[no-untyped-call]  # as it says
        # Bounded by the call's own timeout: a limit of each write costs a task, one of each read a timer.
        connection.socket_timeout = None
        self._connection = connection
        return connection


def packed(words: Sequence[bytes | str]) -> bytes:
    """Return one command as it travels. Source: the Redis serialization protocol, RESP2 and RESP3."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word.encode() if isinstance(word, str) else word
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)
