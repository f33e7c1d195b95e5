"""The ends of processes without the objects of the os module: a mould waits, and a worker leaves, for every attempt.

Called by the mould (``Reaper``) and the worker (``leave``). Must never wait: a mould has a lifeline to look at.

Source: wait4(2), getrusage(2), exit_group(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from node_agent.containment import linux
from node_agent.containment.sysnumbers import NUMBERS

__all__ = ["Reaper", "leave"]

_NUMBERS: Final = NUMBERS.get(os.uname().machine, {})
_WAIT4: Final = _NUMBERS.get("wait4", -1)
_EXIT_GROUP: Final = _NUMBERS.get("exit_group", -1)
#: WNOHANG and __WALL.
_OPTIONS: Final = 0x4000_0001
_RUSAGE_AT: Final = 16
_RUSAGE_BYTES: Final = 144
#: The status; then, of struct rusage, user and system time as seconds and microseconds each, and the largest size.
_told: Final = struct.Struct("i12x5q").unpack_from


class Reaper:
    """Takes dead children one by one."""

    __slots__ = ("_call", "_space")

    def __init__(self) -> None:
        """Reserve where the kernel writes."""
        self._space = ctypes.create_string_buffer(_RUSAGE_AT + _RUSAGE_BYTES)
        at = ctypes.addressof(self._space)
        self._call = (_WAIT4, -1, at, _OPTIONS, at + _RUSAGE_AT, 0, 0)

    def reap(self) -> int:
        """Return a dead child's pid, 0 if none is dead, -1 if there is no child. Raises OSError."""
        pid = linux.raw(*self._call)
        if pid < 0 and ctypes.get_errno() != errno.ECHILD:
            raise OSError(ctypes.get_errno(), "wait4: " + os.strerror(ctypes.get_errno()))
        return int(pid)

    def told(self) -> tuple[int, int, int]:
        """Return the raw status of the last one, its microseconds of cpu, and its largest size in bytes."""
        status, user_s, user_us, system_s, system_us, max_rss_kib = _told(self._space)
        return status, (user_s + system_s) * 1_000_000 + user_us + system_us, max_rss_kib * 1024


def leave(code: int) -> None:
    """End this process at once, as os._exit does; that one looks its call up at the first use and copies 12 pages."""
    linux.raw(_EXIT_GROUP, code & 0xFF, 0, 0, 0, 0, 0)
