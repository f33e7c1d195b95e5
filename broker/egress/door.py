"""The door of one attempt: its listener in the job's net namespace, and every connection through it.

Made by the service when an agent opens one. Must never outlive the attempt: the agent's word, the end of the mould or
the end of the agent closes listener and connections at once. Must never serve more than its caps (attack 42).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import h11

from broker.egress import http, socks
from broker.egress.access import Access
from broker.egress.dial import Dial
from broker.egress.errors import EgressError
from broker.egress.gate import Gate
from broker.egress.meter import Meter, Usage
from broker.egress.rules import Destination, Rules
from broker.egress.streams import CHUNK_BYTES, Streams
from broker.egress.visit import HEAD_TIMEOUT_S, Visit

__all__ = ["BODY_BYTES", "IDLE_S", "REQUESTS", "Caps", "Door"]

IDLE_S: Final = 300.0
REQUESTS: Final = 48
BODY_BYTES: Final = 256 << 20

_RETRY_ACCEPT_S: Final = 0.1
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NO_LISTENER: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})
#: New connections of one door: so many at once, so many a second.
_AT_ONCE: Final = 128.0
_PER_SECOND: Final = 100.0
#: Refusals of one attempt that are told; the others are only counted.
_MOST_TOLD: Final = 8
_MAX_WHY: Final = 200


@dataclass(frozen=True, slots=True)
class Caps:
    """What one door serves at most.

    ``pending``: connections that have no destination yet. ``idle_s``: the longest silence. ``requests``: under way at
    once. ``body_bytes``: of one request. These two hold for requests that are read, not for tunnels. ``head_s``: the
    longest wait for a head or a greeting.
    """

    connections: int = 64
    pending: int = 8
    idle_s: float = IDLE_S
    requests: int = REQUESTS
    body_bytes: int = BODY_BYTES
    head_s: float = HEAD_TIMEOUT_S


@dataclass(slots=True)
class _Bucket:
    """Tokens for new connections: who opens and closes without end must not keep the loop from others (attack 42)."""

    tokens: float = _AT_ONCE
    filled_s: float = 0.0

    def take(self, now_s: float) -> bool:
        """Take one; return whether another one is there."""
        self.tokens = min(_AT_ONCE, self.tokens + (now_s - self.filled_s) * _PER_SECOND) - 1
        self.filled_s = now_s
        return self.tokens >= 1


class Door:
    """Serves from its making to ``close``. ``on_closed`` is called once."""

    def __init__(
        self,
        ends: tuple[socket.socket, int],
        rules: Rules,
        dial: Dial,
        caps: Caps,
        make_room: Callable[[], None],
        on_refused: Callable[[str, int, str], None],
        on_metered: Callable[[str, dict[str, int]], bool],
        on_closed: Callable[[], None],
        trust: ssl.SSLContext | None = None,
        access: Access | None = None,
    ) -> None:
        """``ends``: the listener and the mould's pidfd; both, and ``access``, are the door's from here on.

        ``make_room`` is called before each new connection: it may end another one.
        """
        self._listener, self._pidfd = ends
        self._rules = rules
        self._dial = dial
        self._caps = caps
        self._make_room = make_room
        self._on_refused = on_refused
        self._on_closed = on_closed
        self._trust, self._access = trust, access
        self._own = Destination(*self._listener.getsockname()[:2])
        self._gate = Gate(caps.requests, caps.body_bytes)
        if access is not None:
            access.on_lost = self._abort_keyed
        self._loop = asyncio.get_running_loop()
        self._visits: set[Visit] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[tuple[str, int]] = set()
        self._listening = self._resting = False
        self._bucket = _Bucket()
        self._retry: asyncio.TimerHandle | None = None
        self.usage = Usage()
        self._meter = Meter(self.usage, on_metered)
        self.closed = False
        self._listener.setblocking(False)
        self._loop.add_reader(self._pidfd, self.close)
        self._sweeper = self._loop.call_later(caps.idle_s / 4, self._sweep)
        self._listen()

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        return len(self._tasks)

    def close(self) -> None:
        """Close the listener and every connection at once. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._pause()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._listener.close()
        for timer in (self._sweeper, self._retry):
            if timer is not None:
                timer.cancel()
        if self._access is not None:
            self._access.close()
        for visit in self._visits:
            visit.abort()
        for task in self._tasks:
            task.cancel()
        self._on_closed()

    async def gone(self) -> Usage:
        """Close, and return what was used when the last connection's descriptors are given back."""
        self.close()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.sleep(0)  # aborted transports close in the loop's next turn
        self._meter.close()
        return self.usage

    def shed(self) -> None:
        """End the connection that has been silent for longest."""
        if self._visits:
            min(self._visits, key=lambda visit: visit.touched_s).abort()

    def _listen(self) -> None:
        """Accept if there is room; a client that has to wait is held by the kernel."""
        if self.closed or self._listening or self._resting:
            return
        pending = len(self._tasks) - sum(not visit.pending for visit in self._visits)
        if len(self._tasks) < self._caps.connections and pending < self._caps.pending:
            self._listening = True
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        self._make_room()
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                self._rest(_RETRY_ACCEPT_S)
            elif error.errno in _NO_LISTENER:
                self.close()
            return  # else one client that is gone again
        end.setblocking(False)
        task = self._loop.create_task(self._serve(end))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self._pause()
        if self._bucket.take(self._loop.time()):
            self._listen()
        else:
            self._rest(1 / _PER_SECOND)

    def _rest(self, duration_s: float) -> None:
        """Accept nothing for a while."""
        self._pause()
        self._resting = True
        self._retry = self._loop.call_later(duration_s, self._wake)

    def _wake(self) -> None:
        self._resting = False
        self._listen()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._listen()

    async def _serve(self, end: socket.socket) -> None:
        near = await Streams.over(end)
        visit = Visit(
            near, self._rules, self._dial, self.usage, self._meter, self._gate, self._refused, self._listen,
            self._own, self._trust, self._access, self._caps.head_s,
        )  # fmt: skip # several to a line
        self._visits.add(visit)
        try:
            with suppress(EgressError, OSError, TimeoutError, h11.ProtocolError):
                async with asyncio.timeout(self._caps.head_s):
                    first = await near.exactly(1)
                if first[0] == socks.VERSION:
                    await socks.serve(visit)
                else:
                    await http.serve(visit, first)
                await _say_goodbye(near)
        finally:
            self._visits.discard(visit)
            visit.abort()

    def _abort_keyed(self) -> None:
        """The lease is over: what goes on with the host of a secret ends now, like the next request."""
        for visit in self._visits:
            if visit.inside is not None or visit.chain is not None or visit.keyed_now:
                visit.abort()

    def _refused(self, host: str, port: int, why: str) -> None:
        if len(self._told) < _MOST_TOLD and (host, port) not in self._told:
            self._told.add((host, port))
            self._on_refused(host, port, why[:_MAX_WHY])

    def _sweep(self) -> None:
        limit_s = self._loop.time() - self._caps.idle_s
        for visit in self._visits:
            if visit.touched_s < limit_s:
                visit.abort()
        self._sweeper = self._loop.call_later(self._caps.idle_s / 4, self._sweep)


async def _say_goodbye(near: Streams) -> None:
    """Let what was written arrive: closing with unread bytes of the client's would throw it away."""
    if near.closing:
        return
    near.end()
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while await near.read(CHUNK_BYTES):
                pass
