"""Both directions of one socket, with back-pressure.

Made by the door (the job's side) and by visits (the destination's). Must never read faster than the other side takes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Protocol, cast

from broker.egress.prompt import Prompt

__all__ = ["CHUNK_BYTES", "Side", "Streams"]

CHUNK_BYTES: Final = 64 * 1024
#: More than this is held for nobody who reads.
_MOST_HELD_BYTES: Final = 2 * CHUNK_BYTES


class Side(Protocol):
    """One side of a conversation: Streams, or TLS over them."""

    async def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, b"" at the end."""

    async def send(self, data: bytes) -> None:
        """Write, and wait until the other side has taken enough of it."""


class Streams(asyncio.Protocol):
    """A connected socket, read by one task at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._held: bytes | bytearray = b""
        self._reader: Prompt[None] | None = None
        self._ended = self._resting = False
        self._error: Exception | None = None
        self._full: asyncio.Future[None] | None = None
        self._on_end: Callable[[], None] | None = None

    @classmethod
    async def over(cls, end: socket.socket) -> Streams:
        """Take a connected socket over."""
        try:
            loop = asyncio.get_running_loop()
            _, streams = await loop.create_connection(lambda: cls(loop), sock=end)
        except BaseException:
            end.close()
            raise
        return streams

    async def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, b"" at the end. Raises OSError: the connection is broken."""
        while not self._held or self._error is not None:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._more()
        return self._taken(size)

    async def exactly(self, size: int) -> bytes:
        """Return ``size`` bytes. Raises OSError: the connection ended before."""
        while len(self._held) < size:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise ConnectionAbortedError("the connection ended in the middle")
            await self._more()
        return self._taken(size)

    async def send(self, data: bytes) -> None:
        """Write, and wait until the other side has taken enough of it. Raises OSError."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise self._error or ConnectionResetError("the connection is closed")
        transport.write(data)
        if self._full is not None:
            await self._taken_enough()

    def end(self) -> None:
        """Send nothing more; what was sent arrives."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def watch(self, act: Callable[[], None] | None) -> None:
        """Call ``act`` when the peer ends, or has; None: no more."""
        self._on_end = act
        if act is not None and self._ended and not self._held:
            act()

    def idle(self) -> bool:
        """Return whether it is open both ways still."""
        return not (self._ended and not self._held) and not self.closing

    @property
    def closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def abort(self) -> None:
        """Close at once; nothing more is sent."""
        if self._transport is not None:
            self._transport.abort()

    # what the loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        self._transport = cast("asyncio.Transport", transport)
        # Reads of asyncio's own size would be cut into ours by moving the rest each time.
        transport.max_size = CHUNK_BYTES  # type: ignore[attr-defined] # of its socket transports

    def data_received(self, data: bytes) -> None:
        """The peer has sent something."""
        if not self._held:
            self._held = data
        else:
            if isinstance(self._held, bytes):
                self._held = bytearray(self._held)
            self._held += data
            if len(self._held) > _MOST_HELD_BYTES and self._transport is not None:
                self._resting = True
                self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """The peer sends nothing more; it may still be sent to."""
        self._end(None)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._end(exc)
        self.resume_writing()

    def pause_writing(self) -> None:
        """The other side does not take enough."""
        self._full = self._loop.create_future()

    def resume_writing(self) -> None:
        """It does, or never will."""
        full, self._full = self._full, None
        if full is not None and not full.done():
            full.set_result(None)

    async def _taken_enough(self) -> None:
        while self._full is not None:
            # Each who waits may be cancelled alone.
            await asyncio.shield(self._full)
        if self.closing:
            raise self._error or ConnectionResetError("the connection was closed")

    async def _more(self) -> None:
        self._reader = Prompt(self._loop)
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.tell(None)

    def _taken(self, size: int) -> bytes:
        held = self._held
        if len(held) <= size:
            self._held = b""
            taken = bytes(held)
        else:
            taken, self._held = bytes(held[:size]), held[size:]
        if self._resting and len(self._held) <= CHUNK_BYTES and self._transport is not None:
            self._resting = False
            self._transport.resume_reading()
        return taken

    def _end(self, error: Exception | None) -> None:
        self._error = self._error or error
        self._ended = True
        if self._on_end is not None:
            self._on_end()
        # Not within what the loop does to a transport that ends.
        self._loop.call_soon(self._wake)
