"""A slot of the node: keeps a fit mould, runs one attempt at a time in it. The agent's side of the containment.

Called by the supervisor, on its one loop. Must never share a mould between attempts that differ in tenant, signer,
secrets or net, nor use one again after a forced kill or anything odd (attack 38), and never start an attempt on a lease
that has run out.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from node_agent.containment import disks
from node_agent.containment.attempts import PROOF_TIMEOUT_S, Attempt
from node_agent.containment.cgroup import SlotGroup
from node_agent.containment.ends import Ends, Waiting, first_record, noexec_memory, setup_error
from node_agent.containment.errors import GroupError, LimitBusy, SetupError, SpawnError, unsent
from node_agent.containment.moulds import Mould
from node_agent.containment.plan import Plan, Profile, dumps
from node_agent.containment.reused import Keeper, ReusedAttempt, Terms
from node_agent.containment.spawner import Zygote
from runner.wire import frames
from runner.wire.errors import CodecError
from runner.wire.frames import Op

__all__ = ["Attempt", "Slot", "Zygote", "boottime_ns"]

MOST_ATTEMPTS: Final = 1000
LONGEST_LIFE_S: Final = 3600.0
SETUP_TIMEOUT_S: Final = 20.0
_TRIES: Final = 2


def boottime_ns() -> int:
    """Return CLOCK_BOOTTIME: it also counts the time that the host sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class _NotStarted(Exception):
    """The mould ended before it forked a worker: another one may be tried."""


