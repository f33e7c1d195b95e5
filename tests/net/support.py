"""An egress process for one test, servers on loopback, and a client's side of a door. Called by the tests of net
grants.

Must never reach beyond loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from broker.egress.rules import Route
from node_agent.egress import SOCKET_NAME, Denied, Door, Egress
from runner.cli import egress, launch
from runner.errors import ConfigError
from runner.home import Home
from runner.wire.grants import NetGrant
from tests.support import scratch
from tests.support.wait import await_until, wait_until

__all__ = [
    "Client",
    "Egressed",
    "Process",
    "SocketServer",
    "egress_process",
    "in_door",
    "own_descriptors",
    "served",
    "web",
]

T = TypeVar("T")
STOP_S = 10.0


@dataclass(slots=True)
class Process:
    """A running egress process; its socket outlives it, so that it can be started again."""

    home: Home
    words: tuple[str, ...]
    inherit: tuple[int, ...]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process is not None
        return self.process.pid

    @property
    def path(self) -> Path:
        """Its control socket."""
        return self.home.sockets / SOCKET_NAME

    def held(self) -> int:
        """Return how many descriptors it has open; to an ordinary user, what it says of its doors and connections."""
        if os.geteuid() == 0:
            return len(os.listdir(f"/proc/{self.pid}/fd"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.settimeout(10)
            end.connect(str(self.path))
            end.send(b'{"op":"hello"}')
            state = json.loads(end.recv(1 << 16))
        return 2 * int(state["doors"]) + 2 * int(state["connections"])

    def start(self) -> None:
        """Start it; it ends with this process."""
        head = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(signal.SIGTERM)), launch.NO_UID]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*head, *self.words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={}, cwd="/",
                pass_fds=self.inherit,
            )  # fmt: skip # several to a line

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def egress_process(home: Path, *options: str) -> Iterator[Process]:
    """Yield an egress process that serves ``home``."""
    place = Home(home)
    home.mkdir(mode=0o700, exist_ok=True)
    with egress.listening(place) as held:
        process = Process(place, (*egress.program(held).words, *options), held, home / "egress.log")
        process.start()
        try:
            wait_until(lambda: _answers(process), "the egress process to answer", 30)
            yield process
        finally:
            process.stop()


def own_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def _answers(process: Process) -> bool:
    try:
        egress.describe(process.home)
    except ConfigError as error:
        return "weak: " in str(error)
    return True


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the path and the headers."""
        body = f"{self.path}\n{self.headers}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Answer with the body, in chunks."""
        size = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(size) if size else b"".join(self._chunks())
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(0, len(body), 1000):
            part = body[at : at + 1000]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - the base class's own
        """Say nothing."""


