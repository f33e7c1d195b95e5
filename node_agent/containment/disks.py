"""Whether an attempt's own file systems were full when it ended.

Called by the worker (outfit.py), which hands out one descriptor of each with its READY, and by the agent, which asks
them after a bad end: the mount namespace is gone by then. Must never open a path for the agent: a descriptor can't be
redirected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

__all__ = ["MOST", "PLACES", "full"]

#: The attempt's own tmpfs mounts (view.py): workspace, temporary files, shared memory.
PLACES: Final = ("/work", "/tmp", "/dev/shm")  # noqa: S108 - the job's own tmpfs
#: Most descriptors that come with a READY.
MOST: Final = len(PLACES)
#: So little room counts as none: programs write in blocks, and one that fails gives back its last part.
_ROOM_BYTES: Final = 64 * 1024
_ROOM_SHARE: Final = 16


def full(fds: Iterable[int]) -> bool:
    """Return whether one of the file systems has no room or no inode left."""
    for fd in fds:
        with suppress(OSError):
            found = os.fstatvfs(fd)
            least = min(_ROOM_BYTES, found.f_blocks * found.f_frsize // _ROOM_SHARE)
            if found.f_bavail * found.f_frsize < least or (found.f_files and not found.f_favail):
                return True
    return False
