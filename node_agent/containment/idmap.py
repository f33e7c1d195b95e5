"""User namespaces that serve as id maps of mounts: the owner of a granted path ↔ the uid of a job (level A).

``make_userns`` is run by the zygote, which may fork; ``Idmaps`` is the agent's cache of the descriptors it got. Must
never map any id but one uid and one gid: everybody else's files appear as the overflow id.

A line of the map reads "id on disk, id seen through the mount, 1". Files that the job makes get the owner's id on disk.
Source: mount_setattr(2) "ID-mapped mounts", user_namespaces(7).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

from node_agent.containment import linux

__all__ = ["Idmaps", "Ids", "make_userns"]

#: (owner's uid, owner's gid, job's uid, job's gid)
Ids = tuple[int, int, int, int]
CACHED: Final = 256


def make_userns(fork: Callable[[], int], ids: Ids) -> int:
    """Return a descriptor of a user namespace with this map; the child that carried it is reaped.

    Call it in a process with one thread and with CAP_SETUID and CAP_SETGID over both ids. ``fork`` is os.fork or a
    wrapper of it. Raises OSError.
    """
    owner_uid, owner_gid, job_uid, job_gid = ids
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    done_read, done_write = os.pipe2(os.O_CLOEXEC)
    pid = fork()
    if pid == 0:
        _carry(ready_write, done_read, (ready_read, done_write))
    os.close(ready_write)
    os.close(done_read)
    try:
        failed = os.read(ready_read, 2)
        if failed != b"\0":
            code = failed[0] if failed else 0
            raise OSError(code, f"no user namespace: {os.strerror(code)}")
        _write(pid, "uid_map", f"{owner_uid} {job_uid} 1")
        _write(pid, "gid_map", f"{owner_gid} {job_gid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.close(done_write)
        os.waitpid(pid, 0)


def _carry(ready: int, done: int, others: tuple[int, int]) -> None:
    """The child: hold a new user namespace until the parent closes its end. Never returns."""
    code = 1
    try:
        for fd in others:
            os.close(fd)
        linux.unshare(linux.NEWUSER)
        os.write(ready, b"\0")
        os.read(done, 1)
        code = 0
    except OSError as error:
        os.write(ready, bytes((min(error.errno or 1, 255),)))
    finally:
        os._exit(code)


def _write(pid: int, name: str, line: str) -> None:
    fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


class Idmaps:
    """Descriptors by ids, the least recently used closed first. For one event loop."""

    def __init__(self, make: Callable[[Ids], Awaitable[int]], *, cached: int = CACHED) -> None:
        """``make`` asks the zygote for one namespace and returns its descriptor, which is ours from then on."""
        self._make = make
        self._cached = cached
        self._known: OrderedDict[Ids, int] = OrderedDict()

    async def get(self, ids: Ids) -> int:
        """Return the descriptor for ``ids``: use it before the next await, never close it. Raises what make does."""
        if ids not in self._known:
            fd = await self._make(ids)
            if ids in self._known:  # asked for twice at the same time
                os.close(fd)
            else:
                self._known[ids] = fd
        self._known.move_to_end(ids)
        while len(self._known) > self._cached:
            _, oldest = self._known.popitem(last=False)
            os.close(oldest)
        return self._known[ids]

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        while self._known:
            _, fd = self._known.popitem()
            os.close(fd)
