"""The interpreter's code, mapped into every fork from its first instruction on.

Called by the zygote at its start, before it gives up looking into itself. Must never change what a page says, and never
fail: without it workers are slower, nothing else.

A fork does not copy the page tables of a mapping that has no page of its process's own, so a worker asks the kernel for
each 64 KiB of the interpreter's code that it touches, some seventy times. One byte written over with itself gives such
a mapping a page of its own, and from then on its tables are copied with all others, at a tenth of the price.

Source: the kernel's vma_needs_copy(); proc(5) "mem": a debugger's write, which no protection of the mapping stops.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final, NamedTuple

__all__ = ["keep_code_mapped"]

#: Of the interpreter's mappings: code, and what it only reads.
_KINDS: Final = ("r-xp", "r--p")


class _Mapping(NamedTuple):
    start: int
    end: int
    kind: str
    name: str

    @classmethod
    def of(cls, line: str) -> _Mapping:
        """Return what a line of /proc/PID/maps says; mappings of no file have no name."""
        span, kind, _, _, _, *name = line.split(None, 5)
        start, end = span.split("-")
        return cls(int(start, 16), int(end, 16), kind, "".join(name))


def keep_code_mapped() -> None:
    """Do it for the file that holds the interpreter's code, be it the program or its library."""
    inside = ctypes.cast(ctypes.pythonapi.Py_GetVersion, ctypes.c_void_p).value or 0
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            mappings = [_Mapping.of(line) for line in file]
        name = next(one.name for one in mappings if one.start <= inside < one.end)
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            for one in mappings:
                if name and one.name == name and one.kind in _KINDS:
                    os.pwrite(memory, os.pread(memory, 1, one.start), one.start)
        finally:
            os.close(memory)
    except (OSError, StopIteration):
        return  # not allowed here
