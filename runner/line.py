"""Port: redis. Packed commands on connections of their own, without the client's bookkeeping around each.

Called by the client, for enqueues: borrowing a connection, a retry object and the building of a command cost more than
the signature of a job does. Must never leave an unread answer behind: whatever interrupts a call closes its connection.
Repeats nothing by itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from redis.exceptions import ResponseError

if TYPE_CHECKING:
    import redis
    from redis.connection import Connection

__all__ = ["Line", "packed"]

#: Connections that are kept open between calls, at most: as many threads may call at a time without opening one.
MOST_KEPT: Final = 8


class Line:
    """Calls of several threads, each on a connection of the client's pool; they end with the pool."""

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._idle: list[Connection] = []
        self._owner = os.getpid()

    def call(self, command: bytes) -> object:
        """Send one packed command and return its answer. Raises RedisError."""
        connection = self._take()
        try:
            connection.send_packed_command((command,), check_health=False)  # type: ignore[no-untyped-call]  # untyped
            answer = cast("object", connection.read_response())
        except ResponseError:
            self._put_back(connection)
            raise
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]  # untyped
            self._pool.release(connection)
            raise
        self._put_back(connection)
        return answer

    def rest(self) -> None:
        """Give idle connections back, before the pool opens others: a process that does one at a time needs one."""
        while (connection := self._kept()) is not None:
            self._pool.release(connection)

    def _take(self) -> Connection:
        return self._kept() or self._pool.get_connection()

    def _kept(self) -> Connection | None:
        if self._owner != os.getpid():
            # A fork shares the parent's connections: what one of them reads, the other misses.
            self._idle, self._owner = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _put_back(self, connection: Connection) -> None:
        if len(self._idle) < MOST_KEPT:
            self._idle.append(connection)
        else:
            self._pool.release(connection)


def packed(words: Sequence[bytes]) -> bytes:
    """Return a command as it travels. Source: the protocol of Redis, RESP2."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
