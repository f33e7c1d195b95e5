"""Starts node agents from the nursery of this test process. Called by Rig; each is used like a subprocess.Popen.

How an agent starts up from nothing is not seen this way: `up` starts its own from nothing, and so does a rig that is
``real``. Must never let an agent outlive this test process: the nursery ends with its socket, and they end with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import leaks

__all__ = ["Agent", "close", "start"]

NURSERY = Path(__file__).with_name("nursery.py")
STOP_S = 10.0


class Agent:
    """One agent's process, as subprocess.Popen shows a child."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self.returncode: int | None = None
        self.pid = int.from_bytes(os.read(answers, 4), "little")
        if not self.pid:
            os.close(answers)
            raise ChildProcessError("the nursery of agents has ended: see what it wrote to stderr")

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit status. Raises subprocess.TimeoutExpired."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(["agent", str(self.pid)], timeout or 0.0)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], timeout_s)[0]:
            status = os.read(self._answers, 4)
            # Without a word the nursery is gone, and took it along.
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little")) if status else -signal.SIGKILL
            os.close(self._answers)
        return self.returncode


class _Nursery:
    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-I", str(NURSERY), str(theirs.fileno())]
            null = subprocess.DEVNULL
            self._process = subprocess.Popen(
                words,
                stdin=null,
                stdout=null,
                stderr=None,
                pass_fds=[theirs.fileno()],
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                cwd="/",
            )
        self.started = (self._process.pid, self._orders.fileno())

    def start(self, words: Sequence[str], env: Mapping[str, str], log: int, *, faulty: bool) -> Agent:
        order = {"words": list(words), "env": dict(env), "faulty": faulty}
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [null, log, log, writer])
        finally:
            os.close(null)
            os.close(writer)
        return Agent(reader)

    def close(self) -> None:
        self._orders.close()
        self._process.wait(STOP_S)


_nursery: _Nursery | None = None


def start(words: Sequence[str], env: Mapping[str, str], log: int, *, faulty: bool = False) -> Agent:
    """Start an agent in / with this command line, environment and log; ``faulty``: see faulty_agent.py."""
    global _nursery
    if _nursery is None:
        _nursery = _Nursery()
        leaks.spare(*_nursery.started)
    return _nursery.start(words, env, log, faulty=faulty)


def close() -> None:
    """End the nursery, at the end of the test process. Idempotent."""
    global _nursery
    if _nursery is not None:
        _nursery.close()
        leaks.mind(*_nursery.started)
        _nursery = None
