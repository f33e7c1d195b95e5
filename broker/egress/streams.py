"""Both directions of one socket, with back-pressure.

Made by the door (the job's side) and by visits (the destination's). Must never read faster than the other side takes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["CHUNK_BYTES", "Side", "Streams"]

CHUNK_BYTES: Final = 64 * 1024


class Side(Protocol):
    """One side of a conversation: Streams, or TLS over them."""

    async def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, b"" at the end."""

    async def send(self, data: bytes) -> None:
        """Write, and wait until the other side has taken enough of it."""


class _Reader(asyncio.StreamReader):
    """Says when the peer has ended, also to who does not read just now."""

    on_end: Callable[[], None] | None = None

    def feed_eof(self) -> None:
        """The peer sends nothing more."""
        super().feed_eof()
        if self.on_end is not None:
            self.on_end()

    def set_exception(self, exc: Exception) -> None:
        """The connection is broken."""
        super().set_exception(exc)
        if self.on_end is not None:
            self.on_end()


@dataclass(slots=True)
class Streams:
    """A connected socket."""

    reader: _Reader
    writer: asyncio.StreamWriter

    @classmethod
    async def over(cls, end: socket.socket) -> Streams:
        """Take a connected socket over."""
        try:
            loop = asyncio.get_running_loop()
            reader = _Reader(CHUNK_BYTES, loop)
            protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
            transport, _ = await loop.create_connection(lambda: protocol, sock=end)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        except BaseException:
            end.close()
            raise
        # Reads of asyncio's own size would be cut into ours by moving the rest each time.
        writer.transport.max_size = CHUNK_BYTES  # type: ignore[attr-defined] # of its socket transports
        return cls(reader, writer)

    async def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, b"" at the end."""
        return await self.reader.read(size)

    async def send(self, data: bytes) -> None:
        """Write, and wait until the other side has taken enough of it."""
        self.writer.write(data)
        await self.writer.drain()

    def watch(self, act: Callable[[], None] | None) -> None:
        """Call ``act`` when the peer ends, or has; None: no more."""
        self.reader.on_end = act
        if act is not None and self.reader.at_eof():
            act()

    def idle(self) -> bool:
        """Return whether it is open both ways still."""
        return not self.reader.at_eof() and not self.writer.transport.is_closing()

    def abort(self) -> None:
        """Close at once; nothing more is sent."""
        self.writer.transport.abort()
