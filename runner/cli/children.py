"""The daemons that `up` keeps running: start, watch, restart with a growing pause, end all.

Called by up.py. Must never leave a child behind: each one is tied to this process by the kernel (launch.py), lives in a
session of its own so that Ctrl-C reaches `up` alone, and is waited for.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from runner.cli import launch

__all__ = ["Child", "Children", "Program"]

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
#: A child that lived this long starts again with the first pause.
_STEADY_S: Final = 10.0
_LAUNCHER: Final = Path(__file__).with_name("launch.py")
#: What daemons get to see; heartbeat and strongest level are settings of agents.
_KEPT: Final = ("TZ", "HOME", "RINGFENCE_HEARTBEAT_S", "RINGFENCE_MAX_LEVEL")
#: Exit codes that say "don't start me again": wrong usage, wrong set-up.
_FINAL_CODES: Final = frozenset({2, 78})


@dataclass(frozen=True, slots=True)
class Program:
    """What to run, and how it is ended.

    ``death``: the signal it gets when `up` dies. ``stop_s``: its time between SIGTERM and SIGKILL.
    Higher ``stage`` ends first, all of one stage together. ``bare``: it gets an empty environment.
    """

    name: str
    words: tuple[str, ...]
    death: signal.Signals
    stop_s: float
    stage: int = 0
    uid: int | None = None
    inherit: tuple[int, ...] = ()
    bare: bool = False


@dataclass(slots=True)
class Child:
    """One program and its present process."""

    program: Program
    process: subprocess.Popen[bytes] | None = None
    pidfd: int = -1
    started_at: float = 0.0
    restart_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S

    @property
    def pid(self) -> int:
        """The process id, 0 while there is none."""
        return self.process.pid if self.process is not None else 0


@dataclass(slots=True)
class Children:
    """All children; ``say`` gets one line per thing that happened. Use from the main thread only."""

    say: Callable[[str], None]
    exit_code: int = 0
    _children: list[Child] = field(default_factory=list)
    _stopping: bool = False
    _wake: tuple[int, int] = (-1, -1)

    def catch_signals(self) -> None:
        """Let SIGINT, SIGTERM and SIGHUP end everything in order."""
        self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def over(self) -> bool:
        """Return whether a signal came, or a child ended for good."""
        return self._stopping

    def start(self, program: Program) -> Child:
        """Run ``program`` from now on."""
        child = Child(program)
        self._children.append(child)
        self._spawn(child)
        return child

    def watch(self, timeout_s: float) -> None:
        """Wait for an end, a due restart or a signal, at most ``timeout_s``; restart what ended."""
        now = time.monotonic()
        due = [child.restart_at for child in self._children if child.process is None]
        until = min([now + timeout_s, *due])
        self._poll(max(0.0, until - now))
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._ended(child)
            if not self._stopping and child.process is None and child.restart_at <= time.monotonic():
                self._spawn(child)

    def stop(self) -> None:
        """End all children, stage by stage; idempotent."""
        self._stopping = True
        for stage in sorted({child.program.stage for child in self._children}, reverse=True):
            _end([child for child in self._children if child.program.stage == stage])

    def close(self) -> None:
        """Stop, and give signals back."""
        self.stop()
        if self._wake[0] >= 0:
            signal.set_wakeup_fd(-1)
            for descriptor in self._wake:
                os.close(descriptor)
            self._wake = (-1, -1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _poll(self, timeout_s: float) -> None:
        poll = select.poll()
        if self._wake[0] >= 0:
            poll.register(self._wake[0], select.POLLIN)
        for child in self._children:
            if child.process is not None:
                poll.register(child.pidfd, select.POLLIN)
        if not self._stopping:
            poll.poll(timeout_s * 1000)

    def _spawn(self, child: Child) -> None:
        program = child.program
        uid = launch.NO_UID if program.uid is None else str(program.uid)
        words = [str(_LAUNCHER), str(os.getpid()), str(int(program.death)), uid, *program.words]
        child.process = subprocess.Popen(
            [sys.executable, "-I", "-S", *words],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env={} if program.bare else environment(),
            cwd="/",
            start_new_session=True,
            pass_fds=program.inherit,
        )
        child.pidfd = os.pidfd_open(child.process.pid)
        child.started_at = time.monotonic()

    def _ended(self, child: Child) -> None:
        code = _reap(child)
        if self._stopping:
            return
        if code in _FINAL_CODES:
            self.say(f"{child.program.name} ended with {code} and can't be started like this")
            self._stopping, self.exit_code = True, code
            return
        lived_s = time.monotonic() - child.started_at
        child.pause_s = _FIRST_PAUSE_S if lived_s >= _STEADY_S else min(child.pause_s * 2, _LONGEST_PAUSE_S)
        child.restart_at = time.monotonic() + child.pause_s
        how = f"signal {-code}" if code < 0 else f"code {code}"
        self.say(f"{child.program.name} ended ({how}), starts again in {child.pause_s:g} s")


def environment() -> dict[str, str]:
    """Return all that a daemon gets to see of this process's environment."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **kept}


def _end(group: Sequence[Child]) -> None:
    alive = [child for child in group if child.process is not None]
    for child in alive:
        _signal(child, signal.SIGTERM)
    for child in alive:
        deadline = time.monotonic() + child.program.stop_s
        poll = select.poll()
        poll.register(child.pidfd, select.POLLIN)
        while not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            if time.monotonic() >= deadline:
                _signal(child, signal.SIGKILL)
                deadline += child.program.stop_s
        _reap(child)


def _signal(child: Child, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(child.pidfd, number)
    except ProcessLookupError:
        return


def _reap(child: Child) -> int:
    process = child.process
    if process is None:
        return 0
    code = process.wait()
    os.close(child.pidfd)
    child.process, child.pidfd = None, -1
    return code
