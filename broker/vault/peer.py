"""Who sent this message: facts that the kernel attaches to each one, and nothing that a sender says.

Called by the broker for every message. Must never compare process numbers across time, trust the peer that a socket
had when it was connected, or keep a descriptor that came uninvited.

Source: unix(7) (SO_PASSCRED), the kernel's SO_PASSPIDFD (6.5), SO_PASSRIGHTS (6.16) and pidfs ioctls (6.11).
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from broker.vault.sender import MAX_MESSAGE_BYTES, Message, Sender

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Message",
    "Sender",
    "alive",
    "arm",
    "arm_uid",
    "namespace_of",
    "peer_uid",
    "pid_namespace",
    "receive",
    "receive_uid",
]

_SO_PASSPIDFD: Final = 76
_SO_PASSRIGHTS: Final = 83
_SCM_CREDENTIALS: Final = 2
_SCM_PIDFD: Final = 4
_UCRED: Final = struct.Struct("iII")
#: _IO(0xFF, 5)
_PIDFD_GET_PID_NAMESPACE: Final = 0xFF05
_MAX_FDS: Final = 8
_UCRED_SPACE: Final = socket.CMSG_SPACE(_UCRED.size)
_SPACE: Final = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(4) + socket.CMSG_SPACE(4 * _MAX_FDS)


def arm(channel: socket.socket, *, rights: bool) -> bool:
    """Have the kernel name the sender of each message; returns whether it pins it too.

    Without ``rights`` nobody can put descriptors into us, where the kernel has that switch.
    """
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    if not rights:
        with suppress(OSError):
            channel.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    try:
        channel.setsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD, 1)
    except OSError:
        return False
    return True


def receive(channel: socket.socket, *, want_fds: int = 0) -> Message | None:
    """Return the next message, or None at the end of the stream. More descriptors than wanted are closed, all of them.

    Raises:
        BlockingIOError: there is none. Whether the socket blocks is its other holders' choice too, so it is not asked.
    """
    data, ancillary, flags, _ = channel.recvmsg(
        MAX_MESSAGE_BYTES + 1, _SPACE, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    pid, uid, pidfd = -1, -1, None
    fds: list[int] = []
    for level, kind, packed in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == _SCM_CREDENTIALS:
            pid, uid, _gid = _UCRED.unpack(packed)
        elif kind == _SCM_PIDFD:
            (found,) = struct.unpack("i", packed)
            pidfd = found if found >= 0 else None
        elif kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(packed[: len(packed) // 4 * 4])
            fds += numbers
    if pidfd is None and pid > 0:
        # An older kernel does not pin: done here, and `alive` is asked again before the answer.
        with suppress(OSError):
            pidfd = os.pidfd_open(pid)
    cut = len(data) > MAX_MESSAGE_BYTES or bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
    message = Message(data, Sender(pid, uid, pidfd), tuple(fds), cut)
    if not data and pid <= 0:
        message.close()
        return None
    if len(fds) > want_fds:
        _close(fds)
        return Message(data, message.sender, (), True)
    return message


def arm_uid(channel: socket.socket) -> None:
    """Have the kernel name the sender of each message, for `receive_uid`, and give us no descriptors."""
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    for switch in (_SO_PASSRIGHTS, _SO_PASSPIDFD):
        with suppress(OSError):
            channel.setsockopt(socket.SOL_SOCKET, switch, 0)


def receive_uid(channel: socket.socket) -> tuple[bytes, int, bool] | None:
    """Return the next message, its sender's uid and whether it was cut, or None at the end of the stream.

    For whoever is served by uid alone: a pin is made and closed by the kernel for each message, which takes longer
    than the rest of it. There is room for no descriptor, so that none is made here.

    Raises:
        BlockingIOError: there is none.
    """
    data, ancillary, flags, _ = channel.recvmsg(
        MAX_MESSAGE_BYTES + 1, _UCRED_SPACE, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    pid, uid = -1, -1
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS:
            pid, uid, _gid = _UCRED.unpack(packed)
    if not data and pid <= 0:
        return None
    return data, uid, len(data) > MAX_MESSAGE_BYTES or bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def alive(pidfd: int) -> bool:
    """Return whether the process behind ``pidfd`` still runs: its end makes the descriptor readable."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def pid_namespace(sender: Sender) -> tuple[int, int] | None:
    """Return device and inode of the sender's pid namespace, or None: it is gone, or may not be asked."""
    if sender.pidfd is None:
        return None
    try:
        fd = fcntl.ioctl(sender.pidfd, _PIDFD_GET_PID_NAMESPACE, 0)
    except OSError:
        return _namespace_by_number(sender)
    try:
        return namespace_of(fd)
    finally:
        os.close(fd)


def namespace_of(fd: int) -> tuple[int, int]:
    """Return what tells the namespace behind a descriptor from every other."""
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def peer_uid(channel: socket.socket) -> int:
    """Return the uid of whoever made the connection: for sockets that have a path."""
    _, uid, _ = _UCRED.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def _namespace_by_number(sender: Sender) -> tuple[int, int] | None:
    """Older kernels: look by number, and only believe it if the pinned process was alive all the while."""
    if sender.pidfd is None or sender.pid <= 0:
        return None
    try:
        info = os.stat(f"/proc/{sender.pid}/ns/pid")
    except OSError:
        return None
    return (info.st_dev, info.st_ino) if alive(sender.pidfd) else None


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
