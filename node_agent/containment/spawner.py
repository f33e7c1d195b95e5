"""The agent's handle on the zygote: starts it, asks it for moulds and id maps, ends it.

Called by the supervisor (start, stop), the slots (moulds) and the grants (id maps). Must never fork: the zygote is
started by exec, with an empty environment, in /, with nothing but its socket and /dev/null (attack 6).
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal, cast

from node_agent.containment.errors import SpawnError, unsent
from node_agent.containment.moulds import Mould, pair
from runner.wire import codec
from runner.wire.codec import Json

__all__ = ["Zygote"]

MODULE: Final = "node_agent.containment.zygote"
START_TIMEOUT_S: Final = 20.0
REPLY_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 10.0
_MAX_REPLY_BYTES: Final = 8192
_MAX_ERROR_BYTES: Final = 4000


class Zygote:
    """One zygote process. ``start`` and ``stop`` are idempotent; ``died`` resolves when the process has ended."""

    died: asyncio.Future[None]

    def __init__(self, *, level: Literal["A", "B"], python: str = sys.executable) -> None:
        self.level: Literal["A", "B"] = level
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._far = pair()
        self._pidfd: int | None = None
        self._next = 0
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Json], int]]] = {}
        self._moulds: set[Mould] = set()

    @property
    def pid(self) -> int | None:
        """The process id while the zygote runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises SpawnError with its own words."""
        if self._process is not None:
            return
        loop = asyncio.get_running_loop()
        self.died = loop.create_future()
        self._socket.setblocking(False)
        words = [self._python, "-I", "-B", "-m", MODULE, str(self._far.fileno()), self.level]
        process = subprocess.Popen(
            words,
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[self._far.fileno()],
        )
        self._far.close()
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        loop.add_reader(self._pidfd, self._ended)
        try:
            hello = await asyncio.wait_for(loop.sock_recv(self._socket, _MAX_REPLY_BYTES), START_TIMEOUT_S)
        except (TimeoutError, OSError):
            hello = b""
        errors = process.stderr
        try:
            if not hello:
                process.kill()
                said = errors.read(_MAX_ERROR_BYTES).decode(errors="replace") if errors else ""
                raise SpawnError(f"the zygote did not start: {said.strip()[-500:] or 'no word from it'}")
        finally:
            if errors is not None:
                errors.close()
        loop.add_reader(self._socket, self._read)

    async def stop(self) -> None:
        """End the zygote and every mould of it; return when all are gone."""
        for mould in list(self._moulds):
            mould.kill()
        gone = [mould.gone for mould in self._moulds if not mould.gone.done()]
        if gone:
            await asyncio.wait(gone, timeout=STOP_TIMEOUT_S)
        for mould in list(self._moulds):
            self.forget(mould)
        loop = asyncio.get_running_loop()
        for end in (self._socket, self._far):
            if end.fileno() >= 0:
                loop.remove_reader(end)
                end.close()
        if self._process is None or self._pidfd is None:
            return
        if not self.died.done():
            await asyncio.wait([self.died], timeout=STOP_TIMEOUT_S)
        if not self.died.done():
            self._process.kill()
            await self.died
        os.close(self._pidfd)
        self._pidfd = None

    async def mould(
        self, join_paths: Sequence[str], job_fd: int | None, deadline_ns: int | None, paths: Sequence[str] = ()
    ) -> Mould:
        """Return a new mould that is ready for attempts, and whose views can show ``paths``. Raises SpawnError."""
        lifeline, far_lifeline = pair()
        control, far_control = pair()
        fds = [far_lifeline.fileno(), far_control.fileno(), *([] if job_fd is None else [job_fd])]
        try:
            reply, pidfd = await self._ask({"op": "mould", "join": list(join_paths), "paths": list(paths)}, fds)
        except BaseException:
            lifeline.close()
            control.close()
            raise
        finally:
            far_lifeline.close()
            far_control.close()
        mould = Mould(cast("int", reply["pid"]), pidfd, lifeline, control, frozenset(paths))
        self._moulds.add(mould)
        if deadline_ns is not None:
            mould.renew(deadline_ns)
        try:
            await asyncio.wait_for(asyncio.shield(mould.up), START_TIMEOUT_S)
        except BaseException as error:
            mould.kill()
            await asyncio.wait([mould.gone], timeout=STOP_TIMEOUT_S)
            self.forget(mould)
            if isinstance(error, TimeoutError):
                raise SpawnError("the mould was not ready in time") from None
            raise
        return mould

    async def userns(self, owner_uid: int, owner_gid: int, job_uid: int, job_gid: int) -> int:
        """Return a descriptor of a user namespace that maps the owner's ids to the job's. Raises SpawnError."""
        _, fd = await self._ask({"op": "userns", "owner": [owner_uid, owner_gid], "job": [job_uid, job_gid]}, [])
        return fd

    def forget(self, mould: Mould) -> None:
        """Close a mould that is gone, or whose end nobody waits for any more."""
        self._moulds.discard(mould)
        mould.close()

    async def _ask(self, request: dict[str, Json], fds: list[int]) -> tuple[dict[str, Json], int]:
        if self._process is None or self.died.done():
            raise SpawnError("the zygote is not running")
        loop = asyncio.get_running_loop()
        self._next += 1
        number = self._next
        answer: asyncio.Future[tuple[dict[str, Json], int]] = loop.create_future()
        self._waiting[number] = answer
        try:
            socket.send_fds(self._socket, [codec.dump({**request, "id": number})], fds)
            return await asyncio.wait_for(answer, REPLY_TIMEOUT_S)
        except TimeoutError:
            raise SpawnError("the zygote does not answer") from None
        except OSError as error:
            raise unsent("the zygote can't be asked", error) from error
        finally:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, _MAX_REPLY_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                asyncio.get_running_loop().remove_reader(self._socket)
                self._fail_waiting()
                return
            self._answer(cast("dict[str, Json]", codec.load(data)), fds[0] if fds else -1)

    def _answer(self, reply: dict[str, Json], fd: int) -> None:
        waiting = self._waiting.get(cast("int", reply["id"]))
        if waiting is None or waiting.done():
            # Nobody waits any more: closing the pidfd is enough, the closed lifeline ends the mould.
            if fd >= 0:
                os.close(fd)
        elif fd < 0:
            waiting.set_exception(SpawnError(f"the zygote failed: {reply.get('error')}"))
        else:
            waiting.set_result((reply, fd))

    def _fail_waiting(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(SpawnError("the zygote died"))

    def _ended(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self._fail_waiting()
        # At level B nothing else ends the moulds of a dead zygote at once.
        for mould in self._moulds:
            mould.kill()
        if not self.died.done():
            self.died.set_result(None)
