"""A restricted worker's answer, as rows: READY, and the descriptors that its agent needs of it.

Called by outfit.py (made in the mould) and the worker (the rows that hold its own number). Must stay the last thing
before the payload is read, but for the limit of open files.
"""

from __future__ import annotations

import os

from node_agent.containment import disks
from node_agent.containment.script import FIRST_FD, Memory, Row, opened, row
from runner.wire import frames
from runner.wire.frames import FD_KERNEL, Op

__all__ = ["rows", "seated_rows"]


def rows(memory: Memory) -> tuple[Row, ...]:
    """Send READY, and with it one descriptor of each of the attempt's own file systems (disks.py)."""
    fds = range(FIRST_FD, FIRST_FD + disks.MOST)
    flags = os.O_PATH | os.O_DIRECTORY
    message = memory.outgoing(frames.pack(Op.READY), fds)
    return (
        *(opened("answer", os.fsencode(place), flags, fd) for place, fd in zip(disks.PLACES, fds, strict=True)),
        row("answer", "sendmsg", FD_KERNEL, message, 0, expect=1),
    )


def seated_rows(memory: Memory, level: str) -> list[Row]:
    """Return the answer of a worker with a channel to the broker: READY, and where it sits besides.

    Its pidfd, and at level B its pid namespace: what the kernel will say of every process of this job, and of no other.
    """
    fds = range(FIRST_FD, FIRST_FD + disks.MOST + (2 if level == "B" else 1))
    flags = os.O_PATH | os.O_DIRECTORY
    found = [opened("answer", os.fsencode(place), flags, fd) for place, fd in zip(disks.PLACES, fds, strict=False)]
    found.append(row("answer", "pidfd_open", os.getpid(), 0, expect=fds[disks.MOST]))
    if level == "B":
        found.append(opened("answer", b"/proc/self/ns/pid", os.O_RDONLY, fds[-1]))
    return [
        *found,
        row("answer", "sendmsg", FD_KERNEL, memory.outgoing(frames.pack(Op.READY), fds), 0, expect=1),
    ]
