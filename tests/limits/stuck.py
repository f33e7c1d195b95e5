"""A file system in which whoever looks for ``hang`` can't die: for tests as root, through FUSE's raw protocol.

It is an empty folder that answers everything else. A process whose request was read by the server and not answered
waits uninterruptibly, whatever signal it got. Must never leave such a process: the connection is cut when the block
ends, which fails every request. Source: include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from node_agent.containment import linux

__all__ = ["DEVICE", "Stuck", "stuck"]

DEVICE: Final = Path("/dev/fuse")
NAME: Final = b"hang\0"
_HEADER: Final = struct.Struct("=IIQQIIIHH")
_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 1, 2, 3, 17, 26, 27, 28, 29
_INTERRUPT, _FORGET_MANY, _READDIR_MORE = 36, 42, 44
_UNANSWERED: Final = {_FORGET, _INTERRUPT, _FORGET_MANY}
_FOLDER: Final = struct.pack("=QII", 0, 0, 0) + struct.pack(
    "=QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0
)
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


class Stuck:
    """The server's end. ``caught``: how many requests wait for ever."""

    def __init__(self, fd: int) -> None:
        self.caught = 0
        self._fd = fd
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and cut the connection: whoever waits gets ENOTCONN."""
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
        if operation in _UNANSWERED:
            return
        if operation == _LOOKUP and request[_HEADER.size :] == NAME:
            self.caught += 1
            return
        body = _ANSWERS.get(operation)
        error = 0 if body is not None else errno.ENOENT if operation == _LOOKUP else errno.ENOSYS
        body = body or b""
        os.write(self._fd, struct.pack("=IiQ", 16 + len(body), -error, unique) + body)


@contextmanager
def stuck(point: Path) -> Iterator[Stuck]:
    """Mount it on ``point`` while the block runs."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        linux.mount("stuck", str(point), "fuse.stuck", 0, f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other")
    except BaseException:
        os.close(fd)
        raise
    server = Stuck(fd)
    try:
        yield server
    finally:
        server.close()
        linux.umount(str(point), linux.DETACH)
