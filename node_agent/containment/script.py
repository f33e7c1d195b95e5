"""The steps that restrict a worker, as a table of system calls, and the loop that carries one out.

Made by the mould (the constant parts, once), completed and run by the worker. Must never go on after a call whose
result is not the expected one: the loop raises, and the attempt is refused under the name of the step.

Why a table: a worker shares every page with its mould until it writes to it, Python writes to each object that it only
looks at, and the first write copies a page. Rows that lie side by side and one loop touch a tenth of the pages that
calls through functions do. Descriptors are numbers known beforehand, because a worker's table of descriptors is: a call
that returns another one is an error.

Source: the man pages of the calls; DESIGN §5 for their order.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from node_agent.containment import linux, machine
from node_agent.containment.sysnumbers import NUMBERS

__all__ = [
    "ANY",
    "AT_FDCWD",
    "FIRST_FD",
    "RECEIVE_CLOEXEC",
    "RECORD_BYTES",
    "Memory",
    "Row",
    "StepError",
    "Table",
    "close_but",
    "copy",
    "opened",
    "row",
    "run",
    "written",
]

Argument: TypeAlias = int | bytes | None
#: (step, expected result, call's number, its six arguments). Bytes are passed by address.
Row: TypeAlias = tuple[str, int, int, Argument, Argument, Argument, Argument, Argument, Argument]

#: Expected result: anything that is no error. Not -1, which is what an error looks like.
ANY: Final = -2
AT_FDCWD: Final = -100
#: The number that a plan's first descriptor gets: all but 0, 1, 2 and FD_KERNEL is closed before it arrives.
FIRST_FD: Final = 3
_NUMBERS: Final = NUMBERS.get(os.uname().machine, {})
_LAST: Final = 0xFFFF_FFFF
_ARGUMENTS: Final = 6
_WORDS: Final = 2 + _ARGUMENTS
#: Most descriptors that one message carries (SCM_MAX_FD).
_MAX_FDS: Final = 253
_CTRUNC: Final = 0x08
_TRUNC: Final = 0x20
_SOL_SOCKET: Final = int(socket.SOL_SOCKET)
_SCM_RIGHTS: Final = int(socket.SCM_RIGHTS)
_HEAD_BYTES: Final = 16
_OUTGOING: Final = 128
_INBOX: Final = 4096
#: The descriptors of a message lie right before its record, so that one slice holds both.
_CONTROL: Final = _INBOX - socket.CMSG_SPACE(4 * _MAX_FDS)
RECORD_BYTES: Final = 1 << 16
#: MSG_CMSG_CLOEXEC.
RECEIVE_CLOEXEC: Final = 0x4000_0000
_received: Final = struct.Struct("Qi").unpack_from
_head: Final = struct.Struct("Qii").unpack_from
_numbers: Final = struct.unpack_from


class StepError(OSError):
    """A call of the table did not do what it must; ``step`` names its part."""

    def __init__(self, step: str, errno: int, detail: str) -> None:
        super().__init__(errno, detail)
        self.step = step


def run(rows: Iterable[Row]) -> int:
    """Carry the calls out, in order, and return the last result.

    Raises:
        StepError: a call did not return what it must; none after it was made.
    """
    call, found = linux.raw, 0
    for step, expected, number, a, b, c, d, e, f in rows:
        found = call(number, a, b, c, d, e, f)
        if found != expected and (found < 0 or expected >= 0):
            raise _failed(step, number, found)
    return found


class Table:
    """Rows that are carried out more than once, or by many workers: laid out for machine.py where it has a loop."""

    __slots__ = ("_first", "_go", "_held", "_rows")

    def __init__(self, rows: Iterable[Row]) -> None:
        """Lay the rows out; what they point to is kept."""
        self._rows = tuple(rows)
        loop = machine.loop()
        words = [word for _, expected, number, *args in self._rows for word in (number, expected, *map(_word, args))]
        self._held = (ctypes.c_int64 * len(words))(*words)
        self._first = ctypes.addressof(self._held)
        end = self._first + ctypes.sizeof(self._held)
        self._go = functools.partial(run, self._rows) if loop is None else functools.partial(loop, self._first, end)

    def run(self) -> int:
        """Do what ``run`` does with the rows."""
        found = self._go()
        if found < 0:
            raise self._stopped(found)
        return found

    def _stopped(self, found: int) -> StepError:
        place = (-found - self._first) // (8 * _WORDS)
        step, expected, number, *_ = self._rows[place]
        result, self._held[place * _WORDS + 1] = self._held[place * _WORDS + 1], expected
        if result < 0:
            ctypes.set_errno(-result)
        return _failed(step, number, result)


def _word(argument: Argument) -> int:
    if isinstance(argument, bytes):
        return ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0
    return argument or 0


def row(step: str, call: str, *args: Argument, expect: int = 0) -> Row:
    """Return one row; ``call`` is a system call's name."""
    return (step, expect, _NUMBERS[call], *args, *(0,) * (_ARGUMENTS - len(args)))  # type: ignore[return-value] # six arguments


def opened(step: str, path: bytes, flags: int, fd: int, mode: int = 0) -> Row:
    """Open a path as descriptor ``fd``."""
    return row(step, "openat", AT_FDCWD, path, flags | os.O_CLOEXEC, mode, expect=fd)


