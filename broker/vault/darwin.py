"""Who sent this message, on macOS: the same questions as peer.py answers on Linux. Not verified: it never ran there.

Called by nobody until backends.py lets it: the broker refuses to start on macOS. Must never name a sender whom the
kernel does not name the same before and after the message was read.

macOS names the process that used the other end last, with a version that tells a number's next owner apart. It has no
credentials per message, no bounds on a local stream and no pid namespaces: so messages carry their length, a sender
that changed in between is nobody, and so is whoever could be told apart by a namespace alone.

Source: <sys/un.h> (LOCAL_PEERTOKEN, LOCAL_PEERCRED), <bsm/audit.h> (audit_token_t), kqueue(2) (EVFILT_PROC, NOTE_EXIT).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from broker.vault.sender import MAX_MESSAGE_BYTES, Message, Sender

__all__ = ["Token", "alive", "arm", "peer_uid", "pid_namespace", "read_token", "receive"]

_SOL_LOCAL: Final = 0
_LOCAL_PEERCRED: Final = 0x001
_LOCAL_PEERTOKEN: Final = 0x006
#: auid, euid, egid, ruid, rgid, pid, asid, pidversion
_TOKEN: Final = struct.Struct("=8I")
#: cr_version, cr_uid, cr_ngroups; 16 groups follow
_XUCRED: Final = struct.Struct("=IIh2x16I")
_SIZE: Final = struct.Struct("!I")
_HIGHEST_PID: Final = 99_999
_MAX_FDS: Final = 8


@dataclass(frozen=True, slots=True)
class Token:
    """A process as the kernel names it; ``version`` changes with each start and each exec."""

    pid: int
    version: int
    euid: int


def read_token(raw: bytes) -> Token | None:
    """Return what an audit token says; None for one that names no process."""
    if len(raw) != _TOKEN.size:
        return None
    _, euid, _, _, _, pid, _, version = _TOKEN.unpack(raw)
    return Token(pid, version, euid) if 0 < pid <= _HIGHEST_PID else None


def arm(channel: socket.socket, *, rights: bool) -> bool:
    """Return whether the kernel names who is at the other end; nothing can keep descriptors out."""
    del rights
    return sys.platform == "darwin" and _token_of(channel) is not None


def receive(
    channel: socket.socket,
    *,
    want_fds: int = 0,
    token_of: Callable[[socket.socket], Token | None] | None = None,
    pin: Callable[[int], int | None] | None = None,
) -> Message | None:
    """Return the next whole message, or None at the end of the stream. More descriptors than wanted are closed.

    Raises:
        BlockingIOError: it has not come whole; the socket is readable again only when it has.
    """
    token_of, pin = token_of or _token_of, pin or _pin
    head = channel.recv(_SIZE.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    if not head:
        return None
    size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else 0
    if size > MAX_MESSAGE_BYTES:
        # Without its bound nothing behind it can be read either: the caller ends such a channel.
        return Message(b"", Sender(-1, -1, None), (), True)
    whole = _SIZE.size + size
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, whole)
    if len(channel.recv(whole, socket.MSG_PEEK | socket.MSG_DONTWAIT)) < whole or len(head) < _SIZE.size:
        raise BlockingIOError
    before = token_of(channel)
    data, fds, flags, _ = socket.recv_fds(channel, whole, _MAX_FDS, socket.MSG_DONTWAIT)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    pidfd = None if before is None else pin(before.pid)
    if pidfd is not None and token_of(channel) != before:
        os.close(pidfd)
        pidfd = None
    cut = len(data) < whole or len(fds) > want_fds or bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
    if len(fds) > want_fds:
        for fd in fds:
            os.close(fd)
        fds = []
    sender = Sender(-1, -1, None) if before is None else Sender(before.pid, before.euid, pidfd)
    return Message(data[_SIZE.size :], sender, tuple(fds), cut)


def alive(pidfd: int) -> bool:
    """Return whether the process behind a pin still runs: its end makes the queue readable, and it stays so."""
    try:
        return not select.select([pidfd], [], [], 0)[0]
    except (OSError, ValueError):
        return False


def pid_namespace(sender: Sender) -> tuple[int, int] | None:
    """Return None: there are none, so nobody is served who would have to be told apart by one."""
    del sender
    return None


def peer_uid(channel: socket.socket) -> int:
    """Return the uid of whoever made the connection. Raises OSError: the kernel's answer is not understood."""
    raw = channel.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    if len(raw) != _XUCRED.size or _XUCRED.unpack(raw)[0] != 0:
        raise OSError("LOCAL_PEERCRED: an unknown form of credentials")
    return int(_XUCRED.unpack(raw)[1])


def _token_of(channel: socket.socket) -> Token | None:
    with suppress(OSError):
        return read_token(channel.getsockopt(_SOL_LOCAL, _LOCAL_PEERTOKEN, _TOKEN.size))
    return None


def _pin(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if it has."""
    if sys.platform == "darwin":
        with suppress(OSError), contextlib.closing(select.kqueue()) as queue:
            queue.control([select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)], 0)
            return os.dup(queue.fileno())
    return None
