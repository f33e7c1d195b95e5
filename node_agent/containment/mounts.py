"""Attributes of detached mounts, and the table of mounts that this process sees.

Called by fence.py, paths.py and sweep.py. Must never change a mount that is attached where the host can see it.
Source: mount_setattr(2), proc_pid_mountinfo(5).
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node_agent.containment import linux

__all__ = ["MountEntry", "entry_of", "plain", "set_attributes", "set_idmap", "table"]

SYS_MOUNT_SETATTR: Final = 442
AT_EMPTY_PATH: Final = 0x1000
MS_PRIVATE: Final = 1 << 18
ATTR_IDMAP: Final = 0x100000


def set_attributes(fd: int, attributes: int, *, idmap_fd: int | None = None) -> None:
    """Add MOUNT_ATTR_* (and an id map) to a detached mount and cut it off from mount propagation. Raises OSError."""
    if idmap_fd is not None:
        attributes |= ATTR_IDMAP
    change = struct.pack("QQQQ", attributes, 0, MS_PRIVATE, 0 if idmap_fd is None else idmap_fd)
    linux.syscall("mount_setattr", SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH, change, len(change))


def set_idmap(fd: int, attributes: int, idmap_fd: int) -> bool:
    """Like ``set_attributes`` with an id map; False if this file system or mount takes none, and nothing is set then.

    Raises:
        OSError: anything else.
    """
    try:
        set_attributes(fd, attributes, idmap_fd=idmap_fd)
    except OSError as error:
        # EINVAL: the file system has no support; EPERM: the mount is id-mapped already.
        if error.errno in (errno.EINVAL, errno.EPERM):
            return False
        raise
    return True


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of mountinfo. ``root`` is the path inside the file system that appears at ``point``."""

    id: int
    device: str
    root: str
    point: str
    kind: str


def table(proc: Path = Path("/proc/self")) -> dict[int, MountEntry]:
    """Return every mount of this process's mount namespace by its id."""
    out = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        entry = MountEntry(int(fields[0]), fields[2], plain(fields[3]), plain(fields[4]), right.split()[0])
        out[entry.id] = entry
    return out


def entry_of(fd: int, mounts: dict[int, MountEntry]) -> MountEntry | None:
    """Return the mount that an open descriptor lies on; None if it is not in the table."""
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("mnt_id:"):
            return mounts.get(int(line.split()[1]))
    return None


def plain(text: str) -> str:
    """Return a path of mountinfo without its octal escapes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