def written(step: str, path: bytes, data: bytes, fd: int, flags: int = 0) -> list[Row]:
    """Write a file whole, through ``fd``."""
    return [
        opened(step, path, os.O_WRONLY | flags, fd, 0o644),
        row(step, "write", fd, data, len(data), expect=len(data)),
        row(step, "close", fd),
    ]


def copy(step: str, fd: int, to: int, flags: int = 0) -> Row:
    """Make ``to`` a copy of ``fd``."""
    return row(step, "dup3", fd, to, flags, expect=to)


def close_but(step: str, *keep: int) -> list[Row]:
    """Close every descriptor from 3 on, except ``keep``."""
    rows, first = [], 3
    for fd in sorted(keep):
        if fd > first:
            rows.append(row(step, "close_range", first, fd - 1, 0))
        first = max(first, fd + 1)
    return [*rows, row(step, "close_range", first, _LAST, 0)]


class Memory:
    """The memory of a worker that calls read and write by address, with the header of one message in place.

    ``address``: of that header, for recvmsg. ``inbox``: where a record of at most RECORD_BYTES arrives.
    """

    __slots__ = ("_held", "address", "inbox", "view")

    def __init__(self) -> None:
        """Reserve it. struct msghdr and struct iovec come first, then the descriptors' place, then the record's."""
        self._held = (ctypes.c_char * (_INBOX + RECORD_BYTES))()
        self.address = ctypes.addressof(self._held)
        self.inbox = self.address + _INBOX
        self.view = memoryview(self._held).cast("B")
        control_bytes = socket.CMSG_SPACE(4 * _MAX_FDS)
        vector, control = self.address + 64, self.address + _CONTROL
        struct.pack_into("QIxxxxQQQQixxxx", self.view, 0, 0, 0, vector, 1, control, control_bytes, 0)
        struct.pack_into("QQ", self.view, 64, self.inbox, RECORD_BYTES)
        # As after a message with one descriptor; the kernel writes over it.
        struct.pack_into("Qiii", self.view, _CONTROL, _HEAD_BYTES + 4, _SOL_SOCKET, _SCM_RIGHTS, 0)

    def message(self, size: int) -> tuple[memoryview, tuple[int, ...]]:
        """Return the record of ``size`` bytes that arrived, and the descriptors that came with it.

        Raises:
            StepError: the record or its descriptors did not fit.
        """
        view = self.view
        filled, flags = _received(view, 40)
        if flags & (_CTRUNC | _TRUNC):
            raise StepError("plan", 0, "the plan arrived cut short")
        if not filled:
            return view[_INBOX : _INBOX + size], ()
        length, level, kind = _head(view, _CONTROL)
        if level != _SOL_SOCKET or kind != _SCM_RIGHTS:
            raise StepError("plan", 0, "the plan came with something else than descriptors")
        fds = _numbers(f"{(length - _HEAD_BYTES) // 4}i", view, _CONTROL + _HEAD_BYTES)
        return view[_INBOX : _INBOX + size], fds

    def arrived(self, size: int) -> bytes:
        """Return a message of ``size`` bytes, its descriptors' numbers included, in the form of ``expected``."""
        return self._held[_CONTROL : _INBOX + size]  # type: ignore[return-value] # a slice of characters is bytes

    @staticmethod
    def expected(record: bytes, fds: Sequence[int]) -> bytes:
        """Return what ``arrived`` returns for a message with this record and descriptors of these numbers.

        One that the kernel cut short has other bytes.
        """
        head = struct.pack(f"Qii{len(fds)}i", _HEAD_BYTES + 4 * len(fds), _SOL_SOCKET, _SCM_RIGHTS, *fds)
        return head.ljust(_INBOX - _CONTROL, b"\0") + record

    def outgoing(self, record: bytes, fds: Sequence[int]) -> int:
        """Put a message in place, once, and return the address of its header, for sendmsg."""
        control = struct.pack(f"Qii{len(fds)}i", _HEAD_BYTES + 4 * len(fds), _SOL_SOCKET, _SCM_RIGHTS, *fds)
        control = control.ljust(socket.CMSG_SPACE(4 * len(fds)), b"\0")
        header = self.address + _OUTGOING
        vector, body, packed = header + 64, header + 128, header + 512
        struct.pack_into("QIxxxxQQQQixxxx", self.view, _OUTGOING, 0, 0, vector, 1, packed, len(control), 0)
        struct.pack_into("QQ", self.view, _OUTGOING + 64, body, len(record))
        self.view[_OUTGOING + 128 : _OUTGOING + 128 + len(record)] = record
        self.view[_OUTGOING + 512 : _OUTGOING + 512 + len(control)] = control
        return header

    def begin(self, size: int) -> bytes:
        """Return the first ``size`` bytes from ``address`` on."""
        return self._held[:size]  # type: ignore[return-value] # a slice of characters is bytes


def _failed(step: str, number: int, found: int) -> StepError:
    name = next((name for name, known in _NUMBERS.items() if known == number), str(number))
    if found < 0:
        errno = ctypes.get_errno()
        return StepError(step, errno, f"{name}: {os.strerror(errno)}")
    return StepError(step, 0, f"{name} returned {found}")