class Slot:
    """One of the node's slots. ``healthy`` is False from a kill without proof until ``proved`` resolves."""

    def __init__(
        self,
        index: int,
        zygote: Zygote,
        group: SlotGroup | None,
        *,
        paths: Sequence[str] = (),
        clock: Callable[[], int] = boottime_ns,
    ) -> None:
        """``paths``: the node's own, which plans will name; others cost a new mould when a plan first names them."""
        self.index = index
        self._paths = dict.fromkeys(paths)
        self.healthy = True
        self.proved: asyncio.Future[None] | None = None
        self._zygote = zygote
        self._group = group
        self._clock = clock
        self._mould: Mould | None = None
        self._attempt: Attempt | None = None
        self._waiting: Waiting | None = None
        self._deadline_ns: int | None = None
        self._lock = asyncio.Lock()
        self._ahead: asyncio.Task[None] | None = None
        self._closed = False
        #: The worker that waits for another attempt (``reuse=N``).
        self.keeper = Keeper(self._fork_ahead)

    @property
    def mould_pid(self) -> int | None:
        """The host's pid of the mould that stands, if one does."""
        return None if self._mould is None else self._mould.pid

    def renew(self, deadline_ns: int) -> None:
        """Let the slot live until this CLOCK_BOOTTIME; remembered for moulds that are still to come."""
        self._deadline_ns = deadline_ns
        if self._mould is not None:
            self._mould.renew(deadline_ns)

    async def prepare(self, profile: Profile) -> None:
        """Have a mould stand that may serve ``profile``. Raises SpawnError."""
        async with self._lock:
            self._check_free()
            if self.keeper.holds:
                await self.keeper.end()
            if self._mould is None or not _fits(self._mould, profile):
                await self._replace(profile)
            elif self._mould.profile is None:
                self._mould.profile = profile

    async def begin(self, plan: Plan, fds: Sequence[int]) -> Attempt:
        """Start a worker and return once it is restricted and nothing of the job has run.

        ``fds``: for each of ``plan.mounts`` a detached mount (A) or a checked O_PATH descriptor (B). They stay the
        caller's.

        Raises:
            SetupError: the worker could not be restricted; it is proved gone. SpawnError, GroupError: none was started.
        """
        async with self._lock:
            self._check_free()
            profile = None if self._mould is None else self._mould.profile
            if self._mould is not None and not self._mould.paths.issuperset(plan.python_paths + plan.task_paths):
                self._paths |= dict.fromkeys(plan.python_paths + plan.task_paths)
                await self._replace(profile)
            for left in reversed(range(_TRIES)):
                await self._limit(plan)
                try:
                    return await self._try(plan, fds)
                except _NotStarted as error:
                    if not left:
                        raise SpawnError(f"no worker was started: {error}") from None
                    await self._replace(profile)
        raise SpawnError("unreachable")

    def waits_for(self, plan: Plan, profile: Profile) -> bool:
        """Return whether a worker stands that ``eager`` could start for this plan."""
        mould, waiting = self._mould, self._waiting
        return (
            waiting is not None
            and waiting.mould is mould
            and mould.profile is not None
            and _fits(mould, profile)
            and mould.paths.issuperset(plan.python_paths + plan.task_paths)
            and (plan.allow_exec or plan.kind != "task")
            and (self._attempt is None or self._attempt.proved.done())
            and not self._lock.locked()
            and not self._closed
        )

    def eager(self, plan: Plan, payload: bytes) -> Attempt | None:
        """Hand plan and payload to the worker that stands, without waiting for its READY in between.

        Only after ``waits_for``, for a plan without mounts and a payload of one record. The worker reads the payload
        after it has restricted itself, so nothing of the job runs in less than its sandbox: an end of an attempt that
        ``Attempt.unready`` names is one before the job.

        Returns None, with nothing sent, where ``begin`` has to be asked instead, and tells why there is none.
        """
        waiting = self._waiting
        if waiting is None or (self._deadline_ns is not None and self._clock() >= self._deadline_ns):
            return None
        try:
            self._set_limits(plan)
        except GroupError:
            return None
        self._waiting = None
        ends = Ends.make(plan, waiting.channel)
        try:
            attempt = self._sent(waiting, ends, plan, ())
        except (OSError, CodecError):
            ends.close()
            return None
        attempt.hurry(payload, SETUP_TIMEOUT_S)
        return attempt

    def again(self, plan: Plan, terms: Terms, payload: bytes) -> Attempt | None:
        """Hand a payload of one record to the worker that waits, if one does and these are its terms.

        An attempt that ``Attempt.unready`` names has not begun. None: ask ``prepare`` and ``begin`` instead.
        """
        lapsed = self._deadline_ns is not None and self._clock() >= self._deadline_ns
        free = self._attempt is None or self._attempt.proved.done()
        if self.keeper.serves(terms) is None or lapsed or not free or self._lock.locked() or self._closed:
            return None
        try:
            self._set_limits(plan)
        except (GroupError, LimitBusy):
            return None
        attempt = self.keeper.follow(plan, self._group, self._unproved, payload)
        if attempt is not None:
            self._hold(attempt)
        return attempt

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

    def _check_free(self) -> None:
        if self._attempt is not None and not self._attempt.proved.done():
            raise SpawnError("the slot's last attempt is not proved gone")

    async def _try(self, plan: Plan, fds: Sequence[int]) -> Attempt:
        if plan.kind == "task" and not plan.allow_exec and not noexec_memory():
            why = "the result of a task that may execute no file of its own can't be sealed here: it needs Linux 6.3"
            raise SetupError("result", errno.EINVAL, why)
        mould = self._mould
        if mould is None or mould.spoiled or mould.profile is None:
            raise SpawnError("no mould was prepared for this attempt")
        if self._deadline_ns is not None and self._clock() >= self._deadline_ns:
            raise SpawnError("the lease of this node has run out")
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting.mould is not mould:
            waiting = Waiting.make(plan.attempt, mould)
        ends = Ends.make(plan, waiting.channel)
        try:
            attempt = self._sent(waiting, ends, plan, fds)
        except (OSError, CodecError) as error:
            attempt = self._attempt_of(waiting, ends, plan)
            ends.close_theirs()
            attempt.kill()
            await self._undo(attempt)
            # A mould that found something odd (attack 38) may be gone already, and its end of the channel with it.
            if waiting.name != plan.attempt or isinstance(error, BrokenPipeError):
                raise _NotStarted("the worker is gone before it had its plan") from error
            raise unsent("the plan can't be sent", error) from error
        try:
            await self._ready(attempt, ahead=waiting.name != plan.attempt)
        except BaseException as error:
            if not isinstance(error, SetupError | _NotStarted):
                attempt.kill()
            await self._undo(attempt)
            raise
        return attempt

    def _sent(self, waiting: Waiting, ends: Ends, plan: Plan, fds: Sequence[int]) -> Attempt:
        """Send the plan; from here on there is an attempt. Raises OSError, CodecError."""
        theirs = [ends.out[1], ends.err[1], *([] if ends.result is None else [ends.result]), *fds]
        record = frames.pack(Op.PLAN, dumps(plan))
        socket.send_fds(ends.channel[0], [record], theirs)
        waiting.mould.taught.sent(plan, record)
        ends.close_theirs()
        return self._hold(self._attempt_of(waiting, ends, plan))

    def _hold(self, attempt: Attempt) -> Attempt:
        self._attempt = attempt
        attempt.proved.add_done_callback(lambda _: self._free(attempt))
        return attempt

    def _attempt_of(self, waiting: Waiting, ends: Ends, plan: Plan) -> Attempt:
        ours = (ends.out[0], ends.err[0], ends.channel[0], ends.result)
        facts = (waiting.mould, self._group, ours, self._unproved, waiting.name)
        attempt = ReusedAttempt(*facts, self.keeper) if plan.reuse else Attempt(*facts)
        attempt.pids = plan.pids
        return attempt

    async def _ready(self, attempt: Attempt, *, ahead: bool) -> None:
        try:
            async with asyncio.timeout(SETUP_TIMEOUT_S):
                data, fds = await first_record(attempt.channel)
            attempt.disks, attempt.seat = attempt.disks or fds[: disks.MOST], fds[disks.MOST :]
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
            raise setup_error(body)
        verdict = await attempt.verdict
        # Its end may have come in the same moment, and its word have been read with that.
        problem = attempt.unready(verdict)
        if attempt.heard:
            return
        if isinstance(problem, SetupError):
            raise problem
        if verdict.kind == "worker_died" or ahead:
            raise _NotStarted(f"the mould or a worker that was forked ahead ended first ({verdict.kind})")
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

    def _set_limits(self, plan: Plan) -> None:
        """Write the totals and start counting. Raises LimitBusy, GroupError."""
        if self._group is None:
            if plan.memory_bytes is not None or plan.cpus is not None:
                raise GroupError("no cgroup here, so a memory or cpu total can't be enforced")
            return
        self._group.set_limits(pids=plan.pids, memory_bytes=plan.memory_bytes, cpus=plan.cpus)
        self._group.reset()

    async def _limit(self, plan: Plan) -> None:
        try:
            self._set_limits(plan)
        except LimitBusy:
            profile = self._mould.profile if self._mould is not None else None
            await self._drop()
            if self._group is not None:
                self._group.renew()
            await self._replace(profile)
            self._set_limits(plan)

    async def _replace(self, profile: Profile | None = None) -> None:
        await self._drop()
        if self._closed:
            raise SpawnError("the slot is closed")
        if not self.healthy:
            raise SpawnError("the slot waits for the proof of its last kill")
        join, job_fd = (self._group.join_paths, self._group.job_fd) if self._group is not None else ((), None)
        self._mould = await self._zygote.mould(join, job_fd, self._deadline_ns, tuple(self._paths))
        self._mould.profile = profile
        if self._deadline_ns is not None:
            # It may have been renewed while the mould was made.
            self._mould.renew(self._deadline_ns)

    async def _drop(self) -> None:
        """End the mould, if one stands, and wait for its proof."""
        mould, self._mould = self._mould, None
        self._forget_waiting()
        if mould is None:
            return
        mould.kill()
        if not mould.gone.done():
            await asyncio.wait([mould.gone], timeout=PROOF_TIMEOUT_S)
        if not mould.gone.done():
            self._mould = mould
            self.healthy = False
            raise SpawnError("the slot's old mould is not proved gone")
        self._zygote.forget(mould)

    def _free(self, attempt: Attempt) -> None:
        """The attempt is proved gone: the slot may take the next one, in a new mould if this one was spoiled."""
        if self._attempt is attempt:
            self._attempt = None
            self._fork_ahead()
        if not self.healthy:
            self.healthy = True
            if self.proved is not None and not self.proved.done():
                self.proved.set_result(None)
        mould = self._mould
        if mould is not None and mould.profile is not None and mould.profile.net:
            mould.spoiled = True  # never fit again (see _fits): the next one is made while nobody waits for it
        if mould is not None and mould.spoiled and not self._closed and not self._lock.locked():
            self._ahead = asyncio.get_running_loop().create_task(self._renew_ahead())

    def _fork_ahead(self) -> None:
        """Have the next worker forked while nobody waits for it: the last attempt is proved gone, no job runs.

        It knows nothing yet. A plan for another profile never reaches it, because that replaces the mould.
        """
        mould = self._mould
        if self._closed or mould is None or mould.spoiled or mould.profile is None or not _fits(mould, mould.profile):
            return
        if self.keeper.holds:
            return
        with suppress(SpawnError):
            self._waiting = Waiting.make(f"ahead.{mould.served}", mould)
            mould.on_end = lambda _: self._forget_waiting()

    def _forget_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.channel[0].close()

    def _unproved(self) -> None:
        self.healthy = False
        self.proved = asyncio.get_running_loop().create_future()

    async def _renew_ahead(self) -> None:
        """Build the next mould while nobody waits for it; ``prepare`` tries again, and tells, if this fails."""
        async with self._lock:
            if self._mould is not None and self._mould.spoiled and self._attempt is None:
                with suppress(SpawnError):
                    await self._replace()


def _fits(mould: Mould, profile: Profile) -> bool:
    age_s = asyncio.get_running_loop().time() - mould.born_s
    if mould.spoiled or mould.served >= MOST_ATTEMPTS or age_s >= LONGEST_LIFE_S:
        return False
    if mould.profile is None:
        return True
    # What a job's connections leave in the net namespace (TIME_WAIT) is no other attempt's business.
    return mould.profile == profile and not profile.fresh and not profile.secrets and not profile.net
