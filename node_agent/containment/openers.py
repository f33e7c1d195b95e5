"""The agent's side of the openers: opens a granted path in another process, with a deadline.

Called by the stage. Must never let a file system that does not answer (FUSE, NFS) hold up the agent's loop, and never
trust a grant that was not answered in time: it is refused.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, cast

from node_agent.containment.errors import GrantRefused
from node_agent.containment.moulds import pair
from node_agent.containment.opener import MAX_BYTES
from node_agent.containment.paths import Mode, Opened, Protected
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import CodecError

__all__ = ["Looked", "Openers"]

MODULE: Final = "node_agent.containment.opener"
START_TIMEOUT_S: Final = 20.0
#: How long a path may take to open, check and look through.
DEADLINE_S: Final = 5.0
STOP_TIMEOUT_S: Final = 2.0
STUCK_TIMEOUT_S: Final = 0.1
#: Openers at work at a time, and those that wait in the kernel for a file system that does not answer.
MOST_BUSY: Final = 4
MOST_STUCK: Final = 8


@dataclass(slots=True)
class Looked:
    """A grant that was opened, checked and looked through; close ``opened`` after its attempt.

    ``kept``: what stays read-only below it, with (device, inode). ``marks``: what stood where code could be planted.
    """

    opened: Opened
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass(slots=True, eq=False)
class _Opener:
    process: subprocess.Popen[bytes]
    end: socket.socket


class Openers:
    """Processes that open paths; started when first needed. ``close`` is idempotent."""

    def __init__(
        self, protected: Protected, *, deadline_s: float = DEADLINE_S, words: Sequence[str] = ("-m", MODULE)
    ) -> None:
        """``words``: what the interpreter is started with, after its own options."""
        self._fences = codec.dump(protected.dump())
        self._deadline_s = deadline_s
        self._words = tuple(words)
        self._idle: list[_Opener] = []
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._turn = asyncio.Semaphore(MOST_BUSY)

    async def open(self, path: str, mode: Mode, *, code: bool = False, quiet: bool = False) -> Looked:
        """Open and check a granted path. ``code``: look for plants; ``quiet``: refuse a FIFO in it.

        Raises:
            GrantRefused: what open_grant raises, or ``unenforceable`` if there was no answer in time.
        """
        request: dict[str, Json] = {"op": "open", "path": path, "mode": mode, "code": code, "quiet": quiet}
        reply, fd = await self._ask(path, request, [])
        if fd is None:
            raise GrantRefused("policy" if reply["refused"] == "policy" else "unenforceable", str(reply["why"]))
        facts = cast("dict[str, object]", reply["facts"])
        kept = cast("list[tuple[str, int, int]]", reply["kept"])
        return Looked(
            Opened(fd=fd, **facts),  # type: ignore[arg-type] # the fields as Opened.facts wrote them
            {name: (device, inode) for name, device, inode in kept},
            cast("dict[str, str]", reply["marks"]),
            bool(reply["cut"]),
        )

    async def changed(self, looked: Looked) -> list[str]:
        """Return the paths below a grant where code was planted, changed or removed since it was opened."""
        if looked.opened.kind != "dir":
            return []
        marks = cast("Json", looked.marks)
        request: dict[str, Json] = {"op": "changed", "marks": marks, "cut": looked.cut}
        try:
            reply, _ = await self._ask(looked.opened.path, request, [looked.opened.fd])
        except GrantRefused:
            return ["(not compared: no answer in time)"]
        paths = [str(path) for path in cast("list[Json]", reply["changed"])]
        more = cast("int", reply["count"]) - len(paths)
        return [*paths, f"({more} more)"] if more else paths

    async def close(self) -> None:
        """End every opener. One that waits in the kernel has its SIGKILL pending, and nothing of the agent's."""
        ending, self._idle = self._idle, []
        for opener in ending:
            opener.end.close()
            opener.process.terminate()
        for opener in ending:
            await _ended(opener.process, STOP_TIMEOUT_S)
        for process in self._stuck:
            await _ended(process, STUCK_TIMEOUT_S)

    async def _ask(self, path: str, request: dict[str, Json], fds: list[int]) -> tuple[dict[str, Json], int | None]:
        async with self._turn:
            self._stuck = [process for process in self._stuck if process.poll() is None]
            if len(self._stuck) >= MOST_STUCK:
                raise GrantRefused("unenforceable", f"{path}: {MOST_STUCK} other paths of this node do not answer yet")
            opener = self._awake() or await self._start()
            try:
                socket.send_fds(opener.end, [codec.dump(request)], fds)
                answer = await asyncio.wait_for(self._answer(opener), self._deadline_s)
            except TimeoutError:
                self._give_up(opener)
                message = f"its file system did not answer within {self._deadline_s:g} s"
                raise GrantRefused("unenforceable", f"{path}: {message}; look at its mount on the node") from None
            except BaseException as error:
                self._give_up(opener)
                if isinstance(error, OSError | CodecError):
                    raise GrantRefused("unenforceable", f"{path}: the opener failed: {error}") from error
                raise
            self._idle.append(opener)
            return answer

    def _awake(self) -> _Opener | None:
        """Return an idle opener that still lives."""
        while self._idle:
            opener = self._idle.pop()
            if opener.process.poll() is None:
                return opener
            opener.end.close()
        return None

    async def _start(self) -> _Opener:
        near, far = pair()
        near.setblocking(False)
        words = [sys.executable, "-I", "-B", *self._words, str(far.fileno())]
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            words, env={}, cwd="/", stdin=null, stdout=null, stderr=null, pass_fds=[far.fileno()]
        )
        far.close()
        opener = _Opener(process, near)
        try:
            near.send(self._fences)
            await asyncio.wait_for(self._answer(opener), START_TIMEOUT_S)
        except BaseException as error:
            self._give_up(opener)
            if isinstance(error, OSError):  # a TimeoutError is one
                raise GrantRefused("unenforceable", "no process that opens paths could be started") from error
            raise
        return opener

    async def _answer(self, opener: _Opener) -> tuple[dict[str, Json], int | None]:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(opener.end, _resolve, ready)
        try:
            await ready
        finally:
            loop.remove_reader(opener.end)
        data, fds, _, _ = socket.recv_fds(opener.end, MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError("it ended")
        return cast("dict[str, Json]", codec.load(data)), fds[0] if fds else None

    def _give_up(self, opener: _Opener) -> None:
        opener.end.close()
        with suppress(ProcessLookupError):
            opener.process.kill()
        self._stuck.append(opener.process)


async def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while process.poll() is None and loop.time() < end_s:
        await asyncio.sleep(0.005)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
