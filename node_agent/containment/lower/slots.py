"""A slot at levels C to F: a mould of its own for every attempt, no namespaces. The agent's side of the lower ladder.

Called by the supervisor like containment/slots.py, on its one loop. Must never start an attempt on a lease that has run
out, in a mould that another attempt had, or before the last one is proved gone.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from node_agent.containment.attempts import PROOF_TIMEOUT_S, Attempt
from node_agent.containment.cgroup import SlotGroup
from node_agent.containment.ends import deaf_to_rights
from node_agent.containment.errors import GroupError, LimitBusy, SetupError, SpawnError
from node_agent.containment.lower.handle import LowMould
from node_agent.containment.lower.workspace import Workspaces
from node_agent.containment.moulds import pair
from node_agent.containment.plan import Level, Plan, Profile, dumps
from node_agent.containment.slots import boottime_ns
from runner.wire import codec, frames
from runner.wire.errors import CodecError
from runner.wire.frames import Op

__all__ = ["LOW_LEVELS", "LowSlot"]

LOW_LEVELS: Final[tuple[Level, ...]] = ("C", "D", "E", "F")

SETUP_TIMEOUT_S: Final = 20.0


class LowSlot:
    """One of the node's slots. ``healthy`` is False from a kill without proof until ``proved`` resolves."""

    def __init__(
        self,
        index: int,
        level: Level,
        workspaces: Workspaces,
        group: SlotGroup | None = None,
        *,
        clock: Callable[[], int] = boottime_ns,
    ) -> None:
        """``group``: at level C alone, with cgroup v2."""
        if level in ("A", "B") or (level == "C") != (group is not None):
            raise ValueError("level C has a group, levels D to F have none, A and B have another slot")
        self.index = index
        self.level: Level = level
        self.healthy = True
        self.proved: asyncio.Future[None] | None = None
        self._workspaces = workspaces
        self._group = group
        self._clock = clock
        self._mould: LowMould | None = None
        self._attempt: Attempt | None = None
        self._folder: str | None = None
        self._deadline_ns: int | None = None
        self._lock = asyncio.Lock()
        self._ahead: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def mould_pid(self) -> int | None:
        """The guard's pid: it ends last, after the proof. None if no mould stands."""
        return None if self._mould is None else self._mould.guard

    def renew(self, deadline_ns: int) -> None:
        """Let the slot live until this CLOCK_BOOTTIME; remembered for moulds that are still to come."""
        self._deadline_ns = deadline_ns
        if self._mould is not None:
            self._mould.renew(deadline_ns)

    async def prepare(self, _profile: Profile) -> None:
        """Have a new mould stand; every attempt gets its own, so any profile is served. Raises SpawnError."""
        async with self._lock:
            await self._stand()

    async def begin(self, plan: Plan, fds: Sequence[int]) -> Attempt:
        """Start a worker and return once it is restricted and nothing of the job has run.

        ``fds``: a checked O_PATH descriptor for each of ``plan.mounts``. They stay the caller's.

        Raises:
            SetupError: the worker could not be restricted; it is proved gone. SpawnError, GroupError: none was started.
        """
        async with self._lock:
            await self._stand()
            await self._limit(plan)
            if self._mould is None or (self._deadline_ns is not None and self._clock() >= self._deadline_ns):
                raise SpawnError("the lease of this node has run out")
            return await self._start(self._mould, plan, fds)

    async def close(self) -> None:
        """Kill what runs, end the mould, wait for the proof. Idempotent."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.cancel()
            with suppress(asyncio.CancelledError, SpawnError):
                await self._ahead
        if self._attempt is not None:
            self._attempt.kill()
            await asyncio.wait([self._attempt.verdict])
        async with self._lock:
            await self._drop()

    async def _stand(self) -> None:
        if self._attempt is not None and not self._attempt.proved.done():
            raise SpawnError("the slot's last attempt is not proved gone")
        if self._mould is not None and not self._mould.used and not self._mould.gone.done():
            return
        await self._drop()
        if self._closed:
            raise SpawnError("the slot is closed")
        if self._group is not None:
            # From Linux 6.14 on a process born into a group that was killed before is killed, too, unless the group of
            # its parent was killed as often: so every mould gets fresh groups.
            self._group.renew()
        join, job_fd = (self._group.join_paths, self._group.job_fd) if self._group is not None else ((), None)
        self._mould = await LowMould.start(self.level, join, job_fd)
        if self._deadline_ns is not None:
            self._mould.renew(self._deadline_ns)

    async def _start(self, mould: LowMould, plan: Plan, fds: Sequence[int]) -> Attempt:
        folder = plan.attempt.replace("/", "_")
        place = self._workspaces.make(folder, plan.uid, plan.gid)
        near, far = pair()
        near.setblocking(False)
        deaf_to_rights(near)
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        for fd in (out[0], err[0]):
            os.set_blocking(fd, False)
        result = os.memfd_create("result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if plan.kind == "task" else None
        attempt = Attempt(mould, self._group, (out[0], err[0], near, result), self._unproved, plan.attempt)
        self._attempt, self._folder = attempt, folder
        attempt.proved.add_done_callback(lambda _: self._free(attempt, folder))
        try:
            theirs = [out[1], err[1], *([] if result is None else [result]), place, *fds]
            socket.send_fds(near, [frames.pack(Op.PLAN, dumps(plan))], theirs)
            mould.begin(plan.attempt, plan.uid, far.fileno())
        except (OSError, CodecError, SpawnError) as error:
            attempt.kill()
            await self._undo(attempt)
            raise SpawnError(f"the plan can't be sent: {error}") from error
        finally:
            for fd in (out[1], err[1], place):
                os.close(fd)
            far.close()
        try:
            await self._ready(attempt)
        except BaseException as error:
            if not isinstance(error, SetupError):
                attempt.kill()
            await self._undo(attempt)
            raise
        return attempt

    async def _ready(self, attempt: Attempt) -> None:
        loop = asyncio.get_running_loop()
        try:
            data = await asyncio.wait_for(loop.sock_recv(attempt.channel, frames.MAX_RECORD_BYTES), SETUP_TIMEOUT_S)
            op, body = frames.unpack(data) if data else (None, b"")
        except TimeoutError:
            attempt.kill()
            raise SetupError("start", 0, f"no answer in {SETUP_TIMEOUT_S:g} s") from None
        except (OSError, CodecError):
            op, body = None, b""
        if op is Op.READY:
            attempt.heard = True
            return
        if op is Op.FAILED:
            raise _setup_error(body)
        verdict = await attempt.verdict
        if verdict.kind == "worker_died":
            raise SpawnError("the mould ended before its worker was ready")
        raise SetupError("start", 0, f"the worker ended without a word ({verdict.kind} {verdict.signal})")

    async def _undo(self, attempt: Attempt) -> None:
        """Wait until a failed attempt is proved gone, and close all of it."""
        try:
            await asyncio.wait_for(asyncio.shield(attempt.verdict), PROOF_TIMEOUT_S)
        except TimeoutError:
            attempt.kill()
            await attempt.verdict
        except asyncio.CancelledError:
            attempt.kill()
            raise
        finally:
            os.close(attempt.stdout)
            os.close(attempt.stderr)
            attempt.close()

    async def _limit(self, plan: Plan) -> None:
        if self._group is None:
            if plan.memory_bytes is not None or plan.cpus is not None:
                raise GroupError("no cgroup at this level, so a memory or cpu total can't be enforced")
            return
        group = self._group
        set_limits = functools.partial(group.set_limits, pids=plan.pids, memory_bytes=plan.memory_bytes, cpus=plan.cpus)
        try:
            set_limits()
        except LimitBusy:
            await self._drop()
            await self._stand()
            set_limits()
        group.reset()

    async def _drop(self) -> None:
        """End the mould, if one stands, and wait for its word."""
        mould = self._mould
        if mould is None:
            return
        mould.kill()
        if not mould.gone.done():
            await asyncio.wait([mould.gone], timeout=PROOF_TIMEOUT_S)
        if not mould.gone.done():
            self.healthy = False
            raise SpawnError("the slot's old mould is not proved gone")
        # Not before: whoever is cancelled while it waits leaves the mould to the next one.
        self._mould = None
        mould.close()

    def _free(self, attempt: Attempt, folder: str) -> None:
        """The attempt is proved gone: its folder goes, and the next mould is made while nobody waits for it."""
        with suppress(OSError):
            self._workspaces.remove(folder)
        if self._attempt is attempt:
            self._attempt = None
        if not self.healthy:
            self.healthy = True
            if self.proved is not None and not self.proved.done():
                self.proved.set_result(None)
        if not self._closed and not self._lock.locked():
            self._ahead = asyncio.get_running_loop().create_task(self._stand_ahead())

    async def _stand_ahead(self) -> None:
        async with self._lock:
            if self._attempt is None and not self._closed:
                with suppress(SpawnError):
                    await self._stand()

    def _unproved(self) -> None:
        self.healthy = False
        self.proved = asyncio.get_running_loop().create_future()


def _setup_error(body: bytes) -> SetupError:
    try:
        told = codec.load(body)
    except CodecError:
        told = None
    if not isinstance(told, dict):
        return SetupError("start", 0, "an unreadable report")
    errno = told.get("errno")
    return SetupError(str(told.get("step")), errno if isinstance(errno, int) else 0, str(told.get("detail")))
