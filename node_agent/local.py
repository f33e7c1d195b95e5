"""The node's own socket: kill and look on this host without the store (promise 6).

Called by the agent (serves) and `ringfence agent kill` (through ``ask``). One JSON line in, one JSON line out. Must
never answer a peer of another uid than its own or root, and never trust a server of another uid (attack 55).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from node_agent.cancelling import end_all
from node_agent.errors import SetupError
from runner.wire import codec
from runner.wire.errors import WireError

__all__ = ["LocalSocket", "ask"]

MAX_LINE_BYTES: Final = 64 * 1024
#: An agent's numbers take more room than what is asked of it.
MAX_ANSWER_BYTES: Final = 1024 * 1024
#: A socket path may have 108 bytes; the rest is left for temporary names.
MAX_PATH_BYTES: Final = 100
_IDLE_S: Final = 10.0

Handler = Callable[[dict[str, codec.Json]], Awaitable[dict[str, object]]]


class LocalSocket:
    """Serves one handler on a stream socket of mode 0600 in a directory of mode 0700."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises SetupError if the path is too long; an older socket of the same name is replaced."""
        check_path(self._path)
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        old = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(old)
        listener.listen(16)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def stop(self) -> None:
        """Stop listening, end what is being answered, remove the path; idempotent."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        await end_all(self._tasks)
        self._listener.close()
        self._listener = None
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            peer.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._talk(peer))
            self._tasks.add(task)
            # Not in the task itself: one that is cancelled before its first step never runs.
            task.add_done_callback(lambda _: peer.close())
            task.add_done_callback(self._tasks.discard)

    async def _talk(self, peer: socket.socket) -> None:
        if peer_uid(peer) not in (0, os.geteuid()):
            return
        with contextlib.suppress(WireError, OSError, TimeoutError):
            async with asyncio.timeout(_IDLE_S):
                line = await _line(peer)
            request = codec.load(line, limit_bytes=MAX_LINE_BYTES)
            if isinstance(request, dict):
                answer = codec.dump(await self._handler(request)) + b"\n"
                await asyncio.get_running_loop().sock_sendall(peer, answer)


async def _line(peer: socket.socket) -> bytes:
    """Read one line; over the limit the parser refuses what was read so far."""
    data = b""
    while not data.endswith(b"\n") and len(data) <= MAX_LINE_BYTES:
        part = await asyncio.get_running_loop().sock_recv(peer, MAX_LINE_BYTES)
        if not part:
            break
        data += part
    return data


def ask(path: Path, request: dict[str, object], timeout_s: float) -> dict[str, codec.Json]:
    """Return the agent's answer to one request, blocking.

    Raises:
        ConnectionError: no agent answers there, or the socket is served by another user.
        TimeoutError: no answer in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
        except OSError as error:
            raise ConnectionError(f"no agent answers at {path} ({error.strerror})") from None
        if peer_uid(sock) not in (0, os.geteuid()):
            raise ConnectionError(f"{path} is served by another user; not trusted")
        sock.sendall(codec.dump(request) + b"\n")
        data = b""
        while not data.endswith(b"\n") and len(data) <= MAX_ANSWER_BYTES:
            part = sock.recv(65536)
            if not part:
                break
            data += part
    answer = codec.load(data, limit_bytes=MAX_ANSWER_BYTES + 1) if data else {}
    return answer if isinstance(answer, dict) else {}


def check_path(path: Path) -> None:
    """Raise SetupError if a socket at ``path`` would exceed what every system accepts."""
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise SetupError(f"{path} has {size} bytes, a socket path may have {MAX_PATH_BYTES}; choose a shorter --home")


def peer_uid(sock: socket.socket) -> int:
    """Return the uid of the process at the other end. Source: SO_PEERCRED in unix(7)."""
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
