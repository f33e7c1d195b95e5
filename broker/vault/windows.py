"""Who sent this message, on Windows: the same questions as peer.py answers on Linux. Not verified: it never ran there.

Called by nobody until backends.py lets it: the broker refuses to start on Windows. Must never believe the number that a
named pipe gives for its client, which a client can choose.

A channel is two anonymous pipes: they have no name that others could open, so their far ends are with whom the agent
started with them. The agent hands over that process's handle, too, which keeps its number from being given away. A
message counts as that process's only while it lives and its token is an AppContainer's: others of its user could
take a handle out of it.

Source: CreatePipe, PeekNamedPipe, WaitForSingleObject, GetTokenInformation (TokenAppContainerSid). Off Windows only the
parts without calls of the system exist.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from dataclasses import dataclass
from typing import Final

from broker.vault.sender import MAX_MESSAGE_BYTES, Message, Sender

__all__ = ["Channel", "alive", "pid_namespace", "receive", "sandbox_of", "take"]

_SIZE: Final = struct.Struct("!I")
_SID_HEAD_BYTES: Final = 8
_MAX_SUBAUTHORITIES: Final = 15
#: S-1-15-2-…: an AppContainer's own
_APP_CONTAINER: Final = (15, 2)
_WAIT_TIMEOUT: Final = 0x102
_TOKEN_QUERY: Final = 0x0008
_TOKEN_APP_CONTAINER_SID: Final = 31


@dataclass(frozen=True, slots=True)
class Channel:
    """The near end: what the job writes into, and the handle of the process that was started with the far end."""

    read_fd: int
    process: int


class _Unpinned(Message):
    """The channel's handle pins the sender for as long as the channel lives: there is nothing to close."""

    def close(self) -> None:
        """Do nothing."""


def sandbox_of(sid: bytes) -> tuple[int, int] | None:
    """Return what tells an AppContainer from every other; None for anything that is no AppContainer's SID."""
    if len(sid) < _SID_HEAD_BYTES or sid[0] != 1 or not 2 <= sid[1] <= _MAX_SUBAUTHORITIES:
        return None
    if len(sid) != _SID_HEAD_BYTES + 4 * sid[1]:
        return None
    first = struct.unpack_from("<I", sid, _SID_HEAD_BYTES)[0]
    if (int.from_bytes(sid[2:8], "big"), first) != _APP_CONTAINER:
        return None
    low, high = struct.unpack("<QQ", hashlib.sha256(sid).digest()[:16])
    return low, high


def take(waiting: bytes) -> bytes | None:
    """Return the first message of what waits; None if it is not whole. Raises ValueError: longer than may be read."""
    if len(waiting) < _SIZE.size:
        return None
    (size,) = _SIZE.unpack_from(waiting)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError("too long")
    return waiting[_SIZE.size : _SIZE.size + size] if len(waiting) >= _SIZE.size + size else None


if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    _advapi = ctypes.WinDLL("advapi32", use_last_error=True)
    _kernel.WaitForSingleObject.argtypes = (wintypes.HANDLE, wintypes.DWORD)
    _kernel.GetProcessId.argtypes = _kernel.CloseHandle.argtypes = (wintypes.HANDLE,)
    _kernel.PeekNamedPipe.argtypes = (wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD, *(ctypes.c_void_p,) * 3)
    _advapi.OpenProcessToken.argtypes = (wintypes.HANDLE, wintypes.DWORD, ctypes.c_void_p)
    _advapi.GetTokenInformation.argtypes = (
        wintypes.HANDLE,
        ctypes.c_int,
        ctypes.c_void_p,
        wintypes.DWORD,
        ctypes.c_void_p,
    )
    _advapi.GetLengthSid.argtypes = (ctypes.c_void_p,)

    def alive(pidfd: int) -> bool:
        """Return whether the process behind a handle still runs."""
        return int(_kernel.WaitForSingleObject(pidfd, 0)) == _WAIT_TIMEOUT

    def pid_namespace(sender: Sender) -> tuple[int, int] | None:
        """Return what tells the sender's AppContainer from every other; None: it is in none, or may not be asked."""
        token = wintypes.HANDLE()
        if sender.pidfd is None or not _advapi.OpenProcessToken(sender.pidfd, _TOKEN_QUERY, ctypes.byref(token)):
            return None
        try:
            held, used = ctypes.create_string_buffer(256), wintypes.DWORD()
            asked = _TOKEN_APP_CONTAINER_SID
            if not _advapi.GetTokenInformation(token, asked, held, len(held), ctypes.byref(used)):
                return None
            at = ctypes.c_void_p.from_buffer(held).value
            return None if not at else sandbox_of(ctypes.string_at(at, _advapi.GetLengthSid(at)))
        finally:
            _kernel.CloseHandle(token)

    def receive(channel: Channel) -> Message | None:
        """Return the next whole message, or None at the end. Raises BlockingIOError: it has not come whole."""
        held, count = ctypes.create_string_buffer(_SIZE.size + MAX_MESSAGE_BYTES), wintypes.DWORD()
        pipe = msvcrt.get_osfhandle(channel.read_fd)
        if not _kernel.PeekNamedPipe(pipe, held, len(held), ctypes.byref(count), None, None):
            return None
        try:
            data = take(held.raw[: count.value])
        except ValueError:
            return _Unpinned(b"", Sender(-1, -1, None), (), True)
        if data is None:
            raise BlockingIOError
        os.read(channel.read_fd, _SIZE.size + len(data))
        sender = Sender(int(_kernel.GetProcessId(channel.process)), -1, channel.process)
        if not alive(channel.process) or pid_namespace(sender) is None:
            sender = Sender(-1, -1, None)
        return _Unpinned(data, sender, (), False)
