"""The processes below this one: finds them, signals them, stops them all and lets them go on.

Called by the mould of levels C to F and its guard, for a pause and for a kill. Must never signal a process that is not
below: each is pinned by a pidfd first, and only then asked for its parent.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

__all__ = ["Pause", "children", "strike"]

_STOPPED = b"Tt"
_STILL = b"TtZXxD"


class Pause:
    """Pauses one attempt at a time."""

    def __init__(self) -> None:
        self._before: set[int] | None = None

    def stop(self) -> tuple[int, int]:
        """Send SIGSTOP to all that is found; return how many stand still and how many do not yet."""
        found = _below()
        if self._before is None:
            # The job may have stopped some itself: those stay so when the others go on.
            self._before = {pid for pid in found if _all_in(pid, _STOPPED)}
        for pid, parent in found.items():
            _signal(pid, parent, signal.SIGSTOP)
        again = [_all_in(pid, _STILL) for pid in _below()]
        return sum(again), len(again) - sum(again)

    def go_on(self) -> int:
        """Let everyone go on who was not stopped before the pause; return how many."""
        before, self._before = self._before or set[int](), None
        todo = {pid: parent for pid, parent in _below().items() if pid not in before}
        for pid, parent in todo.items():
            _signal(pid, parent, signal.SIGCONT)
        return len(todo)


def strike(number: signal.Signals) -> int:
    """Signal every process below this one that one look shows; return how many that were."""
    found = _below()
    for pid, parent in found.items():
        _signal(pid, parent, number)
    return len(found)


def children() -> list[int]:
    """Return this process's children; from its own list, or, where the kernel has none, from everybody's parents."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent_of(name) == own]


def _parent_of(name: str) -> int:
    with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


def _below() -> dict[int, int]:
    """Return every process below this one with its parent, as one look shows it."""
    found = dict.fromkeys(children(), os.getpid())
    todo = list(found)
    while todo:
        pid = todo.pop()
        with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            for child in map(int, file.read().split()):
                found[child] = pid
                todo.append(child)
    return found


def _signal(pid: int, parent: int, number: signal.Signals) -> None:
    with suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            # A child of a process that ended meanwhile is this one's now.
            if _fields(f"/proc/{pid}/stat")[1] in (b"%d" % parent, b"%d" % os.getpid()):
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def _all_in(pid: int, states: bytes) -> bool:
    """Return whether every thread is in one of the states; a process that is gone is."""
    try:
        return all(_fields(f"/proc/{pid}/task/{name}/stat")[0] in states for name in os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return True


def _fields(path: str) -> list[bytes]:
    """Return the fields behind the name, which may hold anything: state, parent, …"""
    with open(path, "rb") as file:
        return file.read().rpartition(b")")[2].split()
