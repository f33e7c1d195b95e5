"""A job's output: read live from its pipes, kept bounded, handed on in order.

Called by the supervisor, one Capture per attempt. Must never block the loop, never grow beyond its bounds whatever the
job writes or the store does, and never wait for a pipe that a leftover process holds: after the proof of death the
pipes are drained and closed.

Kept per job: the first HEAD_BYTES and the last TAIL_BYTES; the cut is marked with its size (DESIGN §4, "Streams").
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from node_agent.pipes import Pipes

__all__ = ["Capture", "Chunk"]

HEAD_BYTES: Final = 4 * 1024 * 1024
TAIL_BYTES: Final = 256 * 1024
#: Most bytes taken from one pipe per wake-up, so that one flooding job can't hold the loop (attack 41).
READ_BYTES: Final = 64 * 1024
#: More reads than the largest pipe of a job fills: a worker that is reused may still write to it.
_MOST_DRAINS: Final = 512
#: Wait before a flush so that small writes travel together, in seconds.
FLUSH_S: Final = 0.01
#: Its pipes are watched from so long after the start on, in seconds: most of a short job's life costs no call of the
#: kernel, and what it wrote is read at its end.
LISTEN_S: Final = 0.03
#: Last output lines kept for the evidence of a failure.
EVIDENCE_BYTES: Final = 2048


@dataclass(frozen=True, slots=True)
class Chunk:
    """Output of descriptor ``fd`` (1 or 2) at ``offset`` of the job's whole output; fd 0 marks a cut of ``skipped``."""

    fd: int
    offset: int
    data: bytes
    skipped: int = 0


class Capture:
    """Reads both pipes until they end. ``sink`` stores chunks in order; ``on_limit`` is called once over the limit."""

    def __init__(
        self,
        pipes: tuple[int, int],
        sink: Callable[[list[Chunk]], Awaitable[None]],
        *,
        limit_bytes: int,
        on_limit: Callable[[], None],
        watch: Pipes,
        on_listen: Callable[[], None] | None = None,
    ) -> None:
        """``on_listen``: called when the pipes are watched from then on."""
        self._loop = asyncio.get_running_loop()
        self._pipes = watch
        self._open = {fd: number for number, fd in enumerate(pipes, 1)}
        self._sink = sink
        self._limit_bytes = limit_bytes
        self._on_limit = on_limit
        self._on_listen = on_listen
        self._pending: list[Chunk] = []
        self._tail: deque[Chunk] = deque()
        self._tail_bytes = 0
        self._skipped = 0
        self._flush: asyncio.Task[None] | None = None
        self._evidence = b""
        self.total_bytes = 0
        self._listening = False
        self._all_ended: asyncio.Future[None] | None = None
        self._later = self._loop.call_later(LISTEN_S, self._listen)

    @property
    def evidence(self) -> str:
        """The last output, at most EVIDENCE_BYTES, undecodable bytes replaced."""
        return self._evidence.decode("utf-8", "replace")

    async def ended(self, timeout_s: float) -> None:
        """Wait until both pipes have ended: for output that somebody else passes on, and may still hold some of."""
        self._all_ended = self._loop.create_future()
        if not self._listening:
            self._later.cancel()
            self._listen()
        if self._open:
            await asyncio.wait([self._all_ended], timeout=timeout_s)

    def drain(self) -> None:
        """Take what the job left in its pipes and close them; call only after its end. Idempotent."""
        for fd in list(self._open):
            for _ in range(_MOST_DRAINS):
                if fd not in self._open or not self._read(fd):
                    break
        self.close()

    async def finish(self) -> None:
        """Drain, and return once everything is stored: not while the store is away."""
        self.drain()
        if self._flush is not None:
            await self._flush
        if self._skipped:
            self._pending.append(Chunk(0, HEAD_BYTES, b"", self._skipped))
        self._pending += self._tail
        if self._pending:
            await self._store()

    def close(self) -> None:
        """Stop reading and close the pipes; idempotent."""
        for fd in list(self._open):
            self._end(fd)

    def _listen(self) -> None:
        self._listening = True
        if self._on_listen is not None:
            self._on_listen()
        for fd in self._open:
            self._pipes.watch(fd, self._read)

    def _rest(self) -> None:
        """Read no more until the proof: a job that is being killed for its output need not be helped to more of it."""
        if self._listening:
            for fd in self._open:
                self._pipes.forget(fd)
            self._listening = False

    def _read(self, fd: int) -> bool:
        """Take one bounded read; return whether there may be more."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end(fd)
            return False
        self._keep(self._open[fd], data)
        return True

    def _end(self, fd: int) -> None:
        if self._open.pop(fd, None) is not None:
            if self._listening:
                self._pipes.forget(fd)
            elif not self._open:
                self._later.cancel()
            os.close(fd)
            if not self._open and self._all_ended is not None and not self._all_ended.done():
                self._all_ended.set_result(None)

    def _keep(self, number: int, data: bytes) -> None:
        start = self.total_bytes
        self.total_bytes += len(data)
        self._evidence = (self._evidence + data)[-EVIDENCE_BYTES:]
        head = data[: max(0, HEAD_BYTES - start)]
        if head:
            self._pending.append(Chunk(number, start, head))
            self._schedule()
        rest = data[len(head) :]
        if rest:
            self._keep_tail(Chunk(number, start + len(head), rest))
        if start <= self._limit_bytes < self.total_bytes:
            self._on_limit()
            self._rest()

    def _keep_tail(self, chunk: Chunk) -> None:
        self._tail.append(chunk)
        self._tail_bytes += len(chunk.data)
        while self._tail_bytes - len(self._tail[0].data) >= TAIL_BYTES:
            dropped = self._tail.popleft()
            self._tail_bytes -= len(dropped.data)
            self._skipped += len(dropped.data)

    def _schedule(self) -> None:
        if self._flush is None or self._flush.done():
            self._flush = self._loop.create_task(self._flush_soon())

    async def _flush_soon(self) -> None:
        await asyncio.sleep(FLUSH_S)
        while self._pending:
            await self._store()

    async def _store(self) -> None:
        chunks, self._pending = self._pending, []
        await self._sink(chunks)
