"""Where this host's cgroup hierarchies are mounted, and the few calls on their files.

Called by cgroup.py and slotgroup.py. Must never follow a link or touch a group whose name it was not given.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node_agent.containment.mounts import plain

__all__ = [
    "Hierarchies",
    "flat",
    "members",
    "put",
    "read",
    "remove_group",
    "sweep_members",
]

#: The v1 controllers that a slot has a leaf in.
V1_CONTROLLERS = ("pids", "memory", "cpu", "cpuacct")
REMOVE_TIMEOUT_S = 2.0
FIRST_PAUSE_S = 0.0005


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Mount points of the cgroup file systems. ``own``: the caller's group in the v2 hierarchy, as a path below it."""

    unified: Path | None
    v1: dict[str, Path]
    own: Path | None

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Hierarchies:
        """Read the mounts that this process sees. A mount of a sub-tree is taken from its root on."""
        unified: Path | None = None
        root = "/"
        v1: dict[str, Path] = {}
        for line in (proc / "mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            fields, kind = left.split(), right.split()
            if kind[0] == "cgroup2" and unified is None:
                unified, root = Path(plain(fields[4])), plain(fields[3])
            elif kind[0] == "cgroup":
                for name in set(kind[2].split(",")) & set(V1_CONTROLLERS):
                    v1.setdefault(name, Path(plain(fields[4])))
        return cls(unified, v1, _own(proc, unified, root))


def _own(proc: Path, unified: Path | None, root: str) -> Path | None:
    if unified is None:
        return None
    for line in (proc / "cgroup").read_text().splitlines():
        if line.startswith("0::"):
            relative = os.path.relpath(line[3:], root)
            return None if relative.startswith("..") else unified / relative
    return None


def read(fd: int) -> str:
    """Return the current content of an open cgroup file (it is made anew for each read from offset 0)."""
    parts = []
    offset = 0
    while chunk := os.pread(fd, 65_536, offset):
        parts.append(chunk)
        offset += len(chunk)
    return b"".join(parts).decode()


def put(path: Path, value: str) -> None:
    """Write one value into a file that exists already; raises OSError as the kernel answers."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def flat(text: str) -> dict[str, int]:
    """Parse a flat keyed file (``oom_kill 3``) into its numbers."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def members(group: Path) -> list[int]:
    """Return the pids of a group itself, empty if it is gone. Threads are not listed, foreign pid namespaces are 0."""
    try:
        text = (group / "cgroup.procs").read_text()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP):
            return []
        raise
    return [int(word) for word in text.split() if word != "0"]


def sweep_members(group: Path, rounds: int = 200) -> bool:
    """SIGKILL every process of a group without ``cgroup.kill`` until none is left; False if some stay."""
    for _ in range(rounds):
        if sum(_kill_members(each) for each in [group, *_below(group)]) == 0:
            return True
        time.sleep(FIRST_PAUSE_S)
    return False


def _kill_members(group: Path) -> int:
    """Signal all members once. Each is pinned by a pidfd first and must then still be listed: a reused pid is safe."""
    pinned: dict[int, int] = {}
    try:
        for pid in members(group):
            with suppress(ProcessLookupError):
                pinned[pid] = os.pidfd_open(pid)
        for pid in set(members(group)) & pinned.keys():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pinned[pid], signal.SIGKILL)
    finally:
        for fd in pinned.values():
            os.close(fd)
    return len(pinned)


def _below(group: Path) -> Iterator[Path]:
    try:
        entries = [Path(entry.path) for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for entry in entries:
        yield entry
        yield from _below(entry)


def remove_group(group: Path, timeout_s: float = REMOVE_TIMEOUT_S) -> bool:
    """Remove a group and every group below it, deepest first; False if the kernel keeps answering EBUSY.

    Dead tasks may hold a group for a moment after ``populated 0``, so EBUSY is retried.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        left = [each for each in [*reversed(list(_below(group))), group] if not _rmdir(each)]
        if not left:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def _rmdir(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.ENOTEMPTY):
            return False
        raise
    return True
