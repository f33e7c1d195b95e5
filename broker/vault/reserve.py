"""Disk space that is kept back for the record: a full disk must not end the record before somebody has read why.

Called by service.py (holds it) and the record (takes from it). Must never be counted on: without it, and once it is
used up, what can't be recorded is not released (attack 40).
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Final

from broker.vault.disk import FILE_MODE, Folder

__all__ = ["RESERVE_BYTES", "RESERVE_FILE", "SLICE_BYTES", "Reserve"]

log = logging.getLogger(__name__)

RESERVE_FILE: Final = "audit.reserve"
RESERVE_BYTES: Final = 64 << 20
#: What one full disk frees at a time: some ten thousand lines.
SLICE_BYTES: Final = 4 << 20
#: A reserve is only made or filled up where it leaves at least this share of the file system free.
_LEAST_FREE: Final = 0.1


class Reserve:
    """A file of blocks that nobody else can have. ``held`` says how many bytes of it are left."""

    def __init__(self, folder: Folder, size_bytes: int = RESERVE_BYTES) -> None:
        """Open or make the file, and fill it as far as the disk has room for it. Never raises for want of room."""
        self._size = size_bytes
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(RESERVE_FILE, flags, FILE_MODE, dir_fd=folder.fd)
        self.fill()

    @property
    def held(self) -> int:
        """Bytes that are kept back."""
        return os.fstat(self._fd).st_blocks * 512

    def fill(self) -> None:
        """Take blocks up to the full size, if the disk has room."""
        room = os.fstatvfs(self._fd)
        if room.f_bavail * room.f_frsize - self._size < _LEAST_FREE * room.f_blocks * room.f_frsize:
            return
        with suppress(OSError):
            os.posix_fallocate(self._fd, 0, self._size)

    def give(self) -> bool:
        """Free a slice for the record; False if there is none left."""
        size = min(os.fstat(self._fd).st_size, self.held)
        if size <= 0:
            return False
        os.ftruncate(self._fd, max(0, size - SLICE_BYTES))
        log.warning("the disk is full: the record lives on its reserve", extra={"left_bytes": self.held})
        return True

    def close(self) -> None:
        """Let go of the file; its blocks stay. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
