"""A Valkey with AOF that a test stops, kills, freezes and starts again on its data. Never outlives its block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis
from redis.exceptions import RedisError

from tests.support import scratch, valkey
from tests.support.wait import wait_until

__all__ = ["Store", "running"]

READY_S = 30.0
STOP_S = 30.0


@dataclass(slots=True)
class Store:
    """The server by its socket, whichever process serves it now."""

    folder: Path
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.folder / "s"

    @property
    def url(self) -> str:
        """As clients take it."""
        return f"unix://{self.socket}"

    def client(self) -> redis.Redis:
        """Return a new client that gives bytes."""
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=10.0)

    def start(self, *, wait: bool = True) -> None:
        """Start it on its data; ``wait`` until it answers."""
        words = ["--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700", "--dir", str(self.folder)]
        words += ["--logfile", str(self.folder / "log"), "--save", "", "--appendonly", "yes", "--daemonize", "no"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-c", valkey.LAUNCHER, str(os.getpid())),
                *(str(valkey.binary()), *words, *self.options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if wait:
            wait_until(self._answers, "the store to answer", READY_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it: SIGTERM in order, SIGKILL as a crash. What it answered lies in its file either way. Idempotent."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.send_signal(number)
            self.process.wait(STOP_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP makes an outage in which nothing is refused and nothing answered."""
        assert self.process is not None
        self.process.send_signal(number)

    def _answers(self) -> bool:
        """Whether it serves: its data is loaded."""
        with suppress(RedisError), redis.Redis(unix_socket_path=str(self.socket)) as client:
            return bool(client.ping())
        return False


@contextmanager
def running(options: Sequence[str] = ()) -> Iterator[Store]:
    """Yield a started store."""
    with scratch.folder(mode=0o711) as folder:
        store = Store(folder, options)
        store.start()
        try:
            yield store
        finally:
            if store.process is not None:
                store.process.kill()
                store.process.wait(STOP_S)
