"""Job uids at level A: one uid per running attempt, on this host, whoever runs it.

Called by the supervisor before an attempt and after its proof and clean-up. Must never give root, a uid with an
account, or a uid that any other process of the host holds or has left processes under.

A uid is held by a lock on ``/run/ringfence/uids/UID`` and a mark in it. The kernel drops the lock when its holder dies,
which may be before the last process of the attempt has died; the mark stays, so the next taker looks for processes
first. A process keeps the locks of uids that it gave back, and takes those again first.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import heapq
import os
import pwd
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from node_agent.containment.errors import UidsUnavailable

__all__ = ["FIRST_UID", "JobUids", "Lease"]

FIRST_UID = 1_900_000_000
UID_COUNT = 1000
FOLDER = Path("/run/ringfence/uids")
#: The kernel's "nobody" for unmapped ids, and -1 in 16 bits: never ours.
RESERVED = frozenset({65_534, 65_535})


@dataclass(slots=True)
class Lease:
    """One uid (and the gid of the same number) held by this process until ``release``."""

    uid: int
    _fd: int = field(repr=False)
    _freed: Callable[[int, int], None] = field(repr=False)

    def release(self) -> None:
        """Give the uid back. Only after the proof that its processes are gone, and the clean-up. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._freed(self.uid, fd)


class JobUids:
    """The range of job uids of this host. ``folder``, ``proc`` and ``accounts`` have real defaults."""

    def __init__(
        self,
        range_start: int = FIRST_UID,
        count: int = UID_COUNT,
        *,
        folder: Path = FOLDER,
        proc: Path = Path("/proc"),
        accounts: Callable[[], Iterable[tuple[int, int]]] | None = None,
    ) -> None:
        """Choose the range and make the lock folder (0700, root's).

        Raises:
            UidsUnavailable: no mapped range is free of accounts, or the folder is not ours alone.
        """
        self._proc = proc
        taken = list((accounts or _accounts)())
        mapped = _intersect(_mapped(proc / "self/uid_map"), _mapped(proc / "self/gid_map"))
        self.start, self.count = _choose(range_start, count, mapped, taken)
        self._folder = _own_folder(folder)
        self._held: set[int] = set()
        #: Locks of uids that were given back, lowest uid first.
        self._kept: list[tuple[int, int]] = []
        self._asked: dict[int, bool] = {}

    def acquire(self) -> Lease:
        """Return a uid that nobody on this host holds: one that this process held before, else the lowest.

        So few uids are in use, and the id-mapping descriptors of idmap.py are used again.

        Raises:
            UidsUnavailable: every uid of the range is held.
        """
        if self._kept:
            uid, fd = heapq.heappop(self._kept)
            return Lease(uid, fd, self._free)
        for uid in range(self.start, self.start + self.count):
            if uid in self._held:
                continue
            found = self._lock(uid)
            if found is None:
                continue
            self._held.add(uid)
            return Lease(uid, found, self._free)
        raise UidsUnavailable(f"all {self.count} job uids from {self.start} on are held: run fewer slots on this host")

    def close(self) -> None:
        """Give up the locks that are kept, and the lock folder; leases stay valid. Idempotent."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
        while self._kept:
            self._free(*self._kept.pop())

    def _free(self, uid: int, fd: int) -> None:
        if self._folder >= 0:
            heapq.heappush(self._kept, (uid, fd))
            return
        os.ftruncate(fd, 0)
        os.close(fd)
        self._held.discard(uid)

    def _lock(self, uid: int) -> int | None:
        fd = os.open(str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        left_behind = os.fstat(fd).st_size > 0 and self._in_use(uid)
        if left_behind or self._has_account(uid):
            os.close(fd)
            return None
        os.pwrite(fd, b"held\n", 0)
        return fd

    def _has_account(self, uid: int) -> bool:
        """Ask once a uid: directories of accounts that can't be listed at the start still answer for a single one."""
        if uid not in self._asked:
            self._asked[uid] = _has_account(uid)
        return self._asked[uid]

    def _in_use(self, uid: int) -> bool:
        """Return whether any process of the host still runs under the uid (the last holder died with it running)."""
        for name in os.listdir(self._proc):
            if name.isdigit():
                with suppress(OSError):
                    if uid in _uids_of(self._proc / name / "status"):
                        return True
        return False


def _uids_of(status: Path) -> set[int]:
    for line in status.read_text().splitlines():
        if line.startswith("Uid:"):
            return {int(word) for word in line.split()[1:]}
    return set()


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _accounts() -> list[tuple[int, int]]:
    """(first, count) of every uid and gid with an account, and of every subordinate range given to one."""
    single = [(user.pw_uid, 1) for user in pwd.getpwall()] + [(group.gr_gid, 1) for group in grp.getgrall()]
    return single + _subordinate(Path("/etc/subuid")) + _subordinate(Path("/etc/subgid"))


def _subordinate(path: Path) -> list[tuple[int, int]]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(":") for line in lines]
    return [
        (int(each[1]), int(each[2])) for each in fields if len(each) == 3 and each[1].isdigit() and each[2].isdigit()
    ]


def _mapped(path: Path) -> list[tuple[int, int]]:
    """(first, count) of the ids that exist in this user namespace."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(fields[0]), int(fields[2])) for fields in lines]


def _intersect(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out = []
    for first, count in left:
        for other, length in right:
            start, end = max(first, other), min(first + count, other + length)
            if start < end:
                out.append((start, end - start))
    return out


def _choose(start: int, count: int, mapped: list[tuple[int, int]], taken: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the asked range if it is mapped and free, else the highest free range of ``count`` mapped ids."""
    if start <= 0 or count <= 0:
        raise UidsUnavailable("a range of job uids starts above 0 and is not empty")
    taken = taken + [(uid, 1) for uid in RESERVED]
    if any(first <= start and start + count <= first + length for first, length in mapped):
        clash = _clash(start, count, taken)
        if clash is not None:
            raise UidsUnavailable(
                f"id {clash} of the job uids {start}-{start + count - 1} has an account: set another range"
            )
        return start, count
    for first, length in sorted(mapped, reverse=True):
        candidate = first + length - count
        while candidate >= max(first, 1000):
            clash = _clash(candidate, count, taken)
            if clash is None:
                return candidate, count
            candidate = clash - count
    raise UidsUnavailable(f"this user namespace has no {count} ids without accounts: map more ids, or run at level B")


def _clash(start: int, count: int, taken: list[tuple[int, int]]) -> int | None:
    """The lowest taken id inside the range, or None."""
    inside = [max(first, start) for first, length in taken if first < start + count and start < first + length]
    return min(inside, default=None)


def _own_folder(folder: Path) -> int:
    try:
        for each in (folder.parent, folder):
            with suppress(FileExistsError):
                each.mkdir(mode=0o755 if each == folder.parent else 0o700)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UidsUnavailable(f"{folder} is no plain folder: remove it") from error
        raise UidsUnavailable(f"{folder} can't be opened: {error.strerror}") from error
    info, above = os.fstat(fd), os.stat("..", dir_fd=fd)
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        os.close(fd)
        raise UidsUnavailable(f"{folder} must be a folder of this user with mode 0700: remove it or correct it")
    if above.st_uid not in (0, os.geteuid()) or stat.S_IMODE(above.st_mode) & 0o022:
        os.close(fd)
        raise UidsUnavailable(f"{folder.parent} must belong to root and be writable by its owner alone")
    return fd
