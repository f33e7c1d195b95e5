"""Runs commands of Ringfence from a process that has loaded them once: 30 ms each instead of 400. Called by Fleet.

Each command is a process of its own with its own arguments, environment and descriptors, as from a terminal. How the
command starts up is not seen this way: tests of that start `CLI` themselves.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support import leaks

__all__ = ["Shell", "close", "shared"]

WARM = Path(__file__).with_name("warm.py")
READ_BYTES = 1 << 16
STOP_S = 10.0


class Shell:
    """The warm process; `close` ends it. Threads may use one at the same time."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-I", str(WARM), str(theirs.fileno())]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(words, stdin=null, stdout=null, stderr=None, pass_fds=[theirs.fileno()])
        self.started = (self._process.pid, self._orders.fileno())

    def close(self) -> None:
        """End the process; commands that still run go on."""
        self._orders.close()
        self._process.wait(STOP_S)

    def run(self, words: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run one command without input to its end.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed.
        """
        order = {"words": list(words), "folder": os.getcwd(), "environment": dict(os.environ)}
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        readers = [reader for reader, _ in pipes]
        try:
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], [null, *(writer for _, writer in pipes)])
            finally:
                for descriptor in (null, *(writer for _, writer in pipes)):
                    os.close(descriptor)
            out, err, answer = _read(readers, time.monotonic() + timeout_s)
        finally:
            for reader in readers:
                os.close(reader)
        if len(answer) != 8:
            raise subprocess.TimeoutExpired(list(words), timeout_s, out, err)
        code = os.waitstatus_to_exitcode(int.from_bytes(answer[4:], "little"))
        return subprocess.CompletedProcess(list(words), code, out.decode(), err.decode())


_shared: Shell | None = None


def shared() -> Shell:
    """Return the one shell of this test process, started when it is first asked for."""
    global _shared
    if _shared is None:
        _shared = Shell()
        leaks.spare(*_shared.started)
    return _shared


def close() -> None:
    """End the shared shell, at the end of the test process. Idempotent."""
    global _shared
    if _shared is not None:
        _shared.close()
        leaks.mind(*_shared.started)
        _shared = None


def _read(readers: Sequence[int], deadline_s: float) -> list[bytes]:
    """Read all to their ends; after the deadline kill whose pid stands in the last one."""
    found = dict.fromkeys(readers, b"")
    with selectors.DefaultSelector() as selector:
        for reader in readers:
            selector.register(reader, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                pid = int.from_bytes(found[readers[-1]][:4], "little")
                if pid:
                    os.kill(pid, signal.SIGKILL)
                found[readers[-1]] = b""
                break
            for key, _ in ready:
                data = os.read(key.fd, READ_BYTES)
                found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    return list(found.values())
