"""One quick look at the processes of an attempt that has no cgroup, in the moment before it is killed.

Called by the attempt. Must never delay a kill by more than a few milliseconds: what it finds goes into the receipt and
the evidence, and nothing else depends on it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

__all__ = ["Glance", "below", "sockets_below"]

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
        with suppress(OSError), open(f"/proc/{each}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[_TIMES]))
            pages = max(pages, int(fields[_PAGES]))
    return Glance(len(found), ticks * _TICK_S, pages * _PAGE_BYTES)


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
    todo, found = [pid], list[int]()
    while todo and len(found) < _MOST_COUNTED:
        parent = todo.pop()
        with suppress(OSError), open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
            found += children
            todo += children
    return found