class _Files(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401 - the base class's own
        """Say nothing."""


@contextmanager
def web(folder: Path | None = None, host: str = "127.0.0.1") -> Iterator[int]:
    """Yield the port of a web server: one that echoes, or one of a folder's files."""

    def files(*arguments: Any) -> _Files:  # noqa: ANN401 - the base class's own
        return _Files(*arguments, directory=str(folder))

    with ThreadingHTTPServer((host, 0), files if folder else _Quiet) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class SocketServer:
    """A TCP server that keeps what comes and can answer; counts its connections."""

    def __init__(self, answer: Callable[[bytes], bytes] = lambda data: data, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0))
        self._answer = answer
        self.port: int = self._listener.getsockname()[1]
        self.seen: list[bytes] = []
        self.ends: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> SocketServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _serve(self) -> None:
        threads = []
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                break
            self.ends.append(end)
            self.seen.append(b"")
            thread = threading.Thread(target=self._talk, args=(end, len(self.seen) - 1), daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join(5)

    def _talk(self, end: socket.socket, number: int) -> None:
        with end, suppress(OSError):
            while data := end.recv(1 << 16):
                self.seen[number] += data
                end.sendall(self._answer(data))


@contextmanager
def served(answer: Callable[[bytes], bytes] = lambda data: data) -> Iterator[SocketServer]:
    """Yield a SocketServer."""
    with SocketServer(answer) as server:
        yield server


@dataclass(slots=True)
class Client:
    """What a job sees of its door: connections to a port of its own loopback."""

    port: int
    ends: list[socket.socket] = field(default_factory=list)

    def dial(self) -> socket.socket:
        """Return a new connection to the door."""
        end = socket.socket()
        self.ends.append(end)
        end.setblocking(False)
        with suppress(BlockingIOError):
            end.connect(("127.0.0.1", self.port))
        return end

    async def send(self, end: socket.socket, data: bytes, within_s: float = 10) -> None:
        """Write all of ``data``."""
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(end, data), within_s)

    async def read(self, end: socket.socket, until: bytes | None = None) -> bytes:
        """Read until ``until`` was seen, or to the end."""
        loop = asyncio.get_running_loop()
        data = b""
        while until is None or until not in data:
            try:
                more = await asyncio.wait_for(loop.sock_recv(end, 1 << 16), 15)
            except ConnectionError:
                break
            if not more:
                break
            data += more
        return data

    async def exactly(self, end: socket.socket, size: int) -> bytes:
        """Read ``size`` bytes."""
        data = b""
        while len(data) < size:
            more = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, size - len(data)), 15)
            assert more, f"the connection ended after {len(data)} bytes"
            data += more
        return data

    async def ask(self, data: bytes, until: bytes | None = None) -> bytes:
        """Send on a new connection and read the answer."""
        end = self.dial()
        await self.send(end, data)
        return await self.read(end, until)

    async def connect(self, destination: str) -> tuple[socket.socket, bytes]:
        """Ask for a tunnel; return the connection and the answer's head."""
        end = self.dial()
        await self.send(end, f"CONNECT {destination} HTTP/1.1\r\nHost: {destination}\r\n\r\n".encode())
        return end, await self.read(end, b"\r\n\r\n")


@dataclass(slots=True)
class Egressed:
    """One agent's line, one open door and its client."""

    process: Process
    egress: Egress
    door: Door
    client: Client
    denied: list[Denied]
    mould: subprocess.Popen[bytes]

    async def gone(self) -> None:
        """Wait until the door is closed for clients."""

        def refused() -> bool:
            with socket.socket() as end:
                return end.connect_ex(("127.0.0.1", self.client.port)) != 0

        await await_until(refused, "the door to be closed")


def in_door(
    scenario: Callable[[Egressed], Awaitable[T]],
    *,
    net: Sequence[tuple[str, int]],
    named: Sequence[str] = (),
    never: Sequence[tuple[str, int]] = (),
    options: Sequence[str] = (),
    routes: Sequence[Route] = (),
) -> T:
    """Run ``scenario`` with a door whose listener is on the test's own loopback, as a mould would make it."""

    async def main(process: Process) -> T:
        denied: list[Denied] = []
        line = Egress(process.path, never, denied.append)
        mould = subprocess.Popen(["sleep", "60"])
        listener = socket.create_server(("127.0.0.1", 0))
        client = Client(listener.getsockname()[1])
        try:
            rules = await line.check([NetGrant(host, port) for host, port in net], named, routes=routes)
            door = await line.open("main-job.1", rules, listener.detach(), os.pidfd_open(mould.pid))
            return await asyncio.wait_for(_awaited(scenario(Egressed(process, line, door, client, denied, mould))), 50)
        finally:
            listener.close()
            await line.stop()
            for end in client.ends:
                end.close()
            mould.kill()
            mould.wait()

    with scratch.folder() as folder, egress_process(folder / "h", *options) as process:
        try:
            return asyncio.run(main(process))
        finally:
            sys.stderr.write(process.log.read_text())


async def _awaited(thing: Awaitable[T]) -> T:
    return await thing
