"""What the vault broker costs, beside an ssh-agent and an aiohttp server, in one run. Used by main.py.

By itself it prints its figures. Starts and ends a broker, two jobs of the bench, an ssh-agent and an aiohttp server.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from broker.client import LeaseAsk, SecretAsk
from broker.vault.redact import Redactor
from tests.bench import asking
from tests.support import scratch
from tests.support.wait import wait_until
from tests.vault.stand import Stand

#: The interpreter that has aiohttp, if this one has none.
AIOHTTP_VARIABLE = "RINGFENCE_BENCH_AIOHTTP"
IDLE = 1000
#: Channels of the asking job: the broker lets one lease ask a thousand times a second, and no more.
CHANNELS = 16
ASKED = 6000
SIGNED = 600
JOB_UIDS = (1_900_000_700, 1_900_000_701)
REDACTED_BYTES = 24 << 20
CHUNK_BYTES = 64 * 1024
LEVEL: Literal["A", "B"] = "A" if os.geteuid() == 0 else "B"
_ECHO = r"""
import asyncio, json, sys, time
import aiohttp
from aiohttp import web
async def main(path, count):
    app = web.Application()
    async def echo(request):
        return web.Response(body=await request.read())
    app.router.add_post("/", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    print("ready", flush=True)
    await asyncio.Event().wait()
async def ask(path, count):
    found = []
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
        for _ in range(count):
            began = time.perf_counter()
            async with session.post("http://x/", data=b'{"op":"list"}') as reply:
                await reply.read()
            found.append(1000 * (time.perf_counter() - began))
    print(json.dumps(found), flush=True)
asyncio.run((main if sys.argv[1] == "serve" else ask)(sys.argv[2], int(sys.argv[3])))
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in ms, rates per second, sizes in MiB; None: that neighbour is not there to be measured."""

    get_per_s: float
    get_p50_ms: float
    get_p99_ms: float
    list_per_s: float
    sign_p50_ms: float | None
    echo_per_s: float | None
    revoked_ms: float
    redactor_mb_s: float
    rss_mib: float


class Asker:
    """A process of asking.py with its leases' channels."""

    def __init__(self, channels: int, uid: int) -> None:
        self.uid = uid if LEVEL == "A" else os.geteuid()
        self.pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(channels)]
        fds = [far.fileno() for _, far in self.pairs]
        # Idle channels stay here: their ends are watched, and an idle job holds them without a word.
        given = fds if channels <= CHANNELS else []
        words = [sys.executable, "-I", "-S", asking.__file__, ",".join(map(str, given))]
        self.process = subprocess.Popen(
            words + (["--apart"] if LEVEL == "B" else []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=given,
            text=True,
            user=self.uid if LEVEL == "A" else None,
            group=self.uid if LEVEL == "A" else None,
            extra_groups=[] if LEVEL == "A" else None,
        )
        self.pid = int(self._line())
        self.pins = [os.pidfd_open(self.process.pid), os.pidfd_open(self.pid)]
        if LEVEL == "B":
            self.pins.append(os.open(f"/proc/{self.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC))

    def ask(self, word: str, count: int) -> list[float]:
        """Return the times of so many answers, in ms."""
        sink = self.process.stdin
        if sink is None:
            raise SystemExit("a job of the bench has no pipe")
        sink.write(f"{word} {count}\n")
        sink.flush()
        return cast("list[float]", json.loads(self._line()))

    def lease(self, number: int) -> LeaseAsk:
        """Return what an agent would say of one channel's attempt."""
        secrets = [SecretAsk("KEY", "get")]
        name = f"main-{self.uid}x{number}"
        return LeaseAsk(f"{name}.1", name, "main", "agents", LEVEL, self.uid, "a:b", None, {}, secrets)

    def end(self) -> None:
        """End the process and close all that this side holds."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        for pin in self.pins:
            os.close(pin)
        for near, far in self.pairs:
            near.close()
            far.close()

    def _line(self) -> str:
        if self.process.stdout is None:
            raise SystemExit("a job of the bench has no pipe")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a job of the bench has ended: its words are above")
        return line


def measure() -> Figures:
    """Return what was measured."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with scratch.folder() as home, ExitStack() as stack:
        stand = Stand(home, {"KEY": b"a-value-of-thirty-two-characters"})
        stand.start()
        stack.callback(stand.stop)
        return asyncio.run(_broker(stand, home))


async def _broker(stand: Stand, home: Path) -> Figures:
    client = stand.client()
    client.start()
    asker, idle = Asker(CHANNELS, JOB_UIDS[0]), Asker(IDLE, JOB_UIDS[1])
    try:
        for one in (asker, idle):
            for number, (near, _) in enumerate(one.pairs):
                await client.open(one.lease(number), (near.fileno(), *one.pins))
        await asyncio.to_thread(asker.ask, "get", 600)
        gets = sorted(await asyncio.to_thread(asker.ask, "get", ASKED))
        signs = await asyncio.to_thread(_signatures, home)
        lists = await asyncio.to_thread(asker.ask, "list", ASKED)
        echoes = await asyncio.to_thread(_echoes, home)
        process = stand.process.pid if stand.process is not None else 0
        rss_mib = _rss_mib(process)
        revoked_ms = await asyncio.to_thread(_revoked, idle)
    finally:
        await client.stop()
        asker.end()
        idle.end()
    return Figures(
        1000 * len(gets) / sum(gets),
        statistics.median(gets),
        gets[int(0.99 * len(gets))],
        1000 * len(lists) / sum(lists),
        statistics.median(signs) if signs else None,
        1000 * len(echoes) / sum(echoes) if echoes else None,
        revoked_ms,
        _redactor_mb_s(),
        rss_mib,
    )


def _revoked(idle: Asker) -> float:
    """Return how long after the death of their process the last of its channels is dead, in ms."""
    poll = select.epoll()
    for _, far in idle.pairs:
        poll.register(far, select.EPOLLHUP)
    began = time.perf_counter()
    os.kill(idle.pid, signal.SIGKILL)
    left = {far.fileno() for _, far in idle.pairs}
    while left and time.perf_counter() - began < 10:
        for fd, _ in poll.poll(1, IDLE):
            left.discard(fd)
            poll.unregister(fd)
    took_ms = 1000 * (time.perf_counter() - began)
    poll.close()
    if left:
        raise SystemExit(f"{len(left)} leases outlived their process")
    return took_ms


def _rss_mib(pid: int) -> float:
    rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["VmRSS"].split()[0]) / 1024


def _redactor_mb_s() -> float:
    dice = random.Random(1)
    words = [f"word{dice.randrange(10**6)}" for _ in range(2000)]
    text = " ".join(dice.choice(words) for _ in range(CHUNK_BYTES // 8)).encode()[:CHUNK_BYTES]
    redactor = Redactor({f"K{n}": dice.randbytes(16).hex().encode() for n in range(3)})
    began = time.perf_counter()
    for _ in range(REDACTED_BYTES // CHUNK_BYTES):
        redactor.feed(text)
    return REDACTED_BYTES / 1e6 / (time.perf_counter() - began)


def _signatures(home: Path) -> list[float]:
    """Return the times of ed25519 signatures of an ssh-agent, in ms; none where there is no ssh-agent."""
    if not all(map(shutil.which, ("ssh-agent", "ssh-add", "ssh-keygen"))):
        return []
    path, key = home / "agent", home / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    with _running(["ssh-agent", "-D", "-a", str(path)], path):
        environment = {**os.environ, "SSH_AUTH_SOCK": str(path)}
        subprocess.run(["ssh-add", "-q", str(key)], check=True, env=environment, capture_output=True)
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(path))
            blob = _string(_told(line, b"\x0b")[5:])
            order = b"\x0d" + _packed(blob) + _packed(b"x" * 64) + bytes(4)
            found = []
            for _ in range(SIGNED):
                began = time.perf_counter()
                reply = _told(line, order)
                found.append(1000 * (time.perf_counter() - began))
                if reply[:1] != b"\x0e":
                    raise SystemExit("the ssh-agent does not sign")
    return found


def _told(line: socket.socket, order: bytes) -> bytes:
    line.sendall(_packed(order))
    data = line.recv(65536)
    while len(data) < 4 + struct.unpack(">I", data[:4])[0]:
        data += line.recv(65536)
    return data[4:]


def _packed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _string(data: bytes) -> bytes:
    return data[4 : 4 + struct.unpack(">I", data[:4])[0]]


def _echoes(home: Path) -> list[float]:
    """Return the times of an aiohttp server's echoes, in ms; none where no interpreter has aiohttp."""
    python = aiohttp_python()
    if python is None:
        return []
    path = home / "echo"
    with _running([python, "-I", "-c", _ECHO, "serve", str(path), "0"], path):
        done = subprocess.run(
            [python, "-I", "-c", _ECHO, "ask", str(path), str(ASKED // 3)], check=True, capture_output=True, text=True
        )
    return cast("list[float]", json.loads(done.stdout))


def aiohttp_python() -> str | None:
    """Return an interpreter that has aiohttp, or None."""
    for python in filter(None, (os.environ.get(AIOHTTP_VARIABLE), sys.executable)):
        if subprocess.run([python, "-I", "-c", "import aiohttp"], capture_output=True, check=False).returncode == 0:
            return python
    return None


@contextmanager
def _running(words: list[str], path: Path) -> Iterator[None]:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        wait_until(path.exists, f"{words[0]} serves")
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    for name, value in asdict(measure()).items():
        print(f"{name:16}{'-' if value is None else f'{value:.3f}'}")
