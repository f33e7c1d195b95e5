"""One connection of a job, from its first byte to its end: who it may reach, and the bytes both ways.

Made by the door for each accepted connection; http.py and socks.py speak with the client through it. Must never pass a
byte on before the destination is granted and checked, nor read faster than the other side takes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from broker.egress import hello
from broker.egress.access import Access
from broker.egress.dial import Dial
from broker.egress.errors import BadRequestError, EgressError, RefusedError, UnreachableError
from broker.egress.gate import Gate
from broker.egress.meter import Count, Meter, Usage
from broker.egress.rules import Destination, Rules, canonical
from broker.egress.streams import CHUNK_BYTES, Side, Streams

__all__ = ["CHUNK_BYTES", "HEAD_TIMEOUT_S", "MAX_HEAD_BYTES", "Streams", "Usage", "Visit"]

#: From the first byte of a request to the last one of its head, or of a TLS greeting.
HEAD_TIMEOUT_S: Final = 10.0
#: Of a request or an answer.
MAX_HEAD_BYTES: Final = 32 * 1024
_TLS_PORT: Final = 443
#: Look-up and connect together.
_REACH_TIMEOUT_S: Final = 30.0


@dataclass(slots=True, eq=False)
class Visit:
    """A served connection. ``pending`` until it is connected to its destination for the first time."""

    near: Streams
    rules: Rules
    dial: Dial
    usage: Usage
    meter: Meter
    gate: Gate
    on_refused: Callable[[str, int, str], None]
    on_through: Callable[[], None]
    #: The door's address, as the job sees it.
    own: Destination | None = None
    #: What hosts are verified with.
    trust: ssl.SSLContext | None = None
    #: For a job with proxied secrets.
    access: Access | None = None
    #: Longest wait for the rest of a head, in seconds.
    head_s: float = HEAD_TIMEOUT_S
    pending: bool = True
    #: The job's TLS session with the host of a secret that ends here, if this visit is in one, and that host.
    inside: tuple[Side, Destination] | None = None
    #: What keyed.py keeps for the next request.
    chain: object = None
    #: Whether a request that carries a secret is under way.
    keyed_now: bool = False
    #: Most that the request under way may send, where a rule says it.
    body_bytes: int | None = None
    #: Why the request under way must not go on, found while its answer is waited for.
    fault: EgressError | None = None
    touched_s: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    _far: Streams | None = None

    @property
    def side(self) -> Side:
        """Where the job's requests come from."""
        return self.near if self.inside is None else self.inside[0]

    def now_s(self) -> float:
        """Return the loop's time."""
        return asyncio.get_running_loop().time()

    async def reach(self, host: str, port: int) -> tuple[Destination, Streams]:
        """Return the connection to a destination that the job asks for.

        Raises:
            EgressError: not granted, not allowed, not reachable, or no destination.
        """
        wanted = canonical(host, port)
        try:
            async with asyncio.timeout(_REACH_TIMEOUT_S):
                self._far = await self._connected(wanted)
        except TimeoutError:
            raise UnreachableError(f"{wanted}: no answer in time") from None
        except RefusedError as error:
            self.refuse(wanted, error)
            raise
        self.usage.connections += 1
        if self.pending:
            self.pending = False
            self.on_through()
        return wanted, self._far

    def refuse(self, wanted: Destination, error: EgressError) -> None:
        """Count and tell a refusal."""
        self.usage.refused += 1
        self.on_refused(wanted.host, wanted.port, str(error))

    def leave(self) -> None:
        """Be done with the present destination."""
        self.chain = None
        if self._far is not None:
            self._far.abort()
            self._far = None

    async def tunnel(self, wanted: Destination, far: Streams, early: bytes) -> None:
        """Carry bytes both ways until both sides have ended; at the TLS port only for the granted name."""
        self.meter.count("", Count(1))
        tls = wanted.port == _TLS_PORT
        guard = hello.Guard(lambda greeting: _check_greeting(wanted, greeting)) if tls else None
        try:
            if guard is not None:
                early = await self._greeted(guard, early)
            if early:
                self.count_sent(len(early))
                await far.send(early)
            await _both(
                self._pass(self.near, far, self.count_sent, _as_it_is if guard is None else guard.feed),
                self._pass(far, self.near, self.count_received, _as_it_is),
            )
        except RefusedError as error:
            self.refuse(wanted, error)
            with suppress(OSError):
                await self.near.send(hello.REFUSED_NAME)
            raise

    def count_sent(self, size: int) -> None:
        """Note bytes from the job."""
        self.touch()
        self.usage.sent_bytes += size

    def count_received(self, size: int) -> None:
        """Note bytes to the job."""
        self.touch()
        self.usage.received_bytes += size

    def touch(self) -> None:
        """Note that something moves."""
        self.touched_s = self.now_s()

    def abort(self) -> None:
        """End both sides at once. Idempotent."""
        self.leave()
        self.near.abort()

    async def _greeted(self, guard: hello.Guard, data: bytes) -> bytes:
        """Return the client's first bytes, when its greeting is whole and passed."""
        async with asyncio.timeout(self.head_s):
            out = guard.feed(data)
            while not guard.greeted:
                more = await self.near.read(CHUNK_BYTES)
                if not more:
                    raise BadRequestError("the TLS client left before its greeting was whole")
                out += guard.feed(more)
        return out

    async def _connected(self, wanted: Destination) -> Streams:
        if not self.rules.grants(wanted):
            raise RefusedError(f"{wanted} is not granted to this job")
        return await Streams.over(await self.dial.connect(wanted, self.rules))

    async def _pass(
        self, source: Streams, target: Streams, count: Callable[[int], None], judge: Callable[[bytes], bytes]
    ) -> None:
        while data := await source.read(CHUNK_BYTES):
            count(len(data))
            await target.send(judge(data))
        target.end()


def _as_it_is(data: bytes) -> bytes:
    return data


def _check_greeting(wanted: Destination, greeting: hello.Hello) -> None:
    """Compare the name in a TLS greeting with the granted one; for a granted address none is right, too."""
    if greeting.ech:
        raise RefusedError(f"{wanted}: the TLS greeting hides its name (ECH)")
    fit = {wanted.host} if wanted.address is None else {wanted.host, None}
    if greeting.name not in fit:
        asked = ascii(greeting.name)[1:-1] if greeting.name else "no name"
        raise RefusedError(f"{wanted}: the TLS client asks for {asked}")


async def _both(*works: Coroutine[None, None, None]) -> None:
    """Run both directions to their ends; the failure of one ends the other."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
