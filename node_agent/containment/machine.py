"""The loop of script.py in the machine's own code, where it is known: one call carries out a whole table.

Called by script.py alone. Must never do less than that loop does: the same calls in the same order, the one result that
each must have, none after the first that has another. Where there is no code for a machine, or the host lets this
process map none, there is no such loop, and tables are carried out row by row.

Why: a worker makes a hundred calls, once each. In Python every one costs a microsecond and the copies of the pages that
its row and arguments lie on. The code comes from a sealed file: no memory is ever both written and run.

Source: the calling conventions of the System V ABI (x86-64); syscall(2), memfd_create(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
from collections.abc import Callable
from typing import Final, TypeAlias

from node_agent.containment import linux
from node_agent.containment.sysnumbers import NUMBERS

__all__ = ["Loop", "loop"]

#: (address of the first row, address behind the last) → the last result, or, less than 0, minus the address of the row
#: that failed, which then holds its result where the expected one was. A row is eight words of eight bytes: the call's
#: number, its expected result (-2: whatever is no error) and its six arguments.
Loop: TypeAlias = Callable[[int, int], int]

_X86_64: Final = (
    "53 41 54"  # push rbx, r12
    "48 89 fb 49 89 f4 31 c0"  # rbx = the row, r12 = the end, rax = 0
    "4c 39 e3 73 43"  # again: at the end? done
    "48 8b 03 48 8b 7b 10 48 8b 73 18 48 8b 53 20 4c 8b 53 28 4c 8b 43 30 4c 8b 4b 38"  # number, six arguments
    "0f 05"  # syscall
    "48 8b 4b 08 48 83 f9 fe 74 11"  # rcx = the expected result; -2? any
    "48 39 c8 74 11"  # as expected? next
    "48 89 43 08 48 89 d8 48 f7 d8 eb 0b"  # fail: keep the result in the row, rax = -row, done
    "48 85 c0 78 ef"  # any: an error? fail
    "48 83 c3 40 eb b8"  # next: the row behind, again
    "41 5c 5b c3"  # done: pop r12, rbx; return rax
)
_CODE: Final = {"x86_64": bytes.fromhex(_X86_64)}
_PAGE_BYTES: Final = 4096
_READ_AND_RUN: Final = 0x1 | 0x4
_MAP_PRIVATE: Final = 0x2
_ALL_SEALS: Final = 0xF


@functools.cache
def loop() -> Loop | None:
    """Return the loop, None where there is none."""
    machine = os.uname().machine
    code = _CODE.get(machine)
    if code is None:
        return None
    try:
        fd = os.memfd_create("loop", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, code.ljust(_PAGE_BYTES, b"\0"))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)
            place = linux.raw(NUMBERS[machine]["mmap"], 0, _PAGE_BYTES, _READ_AND_RUN, _MAP_PRIVATE, fd, 0)
        finally:
            os.close(fd)
    except OSError:
        return None
    if place < 0:
        return None
    # The interpreter keeps its lock: this process has one thread, and letting go touches pages, too.
    return ctypes.PYFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)(place)
