"""One quick look at the processes of an attempt that has no cgroup, in the moment before it is killed.

Called by the attempt, for budgets of CPU time while it runs, too. Must never delay a kill by more than a few
milliseconds: what it finds there goes into the receipt and the evidence, and nothing else depends on it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

__all__ = ["Glance", "below", "cpu_s_below", "sockets_below"]

#: Most processes that are counted, and most whose figures are read.
_MOST_COUNTED: Final = 600
_MOST_READ: Final = 32
#: Most descriptors that are looked at for one job.
_MOST_FDS: Final = 8192
#: Fields of /proc/PID/stat behind the name: utime, stime, cutime, cstime, and the resident pages.
_TIMES: Final = slice(11, 15)
_PAGES: Final = 21
_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
#: Longer than a list of as many children as are counted.
_MOST_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Glance:
    """``processes`` that live now; CPU time and the largest process, of the first few of them."""

    processes: int = 0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0


def below(pid: int) -> Glance:
    """Look at the descendants of a process. Source: proc(5)."""
    found = _descendants(pid)
    ticks = pages = 0
    for each in found[:_MOST_READ]:
        fields = _stat(each)
        ticks += sum(map(int, fields[_TIMES]))
        pages = max(pages, int(fields[_PAGES]) if fields else 0)
    return Glance(len(found), ticks * _TICK_S, pages * _PAGE_BYTES)


def cpu_s_below(pid: int) -> float:
    """Return the CPU seconds of every descendant, and of those that they waited for; some milliseconds for hundreds.

    All are read: a job could let the first of them sleep.
    """
    return sum(sum(map(int, _stat(each)[_TIMES])) for each in _descendants(pid)) * _TICK_S


def sockets_below(pid: int) -> int:
    """Count the open sockets of a process's descendants, of the first few thousand descriptors."""
    seen = sockets = 0
    for each in _descendants(pid):
        with suppress(OSError):
            for name in os.listdir(f"/proc/{each}/fd"):
                if seen >= _MOST_FDS:
                    return sockets
                seen += 1
                with suppress(OSError):
                    sockets += os.readlink(f"/proc/{each}/fd/{name}").startswith("socket:")
    return sockets


def _descendants(pid: int) -> list[int]:
    """Children stand below the thread that made them, and pass to another one of its process when it ends."""
    todo, found = [pid], list[int]()
    while todo and len(found) < _MOST_COUNTED:
        parent = todo.pop()
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = [int(word) for word in _read(f"/proc/{parent}/task/{thread}/children").split()]
                found += children
                todo += children
    return found


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat behind the name; none if it is gone."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    """Return a short file of /proc; nothing if it is gone. Without the layers of open(), which cost more than that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, _MOST_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)
