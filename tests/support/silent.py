"""A file system that never answers, for tests as root: FUSE without a server behind it, or one that falls silent.

Must never leave a process that can't die: the connection is cut when the block ends, which fails every request.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from node_agent.containment import linux

__all__ = ["Silent", "needed", "silent"]

DEVICE = Path("/dev/fuse")
needed = pytest.mark.skipif(
    os.geteuid() != 0 or not DEVICE.exists(), reason="needs root and /dev/fuse to mount a silent file system"
)
_INIT, _GETATTR = 26, 3
_HEADER = struct.Struct("=IIQQIIIHH")
_UMOUNT_NOFOLLOW = 8


class Silent:
    """The server's end. ``asked``: operations received so far; ``answering``: how many more GETATTRs get an answer."""

    def __init__(self, fd: int, answering: int) -> None:
        self.asked: list[int] = []
        self.answering = answering
        self._fd = fd
        self._stop, self._stopped = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading and cut the connection: whoever waits for an answer gets ENOTCONN."""
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
        if operation == _INIT:
            # 7.31, write size 4096; everything else at its default.
            body = struct.pack("=IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, 4096, 1, 1, 0, 0)
        elif operation == _GETATTR and self.answering > 0:
            self.answering -= 1
            attributes = struct.pack("=QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
            body = struct.pack("=QII", 0, 0, 0) + attributes
        else:
            return
        os.write(self._fd, struct.pack("=IiQ", 16 + len(body), 0, unique) + body)


@contextmanager
def silent(point: Path, *, answering: int = 0) -> Iterator[Silent]:
    """Mount a file system on ``point`` whose server reads every request and answers none but the first.

    What waits there can't even be killed until the block ends. ``answering``: GETATTRs that are answered before that.
    """
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
        linux.umount(str(point), linux.DETACH | _UMOUNT_NOFOLLOW)
