"""Stops every process of a pid namespace where no cgroup can be frozen, and lets them go on.

Called by the mould, which is pid 1 of that namespace, for a pause. Must never be called anywhere else: kill(-1) would
reach the whole host.

One kill(-1, SIGSTOP) reaches every process, also one that is being forked (the kernel delivers a signal for many to the
child of a fork under way). What it can't do at once is stop a process in the middle of a system call, or one that a
tracer lets go on before the tracer itself stops: so the sweep is repeated, by the agent's word, until nothing moves.
Source: kill(2), signal(7), proc(5) "stat".
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Final

__all__ = ["Stopper"]

#: States of a thread that runs no code of the job: stopped, traced, dead; and waiting in the kernel, where SIGSTOP is
#: the first thing that it meets.
_STILL: Final = b"TtZXxD"
_STOPPED: Final = b"Tt"


class Stopper:
    """Pauses one attempt at a time. ``proc``: where this namespace's /proc is mounted."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._before: set[int] | None = None

    def stop(self) -> tuple[int, int]:
        """Send SIGSTOP to everyone else; return how many processes stand still and how many do not yet."""
        if os.getpid() != 1:
            return 0, 0
        if self._before is None:
            # The job may have stopped some itself: those stay so when the others go on.
            self._before = {pid for pid in self._pids() if self._all_in(pid, _STOPPED)}
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        found = [self._all_in(pid, _STILL) for pid in self._pids()]
        return sum(found), len(found) - sum(found)

    def go_on(self) -> int:
        """Let everyone go on who was not stopped before the pause; return how many."""
        before, self._before = self._before or set[int](), None
        count = 0
        for pid in self._pids():
            if pid not in before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                    count += 1
        return count

    def forget(self) -> None:
        """The attempt is over."""
        self._before = None

    def _pids(self) -> list[int]:
        return [int(name) for name in os.listdir(self._proc) if name.isdecimal() and name != "1"]

    def _all_in(self, pid: int, states: bytes) -> bool:
        """Return whether every thread is in one of the states; the first thread may be dead while others run."""
        try:
            return all(
                self._state(f"{self._proc}/{pid}/task/{name}/stat") in states
                for name in os.listdir(f"{self._proc}/{pid}/task")
            )
        except FileNotFoundError:
            return True

    @staticmethod
    def _state(path: str) -> bytes:
        """Return the letter after the name, which may hold anything but ends with the last parenthesis."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b"X"
        try:
            text = os.read(fd, 1024)
        except ProcessLookupError:
            return b"X"
        finally:
            os.close(fd)
        return text[text.rindex(b")") + 2 :][:1]
