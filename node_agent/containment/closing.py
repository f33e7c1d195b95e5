"""Closes what a job has left, away from the agent's loop where that takes long.

Called by attempts and reused workers at their end. The last one who closes a file in memory, or a file system in
memory, frees its pages: a quarter of a millisecond for each MiB, for which all kills of the node would wait (attack
41).
Must never take a descriptor of a job for one that is closed at once: what is not known to be small goes to a thread.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

__all__ = ["away", "left_in"]

#: Closed at once: freeing so much takes a moment.
_SMALL_BYTES: Final = 4 << 20
#: Most records that are looked at, and most descriptors of one record (SCM_MAX_FD).
_MOST_RECORDS: Final = 8
_MOST_FDS: Final = 253
_SPACE: Final = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * _MOST_FDS)
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


def away(
    small: Sequence[int], filled: Sequence[int], channel: socket.socket, *, heard: bool = True
) -> asyncio.Future[None] | None:
    """Close everything; return what is done once the rest is closed, None if nothing took long.

    ``small``: descriptors of ours. ``filled``: files and file systems in memory that a job may have filled.
    ``channel``: with what lies in it unread, first the worker's READY unless that was ``heard``.
    """
    for fd in small:
        os.close(fd)
    left, unread = left_in(channel)
    ready = [] if heard else left[:1]
    known = [*filled, *(fd for record in ready for fd in record)]
    # Of what the job itself has sent even a question may take long: it can be of a file system that hangs.
    strange = [fd for record in left[len(ready) :] for fd in record]
    rest = [*known, *strange]
    if not unread and not strange and sum(map(_weight, known)) <= _SMALL_BYTES:
        for fd in rest:
            os.close(fd)
        channel.close()
        return None
    if channel.fileno() >= 0:
        rest.append(channel.detach())
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def told() -> None:
        if not done.done():
            done.set_result(None)

    def work() -> None:
        for fd in rest:
            os.close(fd)
        with suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(told)

    threading.Thread(target=work, name="closing", daemon=True).start()
    return done


def left_in(channel: socket.socket) -> tuple[list[list[int]], bool]:
    """Take the descriptors out of what lies unread in a channel.

    Return them for each record, and whether there may be more.
    """
    found: list[list[int]] = []
    if channel.fileno() < 0:
        return found, False
    # With it each record brings its sender along, so that an empty one is no end.
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    for _ in range(_MOST_RECORDS):
        try:
            _, ancillary, _, _ = channel.recvmsg(1, _SPACE, _FLAGS)
        except OSError:
            return found, False
        if not ancillary:
            return found, False
        found.append([])
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = memoryview(data)[: len(data) - len(data) % 4]
                found[-1].extend(whole.cast("i"))
    return found, True


def _weight(fd: int) -> int:
    """Return how many bytes may go with a descriptor; more than any bound where that is not known."""
    try:
        seen = os.fstat(fd)
        if stat.S_ISDIR(seen.st_mode):
            system = os.fstatvfs(fd)
            return (system.f_blocks - system.f_bfree) * system.f_frsize
    except OSError:
        return _SMALL_BYTES + 1
    return seen.st_blocks * 512 if stat.S_ISREG(seen.st_mode) else _SMALL_BYTES + 1
