"""File systems that do not answer, for tests as root: FUSE with a server that falls silent, at once or at one name.

Whoever waits for such an answer can't die, whatever signal it gets. Must never leave such a process: the connection is
cut when the block ends, which fails every request. Source: include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from node_agent.containment import linux

__all__ = ["HANG", "Silent", "needed", "silent", "stuck"]

HANG: Final = "hang"
DEVICE: Final = Path("/dev/fuse")
needed = pytest.mark.skipif(
    os.geteuid() != 0 or not DEVICE.exists(), reason="needs root and /dev/fuse to mount a silent file system"
)
UMOUNT_NOFOLLOW: Final = 8
_HEADER: Final = struct.Struct("=IIQQIIIHH")
_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 1, 2, 3, 17, 26, 27, 28, 29
_INTERRUPT, _FORGET_MANY, _READDIR_MORE = 36, 42, 44
_UNANSWERED: Final = {_FORGET, _INTERRUPT, _FORGET_MANY}
_FOLDER: Final = struct.pack("=QII", 0, 0, 0) + struct.pack(
    "=QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0
)
#: What an empty folder answers.
_ANSWERS: Final = {
    _GETATTR: _FOLDER,
    _STATFS: bytes(80),
    # Version 7.31, writes of 4096 bytes, everything else at its default.
    _INIT: struct.pack("=IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, 4096, 1, 1, 0, 0),
    _OPENDIR: struct.pack("=QII", 1, 0, 0),
    _READDIR: b"",
    _READDIR_MORE: b"",
    _RELEASEDIR: b"",
}


class Silent:
    """The server's end. ``asked``: operations received so far; ``caught``: how many of them wait for ever.

    ``answering``: how many GETATTRs get an answer, as nothing else does; None: all but a look for HANG is answered.
    """

    def __init__(self, fd: int, answering: int | None) -> None:
        self.asked: list[int] = []
        self.caught = 0
        self.answering = answering
        self._fd = fd
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and cut the connection: whoever waits for an answer gets ENOTCONN."""
        os.write(self._stopped, b"x")
        self._thread.join()
        for fd in (self._fd, self._stop, self._stopped):
            os.close(fd)

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._fd, self._stop], [], [])
            if self._stop in ready:
                return
            with suppress(OSError):
                self._take(os.read(self._fd, 1 << 18))

    def _take(self, request: bytes) -> None:
        _, operation, unique, *_ = _HEADER.unpack_from(request)
        self.asked.append(operation)
        if operation in _UNANSWERED:
            return
        if self._holds_back(operation, request[_HEADER.size :]):
            self.caught += 1
            return
        body = _ANSWERS.get(operation)
        error = 0 if body is not None else errno.ENOENT if operation == _LOOKUP else errno.ENOSYS
        body = body or b""
        os.write(self._fd, struct.pack("=IiQ", 16 + len(body), -error, unique) + body)

    def _holds_back(self, operation: int, rest: bytes) -> bool:
        if self.answering is None:
            return operation == _LOOKUP and rest == HANG.encode() + b"\0"
        if operation == _GETATTR and self.answering > 0:
            self.answering -= 1
            return False
        return operation != _INIT


def silent(point: Path, *, answering: int = 0) -> AbstractContextManager[Silent]:
    """Mount a file system on ``point`` whose server reads every request and answers none but ``answering`` GETATTRs."""
    return _mounted(point, answering)


def stuck(point: Path) -> AbstractContextManager[Silent]:
    """Mount an empty folder on ``point`` in which everything is answered but a look for HANG."""
    return _mounted(point, None)


@contextmanager
def _mounted(point: Path, answering: int | None) -> Iterator[Silent]:
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        linux.mount("silent", str(point), "fuse.silent", 0, f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other")
    except BaseException:
        os.close(fd)
        raise
    server = Silent(fd, answering)
    try:
        yield server
    finally:
        server.close()
        linux.umount(str(point), linux.DETACH | UMOUNT_NOFOLLOW)
