"""One attempt as the agent sees it: its pipes, its channel, its kill, and the verdict after the proof.

Made by Slot.begin, driven by the supervisor. Must never resolve ``verdict`` as proved before the kernel's word: the
mould's ECHILD for a normal end, its readable pidfd and an empty group for a kill.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal

from node_agent.containment import closing, disks, freezing, glance
from node_agent.containment.cgroup import SlotGroup
from node_agent.containment.ends import SEAT, deaf_to_rights, setup_error
from node_agent.containment.errors import GroupError, ResultTooLarge, SetupError, SpawnError
from node_agent.containment.freezing import FREEZE_TIMEOUT_S, Still
from node_agent.containment.glance import Glance
from node_agent.containment.lower.handle import LowMould
from node_agent.containment.moulds import Mould
from node_agent.containment.orders import LETTERS, End
from node_agent.containment.plan import DoorName, Usage, Verdict
from node_agent.containment.slotgroup import GroupEvents
from runner.wire import frames
from runner.wire.errors import CodecError
from runner.wire.frames import Op

__all__ = ["PROOF_TIMEOUT_S", "Attempt"]

#: A kill without proof for so long is reported as unconfirmed.
PROOF_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 1.0
_FIRST_LOOK_S: Final = 0.0005
_LONGEST_LOOK_S: Final = 0.05


class Attempt:
    """A worker that answered READY, and what becomes of it."""

    def __init__(
        self,
        mould: Mould | LowMould,
        group: SlotGroup | None,
        ends: tuple[int, int, socket.socket, int | None],
        on_unproved: Callable[[], None],
        name: str,
    ) -> None:
        """``ends``: our ends of stdout, stderr, the channel and (tasks) the result file.

        ``name``: what the mould calls the worker.
        """
        self._loop = asyncio.get_running_loop()
        self.stdout, self.stderr, self.channel, self._result_fd = ends
        #: Resolves after the proof, or with ``proved=False`` when there was none in time.
        self.verdict: asyncio.Future[Verdict] = self._loop.create_future()
        #: Resolves at the proof, however late.
        self.proved: asyncio.Future[None] = self._loop.create_future()
        self._name = name
        self._mould = mould
        self._group = group
        self._on_unproved = on_unproved
        self._end: End | None = None
        self._started_s = self._loop.time()
        self._killed_s: float | None = None
        #: The attempt's own file systems (see disks.py); closed by ``close``.
        self.disks: tuple[int, ...] = ()
        #: The worker's pidfd and its pid namespace, for the broker (plans with ``broker``); closed by ``close``.
        self.seat: tuple[int, ...] = ()
        #: Whether the worker is known to have restricted itself: nothing of the job runs before.
        self.heard = False
        #: Done once what ``close`` gave back is freed; None: at once.
        self.closing: asyncio.Future[None] | None = None
        #: How many processes the attempt may have; 0 = not told.
        self.pids = 0
        #: Called for each OPEN by an attempt that reads its channel itself.
        self.on_open: Callable[[], object] | None = None
        self._froze = False
        self._failure: bytes | None = None
        self._overdue = False
        self._seen = Glance()
        self._look_s = _FIRST_LOOK_S
        self._timers: dict[str, asyncio.TimerHandle] = {}
        mould.on_end, mould.on_gone = self._take_end, self._take_gone

    @property
    def forced(self) -> bool:
        """Whether ``kill`` was called while it could still matter."""
        return self._killed_s is not None

    @property
    def kill_ms(self) -> float:
        """From the kill until now; read it at the proof."""
        return round((self._loop.time() - (self._killed_s or self._loop.time())) * 1000, 3)

    def sockets(self) -> int:
        """Count the sockets that the attempt's processes hold open."""
        return glance.sockets_below(self._mould.pid)

    def cpu_s(self) -> float:
        """CPU seconds so far; without a group, of the processes that live now and of those they waited for."""
        if self._group is not None:
            return self._events().cpu_s
        return glance.cpu_s_below(self._mould.pid)

    async def release(self, payload: bytes) -> None:
        """Send the payload; the worker runs the job when it has all of it. A worker that is gone is no error here."""
        with suppress(OSError):
            for record in frames.chunks(payload):
                await self._loop.sock_sendall(self.channel, record)

    def hurry(self, payload: bytes, timeout_s: float) -> None:
        """Send a payload of one record before READY was heard; ``unready`` tells afterwards whether it came."""
        with suppress(OSError):
            self.channel.send(frames.pack(Op.RELEASE, payload))
        self._timers["setup"] = self._loop.call_later(timeout_s, self._late)

    def unready(self, verdict: Verdict) -> SetupError | SpawnError | None:
        """Return why nothing of the job ran, None if it did; for an attempt that was hurried, after its verdict.

        SetupError: the worker could not restrict itself. SpawnError: it ended earlier, another one may be tried.
        """
        if self.heard or (verdict.kind == "exit" and verdict.code == 0):
            return None
        if self._hear():
            return None
        if self._failure is not None:
            return setup_error(self._failure)
        if self._overdue:
            return SetupError("start", 0, "the worker did not get ready in time")
        return None if self.forced else SpawnError(f"the worker ended before it was ready ({verdict.kind})")

    def hear(self) -> bool:
        """Read the worker's first word, if there is one; return whether it is READY."""
        return self._hear()

    def listens_itself(self) -> bool:
        """Whether the attempt reads its channel itself, and calls ``on_open``."""
        return False

    def _hear(self) -> bool:
        if not self.heard and self._failure is None:
            with suppress(OSError, CodecError):
                flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                data, fds, _, _ = socket.recv_fds(self.channel, frames.MAX_RECORD_BYTES, disks.MOST + SEAT, flags)
                self.disks, self.seat = tuple(fds[: disks.MOST]), tuple(fds[disks.MOST :])
                op, body = frames.unpack(data)
                self.heard = op is Op.READY
                deaf_to_rights(self.channel)
                self._failure = body if op is Op.FAILED else None
        return self.heard

    def _late(self) -> None:
        if not self._hear():
            self._overdue = True
            self.kill()

    async def door(self, name: DoorName = "net") -> tuple[int, int]:
        """Return what a job with net grants, or with a service, is connected by: see Mould.door. Raises SpawnError."""
        if not isinstance(self._mould, Mould):
            raise SpawnError("no net namespace at this level")
        return await self._mould.door(name)

    def place(self) -> tuple[int, ...]:
        """Return what tells the broker this attempt: pidfds of mould and worker, and the pid namespace; all new copies.

        Raises SpawnError.
        """
        if not isinstance(self._mould, Mould) or not self.seat:
            raise SpawnError("the worker has not said where it sits")
        return (self._mould.pin(), *(os.dup(fd) for fd in self.seat))

    @property
    def result_fd(self) -> int | None:
        """The result file of a task."""
        return self._result_fd

    def replace_result(self, fd: int) -> None:
        """Read ``fd``, which is ours from now on, instead of what the task wrote."""
        if self._result_fd is not None:
            os.close(self._result_fd)
        self._result_fd = fd

    def terminate(self) -> None:
        """Send SIGTERM to the worker, through the mould."""
        self.tell(signal.SIGTERM)

    def tell(self, number: int) -> None:
        """Send SIGTERM, SIGINT, SIGUSR1 or SIGUSR2 to the worker, through the mould."""
        if number not in LETTERS:
            raise ValueError(f"signal {number} is no word to a worker: it would end its mould")
        if not self.verdict.done():
            self._mould.tell(self._name, number)

    async def freeze(self, frozen: bool, timeout_s: float = FREEZE_TIMEOUT_S) -> Still:
        """Let no process of the attempt run, or let them go on. Raises GroupError where that can't be done."""
        if self.verdict.done():
            return Still(True, 0, "none")
        self._froze = frozen
        return await freezing.freeze(self._group, self._mould, self._name, frozen, timeout_s)

    def kill(self) -> None:
        """Kill everything of the attempt, twice over: its cgroup, and the mould whose namespace holds it."""
        if self.verdict.done() or self._killed_s is not None:
            return
        self._killed_s = self._loop.time()
        with suppress(OSError):
            group = self._group
            self._seen = Glance(group.count()) if group is not None else glance.below(self._mould.pid)
        self._strike()
        self._timers["late"] = self._loop.call_later(PROOF_TIMEOUT_S, self._give_up)

    def result(self, limit: int) -> bytes | None:
        """Return what the task wrote to its result descriptor, None if nothing; call it after the verdict.

        Raises:
            ResultTooLarge: there are more than ``limit`` bytes.
        """
        if self._result_fd is None:
            return None
        size = os.fstat(self._result_fd).st_size
        if size > limit:
            raise ResultTooLarge(f"the result has {size} bytes, the limit is {limit}")
        data = b""
        while len(data) < size and (more := os.pread(self._result_fd, size - len(data), len(data))):
            data += more
        return data or None

    def close(self) -> None:
        """Give back the channel and the result; the pipes are the supervisor's. Idempotent."""
        filled = [*self.disks, *(() if self._result_fd is None else (self._result_fd,))]
        self.closing = closing.away(self.seat, filled, self.channel, heard=self._told) or self.closing
        self.disks = self.seat = ()
        self._result_fd = None

    @property
    def _told(self) -> bool:
        return self.heard or self._failure is not None

    async def freed(self) -> None:
        """Return once all is freed that ``close`` gave back: until then what it had in memory counts as the slot's."""
        if self.closing is not None:
            await self.closing

    def _strike(self) -> None:
        if self._group is not None:
            with suppress(OSError):
                self._group.kill()
        self._mould.kill()
        if not self.proved.done():
            self._timers["retry"] = self._loop.call_later(_RETRY_S, self._strike)

    def _take_end(self, end: End) -> None:
        if end.attempt != self._name:
            self._mould.kill()
            return
        self._end = end
        if self._killed_s is None:
            self._resolve(self._natural(end))

    def _take_gone(self) -> None:
        """The mould's pidfd is readable: its namespace is empty. A group must be empty, too."""
        if self.proved.done():
            return
        if self._group is not None and self._still_populated(self._group):
            self._timers["look"] = self._loop.call_later(self._look_s, self._take_gone)
            self._look_s = min(self._look_s * 2, _LONGEST_LOOK_S)
            return
        if self._killed_s is None:
            events = self._events()
            self._resolve(Verdict(kind="worker_died", usage=self._usage(events), limit=_limit_broken(events)))
            return
        end = self._end
        if end is not None and not _is_sigkill(end.status):
            # It ended by itself, and was proved gone, before the kill could reach it.
            self._resolve(self._natural(end))
            return
        self._resolve(self._killed(proved=True))

    def _still_populated(self, group: SlotGroup) -> bool:
        if self._killed_s is None:
            # The mould is dead without our doing: what is left in the group goes with it.
            with suppress(OSError):
                group.kill()
        return group.populated()

    def _give_up(self) -> None:
        if not self.verdict.done():
            self.verdict.set_result(self._killed(proved=False))
            self._on_unproved()

    def _resolve(self, verdict: Verdict) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._group is not None:
            self._group.calm()
        if self._froze and self._group is not None:
            # The slot's next worker is born in this group.
            with suppress(OSError, GroupError):
                self._group.freeze(False)
        if not self.verdict.done():
            self.verdict.set_result(verdict)
        if not self.proved.done():
            self.proved.set_result(None)
        self._mould.on_end = self._mould.on_gone = None

    def _natural(self, end: End) -> Verdict:
        events = self._events()
        usage = self._usage(events, end.cpu_s, end.max_rss_bytes, end.processes)
        kind: Literal["exit", "signal"] = "signal" if os.WIFSIGNALED(end.status) else "exit"
        return Verdict(
            kind=kind,
            code=os.WEXITSTATUS(end.status) if kind == "exit" else 0,
            signal=os.WTERMSIG(end.status) if kind == "signal" else 0,
            limit=_limit_broken(events) or self._met_limit(end),
            usage=usage,
            forced=self.forced,
        )

    def _met_limit(self, end: End) -> Literal["", "pids", "disk"]:
        """Return what no counter tells: RLIMIT_NPROC without a group, and a full file system at the end."""
        if not end.status:
            return ""
        counted = self._group is not None and "pids" in self._group.enforces
        if not counted and 0 < self.pids - 1 <= end.left:
            return "pids"
        return "disk" if self._hear() and disks.full(self.disks) else ""

    def _killed(self, *, proved: bool) -> Verdict:
        seen = self._seen
        return Verdict(
            kind="killed",
            usage=self._usage(self._events(), seen.cpu_s, seen.max_rss_bytes, seen.processes),
            method=self._mould.method if self._group is None else f"cgroup.kill+{self._mould.method}",
            kill_ms=self.kill_ms,
            forced=True,
            proved=proved,
        )

    def _events(self) -> GroupEvents:
        """Return what the kernel counted for this attempt: nothing where there is no group, or it can't be read."""
        if self._group is not None:
            with suppress(OSError):
                return self._group.events()
        return GroupEvents()

    def _usage(self, events: GroupEvents, cpu_s: float = 0.0, max_rss_bytes: int = 0, processes: int = 0) -> Usage:
        wall_s = round(self._loop.time() - self._started_s, 6)
        return Usage(wall_s, max(cpu_s, events.cpu_s), max(max_rss_bytes, events.peak_bytes), processes)


def _limit_broken(events: GroupEvents) -> Literal["", "memory", "pids"]:
    return "memory" if events.oom_kills else "pids" if events.pids_hits else ""


def _is_sigkill(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
