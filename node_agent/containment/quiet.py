"""What an attempt could have changed of its mould: the mould's own limits, and sockets that outlive a process.

Called by the mould, before every attempt. Must never miss a change: a worker would inherit the limits (attack 37), and
find what is left in the net namespace (attack 38).
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Final

from node_agent.containment.script import ANY, Table, row

__all__ = ["Quiet"]

_LIMITS: Final = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))
_LIMIT_BYTES: Final = 16
_TEXT_BYTES: Final = 4096
#: Words of /proc/net/sockstat: the "used" of all sockets (2), and the "tw" of TCP (9), ends that only wait.
_WORDS: Final = 10
_NAMES: Final = [b"sockets:", b"used", b"TCP:", b"tw"]


class Quiet:
    """How a mould was before its first attempt."""

    def __init__(self) -> None:
        """Look. Raises OSError: the kernel does not tell, or in another form."""
        self._text_at = _LIMIT_BYTES * len(_LIMITS)
        self._space = (ctypes.c_char * (self._text_at + _TEXT_BYTES))()
        start = ctypes.addressof(self._space)
        self._fd = os.open("/proc/self/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
        limits = [
            row("mould", "prlimit64", 0, number, None, start + index * _LIMIT_BYTES)
            for index, number in enumerate(_LIMITS)
        ]
        text = row("mould", "pread64", self._fd, start + self._text_at, _TEXT_BYTES, 0, expect=ANY)
        self._look = Table([*limits, text])
        words = self._read()
        if [words[0], words[1], words[3], words[8]] != _NAMES:
            raise OSError(0, "/proc/net/sockstat does not tell how many sockets there are")
        self._limits = self._space[: self._text_at]
        self._used, self._waiting = words[2], words[9]

    def change(self) -> str:
        """Return what has changed: limits, sockets, or nothing."""
        words = self._read()
        if self._space[: self._text_at] != self._limits:
            return "limits"
        return "" if words[2] == self._used and words[9] == self._waiting else "sockets"

    def _read(self) -> list[bytes]:
        """Have the kernel tell both; return the first words on the sockets."""
        size = self._look.run()
        text: bytes = self._space[self._text_at : self._text_at + size]  # type: ignore[assignment] # characters
        return text.split(None, _WORDS)
