"""The task worker that runs one attempt after the other, as its jobs asked for (``reuse=N``).

Called by the worker instead of bootstrap.main. Must never be trusted by the node, which believes its word of an end
only for the turn it was told of, and only if the kernel counts nothing in its file systems (node_agent/containment/
reused.py): what is put in order here is a service to honest tasks. Memory, modules and descriptors stay.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from runner.guest import bootstrap
from runner.wire import frames
from runner.wire.frames import FD_KERNEL, FD_RESULT, MAX_RECORD_BYTES, TURN_BYTES, Op

__all__ = ["main"]

_PLACES: Final = ("/work", "/tmp", "/dev/shm")  # noqa: S108 - the worker's own tmpfs
#: Loaded by tasks that make calls.
_CALLS: Final = "runner.guest.calls"
#: Where the descriptors of an attempt belong, in the order in which they come.
_FIXED: Final = (1, 2, FD_RESULT)
_FD_SPACE: Final = socket.CMSG_SPACE(4 * len(_FIXED))


def main(task_paths: Sequence[str], result_bytes: int) -> int:
    """Run attempts until the channel ends; return the exit code of the last one."""
    turn, payload = b"", None
    search, folder = [*sys.path, *task_paths], os.getcwd()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, FD_KERNEL)
    while True:
        code = bootstrap.main("task", task_paths, result_bytes, payload)
        if not _tidy(folder):
            return code
        os.write(FD_KERNEL, frames.pack(Op.DONE, bytes((code,)) + turn))
        found = _next(channel)
        if found is None:
            return code
        turn, payload = found
        # The last attempt's module must not decide where this one's are found, nor its variables what it reads.
        sys.path[:] = search
        bootstrap.reset()
        if (calls := sys.modules.get(_CALLS)) is not None:
            # The last attempt's session has ended with it.
            calls.forget()


def _next(channel: socket.socket) -> tuple[bytes, bytes] | None:
    """Wait for the next attempt, put its descriptors in their places, return turn and payload. None: there is none."""
    data, ancillary, _, _ = channel.recvmsg(MAX_RECORD_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
    fds = [fd for _, _, packed in ancillary for fd in struct.unpack(f"{len(packed) // 4}i", packed)]
    if data[:1] != bytes((Op.NEXT,)) or len(fds) != len(_FIXED):
        return None
    for fd, place in zip(fds, _FIXED, strict=True):
        os.dup2(fd, place, inheritable=place < FD_KERNEL)
        os.close(fd)
    return data[1 : 1 + TURN_BYTES], data[1 + TURN_BYTES :]


def _tidy(folder: str) -> bool:
    """Put in order what tasks leave in passing; return whether another one can follow. Nothing here is believed."""
    out, err = sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.umask(0o022)
        for place in _PLACES:
            _empty(place)
        os.chdir(folder)
    except OSError:
        return False
    return out is not None and err is not None and not out.closed and not err.closed


def _empty(place: str, device: int = 0) -> None:
    """Remove what lies in ``place``, but for what is mounted there."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            device = device or os.stat(place).st_dev
            with suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif entry.stat(follow_symlinks=False).st_dev == device:
                    if not os.access(entry.path, os.R_OK | os.W_OK | os.X_OK):
                        os.chmod(entry.path, 0o700)
                    _empty(entry.path, device)
                    os.rmdir(entry.path)
