"""The kernel's counters of one slot's cgroups: opened once, read with one call each.

Called by slotgroup.py before and after each attempt. Must never keep a number when the kernel's text has changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["Counters"]

#: More than any of these files holds; the kernel gives a file of less than a page in one piece.
_MOST_BYTES: Final = 8192


class Counters:
    """Numbers by name. A file that this kernel does not have counts 0.

    ``files``: each number's file and its key there, "" for a file that is one number. ``resettable``: the name of the
    one that a write sets back.
    """

    def __init__(self, files: Mapping[str, tuple[Path, str]], resettable: str = "") -> None:
        self._open = {}
        self._resettable = -1
        for name, (path, key) in files.items():
            with suppress(FileNotFoundError):
                fd = self._opened(path, name == resettable)
                self._open[name] = _Counter(fd, key)

    def read(self) -> dict[str, int]:
        """Return every number as it is now."""
        return {name: counter.read() for name, counter in self._open.items()}

    def reset(self) -> None:
        """Set the resettable one back, where the kernel lets us."""
        if self._resettable >= 0:
            with suppress(OSError):
                os.pwrite(self._resettable, b"0", 0)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for counter in self._open.values():
            os.close(counter.fd)
        self._open.clear()
        self._resettable = -1

    def _opened(self, path: Path, resettable: bool) -> int:
        if resettable:
            with suppress(PermissionError):
                # From 6.12 on a write starts a new peak for this open file only, so it is the one that is read, too.
                self._resettable = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                return self._resettable
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class _Counter:
    """One number: the whole content of a file, or what follows a key at the start of a line."""

    __slots__ = ("_key", "_number", "_text", "fd")

    def __init__(self, fd: int, key: str) -> None:
        self.fd = fd
        self._key = f"\n{key} ".encode() if key else b""
        self._text = b""
        self._number = 0

    def read(self) -> int:
        text = os.pread(self.fd, _MOST_BYTES, 0)
        if text != self._text:
            rest = (b"\n" + text).partition(self._key)[2] if self._key else text
            self._number = int(rest.split(None, 1)[0]) if rest else 0
            self._text = text
        return self._number
