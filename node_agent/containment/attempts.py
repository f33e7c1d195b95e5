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

from node_agent.containment.cgroup import SlotGroup
from node_agent.containment.errors import ResultTooLarge
from node_agent.containment.moulds import End, Mould
from node_agent.containment.plan import Usage, Verdict
from node_agent.containment.slotgroup import GroupEvents
from runner.wire import frames

__all__ = ["PROOF_TIMEOUT_S", "Attempt"]

#: A kill without proof for so long is reported as unconfirmed.
PROOF_TIMEOUT_S: Final = 10.0
_RETRY_S: Final = 1.0
_FIRST_LOOK_S: Final = 0.0005
_LONGEST_LOOK_S: Final = 0.05
#: Most processes that are counted below a mould without a group.
_MOST_COUNTED: Final = 600


class Attempt:
    """A worker that answered READY, and what becomes of it."""

    def __init__(
        self,
        mould: Mould,
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
        self._counted = 0
        self._look_s = _FIRST_LOOK_S
        self._timers: dict[str, asyncio.TimerHandle] = {}
        mould.on_end, mould.on_gone = self._take_end, self._take_gone

    @property
    def forced(self) -> bool:
        """Whether ``kill`` was called while it could still matter."""
        return self._killed_s is not None

    async def release(self, payload: bytes) -> None:
        """Send the payload; the worker runs the job when it has all of it. A worker that is gone is no error here."""
        with suppress(OSError):
            for record in frames.chunks(payload):
                await self._loop.sock_sendall(self.channel, record)

    def terminate(self) -> None:
        """Send SIGTERM to the worker, through the mould."""
        if not self.verdict.done():
            self._mould.terminate(self._name)

    def kill(self) -> None:
        """Kill everything of the attempt, twice over: its cgroup, and the mould whose namespace holds it."""
        if self.verdict.done() or self._killed_s is not None:
            return
        self._killed_s = self._loop.time()
        with suppress(OSError):
            self._counted = self._group.count() if self._group is not None else _count_below(self._mould.pid)
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
        self.channel.close()
        if self._result_fd is not None:
            os.close(self._result_fd)
            self._result_fd = None

    def _strike(self) -> None:
        if self._group is not None:
            with suppress(OSError):
                self._group.kill()
        self._mould.kill()
        if not self._mould.gone.done():
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
            limit=_limit_broken(events),
            usage=usage,
            forced=self.forced,
        )

    def _killed(self, *, proved: bool) -> Verdict:
        done_s = self._loop.time()
        return Verdict(
            kind="killed",
            usage=self._usage(self._events(), processes=self._counted),
            method="pidfd" if self._group is None else "cgroup.kill+pidfd",
            kill_ms=round((done_s - (self._killed_s or done_s)) * 1000, 3),
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
        return Usage(wall_s, max(cpu_s, events.cpu_s), max_rss_bytes or events.peak_bytes, processes)


def _limit_broken(events: GroupEvents) -> Literal["", "memory", "pids"]:
    return "memory" if events.oom_kills else "pids" if events.pids_hits else ""


def _is_sigkill(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _count_below(mould_pid: int) -> int:
    """Count the descendants of a mould, at most _MOST_COUNTED: one look, for the receipt."""
    todo, found = [mould_pid], 0
    while todo and found < _MOST_COUNTED:
        pid = todo.pop()
        with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
            found += len(children)
            todo += children
    return found
