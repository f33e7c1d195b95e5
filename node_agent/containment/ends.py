"""What one attempt talks through, both ends of it; and the worker that was forked ahead and holds its channel.

Called by the slot. Must never use anything of an attempt again, nor let a worker inherit an end of ours.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from node_agent.containment import disks
from node_agent.containment.errors import SetupError, SpawnError
from node_agent.containment.moulds import Mould, pair
from node_agent.containment.plan import Plan
from runner.wire import codec, frames
from runner.wire.errors import CodecError

__all__ = ["SEAT", "Ends", "Waiting", "deaf_to_rights", "first_record", "noexec_memory", "setup_error"]

#: Most descriptors that tell where a worker sits: its pidfd, and at level B its pid namespace.
SEAT: Final = 2
#: A file in memory that can't be executed and can't be made so (memfd_create(2)).
_MFD_NOEXEC_SEAL: Final = 8
_SO_PASSRIGHTS: Final = 83


@dataclass(frozen=True, slots=True)
class Ends:
    """Both ends of everything that an attempt talks through; ours first."""

    out: tuple[int, int]
    err: tuple[int, int]
    channel: tuple[socket.socket, socket.socket]
    result: int | None

    @classmethod
    def make(cls, plan: Plan, channel: tuple[socket.socket, socket.socket]) -> Ends:
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        seals = os.MFD_ALLOW_SEALING if plan.allow_exec else _MFD_NOEXEC_SEAL
        result = os.memfd_create("result", os.MFD_CLOEXEC | seals) if plan.kind == "task" else None
        for fd in (out[0], err[0]):
            os.set_blocking(fd, False)
        return cls(out, err, channel, result)

    def close(self) -> None:
        """Close both ends of all: there is no attempt."""
        self.close_theirs()
        os.close(self.out[0])
        os.close(self.err[0])
        self.channel[0].close()
        if self.result is not None:
            os.close(self.result)

    def close_theirs(self) -> None:
        """Close the worker's ends, so that its end is seen as end of file here."""
        os.close(self.out[1])
        os.close(self.err[1])
        self.channel[1].close()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A worker that was forked ahead: it holds its channel, and waits on it for a plan."""

    name: str
    mould: Mould
    channel: tuple[socket.socket, socket.socket]

    @classmethod
    def make(cls, name: str, mould: Mould) -> Waiting:
        """Have ``mould`` fork one. Raises SpawnError."""
        near, far = pair()
        near.setblocking(False)
        try:
            mould.begin(name, far.fileno())
        except SpawnError:
            near.close()
            raise
        finally:
            far.close()
        return cls(name, mould, (near, far))


def deaf_to_rights(channel: socket.socket) -> None:
    """Take no descriptors from now on: a job could hand over what takes the agent's loop long to close (attack 51).

    A READY brings some, so this follows it.
    """
    # Before Linux 6.16 the kernel drops what nobody asks for; no socket of a filtered job lingers (seccomp.py).
    with suppress(OSError):
        channel.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


async def first_record(channel: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """Return the worker's answer and the descriptors that come with it (see outfit.py)."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(channel)
    data, fds, _, _ = socket.recv_fds(channel, frames.MAX_RECORD_BYTES, disks.MOST + SEAT, socket.MSG_CMSG_CLOEXEC)
    deaf_to_rights(channel)
    return data, tuple(fds)


def setup_error(body: bytes) -> SetupError:
    """Return what a worker told of its failure."""
    try:
        told = codec.load(body)
    except CodecError:
        told = None
    if not isinstance(told, dict):
        return SetupError("start", 0, "an unreadable report")
    errno = told.get("errno")
    return SetupError(str(told.get("step")), errno if isinstance(errno, int) else 0, str(told.get("detail")))


@functools.cache
def noexec_memory() -> bool:
    """Return whether this kernel makes files in memory that can't be executed."""
    try:
        os.close(os.memfd_create("try", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL))
    except OSError:
        return False
    return True
