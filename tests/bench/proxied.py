"""What a proxied secret costs: a request and a stream through a door, against the same straight to the host over TLS.

Used by main.py; by itself it prints its figures. The host is a process of its own, so that it shares no interpreter
with the client. Starts and ends a broker, an egress process and a host.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from broker.egress.certs import Authority
from broker.egress.tls import server_context
from tests.net.keyed import Keyed, in_keyed_door, parts
from tests.net.tlsweb import TlsWeb

T = TypeVar("T", bytes, int)
WARM = 20
#: With those before below what a job may ask at once (broker/vault/leases.py): who is faster must not be refused.
REQUESTS = 160
#: Where the scheduler puts three processes on two cores is another matter each time.
ROUNDS = 5
STREAM_BYTES = 256 << 20
BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians: milliseconds a request, megabytes a second."""

    direct_ms: float
    proxied_ms: float
    direct_mb_s: float
    proxied_mb_s: float

    @property
    def added_ms(self) -> float:
        """What the door adds to a request."""
        return self.proxied_ms - self.direct_ms


def measure() -> Cost:
    """Return the round whose requests had the median of what a door adds; each round has processes of its own.

    Streams are measured in the first round alone.
    """
    first = _round(stream=True)
    rounds = sorted([first, *(_round(stream=False) for _ in range(ROUNDS - 1))], key=lambda one: one.added_ms)
    middle = rounds[ROUNDS // 2]
    return replace(first, direct_ms=middle.direct_ms, proxied_ms=middle.proxied_ms)


def _round(*, stream: bool) -> Cost:
    async def scenario(k: Keyed) -> Cost:
        return await asyncio.to_thread(_compare, k, stream=stream)

    with parts(host=_host) as shared:
        return in_keyed_door(shared, scenario)


class _Client:
    """One kept connection."""

    def __init__(self, end: socket.socket, form: str) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self._form = end, form
        self._room = memoryview(bytearray(BLOCK_BYTES))

    def ask(self, size: int) -> float:
        """Read an answer of ``size`` bytes; return the seconds it took."""
        started = time.perf_counter()
        self._end.sendall(b"GET " + self._form.format(size).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += self._some(self._end.recv(4096))
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise OSError(head.decode("latin-1"))
        left = size - len(head.partition(b"\r\n\r\n")[2])
        while left > 0:
            left -= self._some(self._end.recv_into(self._room))
        return time.perf_counter() - started

    @staticmethod
    def _some(got: T) -> T:
        if not got:
            raise ConnectionAbortedError("the connection ended within an answer")
        return got


def _compare(k: Keyed, *, stream: bool) -> Cost:
    context = ssl.create_default_context(cafile=str(k.parts.web.ca))
    with (
        socket.create_connection(("127.0.0.1", k.parts.web.port)) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as safe,
        socket.create_connection(("127.0.0.1", k.client.port)) as door,
    ):
        straight = _Client(safe, f"/bytes/{{}} HTTP/1.1\r\nHost: {k.host}\r\nAuthorization: Bearer x\r\n\r\n")
        through = _Client(door, f"http://{k.host}/bytes/{{}} HTTP/1.1\r\nHost: {k.host}\r\n\r\n")
        direct: list[float] = []
        proxied: list[float] = []
        for number in range(WARM + REQUESTS):
            for client, times in ((straight, direct), (through, proxied)):
                took_s = client.ask(100)
                if number >= WARM:
                    times.append(took_s)
        rates = [
            statistics.median(STREAM_BYTES / client.ask(STREAM_BYTES) / 1e6 for _ in range(3)) if stream else 0.0
            for client in (straight, through)
        ]
    return Cost(1000 * statistics.median(direct), 1000 * statistics.median(proxied), *rates)


@contextmanager
def _host(folder: Path) -> Iterator[TlsWeb]:
    """Yield a host in a process of its own; of what a TlsWeb is it has ``ca`` and ``port``."""
    process = subprocess.Popen(
        [sys.executable, __file__, "host", str(folder / "ca.pem")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield cast("TlsWeb", SimpleNamespace(ca=folder / "ca.pem", port=int(process.stdout.readline()), asked=[]))
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _serve(file: Path) -> None:
    """Be the host, until killed: answers /bytes/N as fast as one thread can."""
    authority = Authority(os.urandom(32), int(time.time()))
    file.write_text(authority.pem)
    context = server_context(authority, "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            end, _ = listener.accept()
            threading.Thread(target=_talk, args=(context, end), daemon=True).start()


def _talk(context: ssl.SSLContext, end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    block = os.urandom(BLOCK_BYTES)
    with suppress(OSError), end, context.wrap_socket(end, server_side=True) as safe:
        while True:
            head = b""
            while b"\r\n\r\n" not in head:
                more = safe.recv(4096)
                if not more:
                    return
                head += more
            left = size = int(head.split(b" ", 2)[1].rpartition(b"/")[2])
            safe.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + block[: min(left, 100)])
            left -= min(left, 100)
            while left > 0:
                left -= safe.send(block[:left])


if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        _serve(Path(sys.argv[2]))
    print(measure())
