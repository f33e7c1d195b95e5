"""A worker that runs one attempt after the other (``reuse=N``): its attempts, and its wait between two of them.

Called by the slot (owns a Keeper, makes the attempts) and the supervisor (asks for the next). Must never keep a worker
after anything but a plain end, never believe the worker that its files are gone, and never let it wait for long: what
it does meanwhile has no time limit of its own.

Why there is nothing to sweep between two attempts: the worker's seccomp filter (seccomp.build, ``alone``) knows no call
that makes a process or a thread, or that puts another program in its place. It is alone by construction, and what it
wrote is counted by the kernel in the file systems that only it has.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from node_agent.containment import closing
from node_agent.containment.attempts import PROOF_TIMEOUT_S, Attempt
from node_agent.containment.cgroup import SlotGroup
from node_agent.containment.ends import Ends
from node_agent.containment.errors import SetupError, SpawnError
from node_agent.containment.freezing import FREEZE_TIMEOUT_S, Still
from node_agent.containment.moulds import Mould
from node_agent.containment.orders import End
from node_agent.containment.plan import Plan, Verdict
from runner.wire import frames
from runner.wire.frames import Op

__all__ = ["IDLE_S", "LONGEST_LIFE_S", "Keeper", "ReusedAttempt", "Terms"]

#: A worker without a next attempt for so long is ended.
IDLE_S: Final = 1.0
LONGEST_LIFE_S: Final = 300.0
#: How long a worker may take to leave, and to take its next attempt.
_LEAVE_S: Final = 0.25
_ANSWER_S: Final = 5.0
#: So long nothing is heard of a job that asked for sessions more often than it may.
_REST_S: Final = 0.05
#: More than any word of a worker has.
_WORD_BYTES: Final = 64
_RUNNING: Final = frames.pack(Op.RUNNING)
_OPEN: Final = frames.pack(Op.OPEN)


@dataclass(frozen=True, slots=True)
class Terms:
    """What two attempts must share to run in one worker. ``most``: attempts that one worker runs."""

    key: Hashable
    most: int


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker over all of its attempts. ``clean``: how its file systems were before the first one."""

    mould: Mould
    channel: socket.socket
    name: str
    terms: Terms
    release: Callable[[], None]
    uid: int
    gid: int
    disks: tuple[int, ...]
    clean: tuple[tuple[int, ...], ...]
    born_s: float
    served: int = 1

    def tidy(self) -> bool:
        """Whether the kernel counts no file and no block more than at the start, and the folders are as they were."""
        return _counted(self.disks) == self.clean

    def close(self) -> None:
        """It is proved gone: give everything back."""
        closing.away((), self.disks, self.channel)
        self.disks = ()
        self.release()


class ReusedAttempt(Attempt):
    """One attempt in a worker that may run others before and after it.

    It ends with the worker, proved as ever; or, where it is to be kept, with the worker's word, told for this turn.
    """

    def __init__(
        self,
        mould: Mould,
        group: SlotGroup | None,
        ends: tuple[int, int, socket.socket, int | None],
        on_unproved: Callable[[], None],
        name: str,
        keeper: Keeper,
    ) -> None:
        super().__init__(mould, group, ends, on_unproved, name)
        self._keeper = keeper
        self._own = mould
        self._turn = b""
        self._worker: _Worker | None = None
        self._passed_on = False
        self._running = False
        self._listens = False
        self.proved.add_done_callback(lambda _: self._give_back())

    def keep(self, terms: Terms, release: Callable[[], None], uid: int, gid: int) -> None:
        """Let the worker run further attempts on these terms. Before the release of its first one.

        ``release``: frees what the worker holds on the host; called once it is proved gone.
        """
        self._worker = _Worker(
            mould=self._own,
            channel=self.channel,
            name=self._name,
            terms=terms,
            release=release,
            uid=uid,
            gid=gid,
            disks=self.disks,
            clean=_counted(self.disks),
            born_s=self._loop.time(),
        )

    def follow(self, worker: _Worker, turn: bytes) -> None:
        """Run in ``worker``, which was told of this turn."""
        self._worker, self._turn, self.disks = worker, turn, worker.disks
        worker.served += 1
        self._listen()
        self._timers["setup"] = self._loop.call_later(_ANSWER_S, self._late)

    async def release(self, payload: bytes) -> None:
        """Send the payload, and hear from now on what the worker says."""
        if self._worker is not None:
            self._listen()
        await super().release(payload)
        if self._worker is None:
            self._dismiss()

    def unready(self, verdict: Verdict) -> SetupError | SpawnError | None:
        """Return SpawnError if the worker ended before it took this attempt: another one may be tried."""
        if self._hear() or (self.forced and not self._overdue):
            return None
        return SpawnError(f"the reused worker ended before it took the attempt ({verdict.kind})")

    def tell(self, number: int) -> None:
        """Send a signal; whatever comes of it, this attempt is the worker's last."""
        self._dismiss()
        super().tell(number)

    async def freeze(self, frozen: bool, timeout_s: float = FREEZE_TIMEOUT_S) -> Still:
        """Let it stand still, or go on; this attempt is the worker's last."""
        self._dismiss()
        return await super().freeze(frozen, timeout_s)

    def listens_itself(self) -> bool:
        """It hears the worker's words; one that is its last attempt is given no session any more."""
        return True

    def kill(self) -> None:
        """Kill the worker with everything of it."""
        self._deaf()
        super().kill()

    def close(self) -> None:
        """Give back what is this attempt's own; a worker that was kept goes on with the rest. Idempotent."""
        self._deaf()
        if not self._passed_on:
            super().close()
        elif self._result_fd is not None:
            os.close(self._result_fd)
            self._result_fd = None

    def _hear(self) -> bool:
        if self._turn and not self.heard:
            self._words()
        return self.heard

    def _listen(self) -> None:
        if not self.verdict.done():
            self._loop.add_reader(self.channel.fileno(), self._words)
            self._listens = True

    def _rest(self) -> None:
        """Hear no word for a moment: a job that asks without end must not have the loop for it (attack 41)."""
        self._deaf()
        self._timers["words"] = self._loop.call_later(_REST_S, self._listen)

    def _deaf(self) -> None:
        if (timer := self._timers.pop("words", None)) is not None:
            timer.cancel()
        if self._listens:
            self._loop.remove_reader(self.channel.fileno())
            self._listens = False

    def _dismiss(self) -> None:
        """Let the worker leave after this attempt: its next word for it is the end of the channel."""
        self._deaf()
        if not self.verdict.done():
            with suppress(OSError):
                self.channel.shutdown(socket.SHUT_WR)

    def _words(self) -> None:
        """Hear the worker. What is none of its words, each at its time, makes this attempt its last."""
        if self._passed_on:
            return
        try:
            word = self.channel.recv(_WORD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == _RUNNING and not self._running:
            self._running = self.heard = True
            if self._listens:
                self._words()
        elif self._running and len(word) > 1 and word[0] == Op.DONE and word[2:] == self._turn:
            self._done(word[1])
        elif self._running and word == _OPEN and self.on_open is not None:
            if self.on_open() is False:
                self._rest()
        else:
            self._dismiss()

    def _done(self, code: int) -> None:
        if self.verdict.done():
            return
        worker, events = self._worker, self._events()
        odd = events.oom_kills or events.pids_hits or code > 1
        if worker is None or odd or not self._may_keep(worker):
            self._dismiss()
            return
        self._deaf()
        self._passed_on = True
        self._resolve(Verdict(kind="exit", code=code, usage=self._usage(events, processes=1)))
        self._keeper.take(worker)

    def _may_keep(self, worker: _Worker) -> bool:
        return (
            not self.forced
            and worker.served < worker.terms.most
            and self._loop.time() - worker.born_s < LONGEST_LIFE_S
            and not worker.mould.spoiled
            and _silent(worker.channel)
            and worker.tidy()
        )

    def _give_back(self) -> None:
        if not self._passed_on and self._worker is not None:
            self._worker.release()


@dataclass(slots=True, eq=False)
class Keeper:
    """The worker of a slot that waits for its next attempt, if there is one. ``on_over``: it is proved gone."""

    on_over: Callable[[], None]
    _worker: _Worker | None = None
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)
    _over: asyncio.Future[None] | None = None

    @property
    def holds(self) -> bool:
        """Whether a worker waits, or was told to leave and is not proved gone."""
        return self._worker is not None

    def serves(self, terms: Terms) -> tuple[int, int] | None:
        """Return the uid and gid of the worker that waits for an attempt on these terms, if one does."""
        worker = self._worker
        fits = worker is not None and worker.terms == terms and self._over is None and not worker.mould.spoiled
        return (worker.uid, worker.gid) if worker is not None and fits else None

    def take(self, worker: _Worker) -> None:
        """Keep a worker whose attempt has ended."""
        self._worker = worker
        worker.mould.on_end, worker.mould.on_gone = self._ended, self._gone
        self._timers = [asyncio.get_running_loop().call_later(IDLE_S, self.dismiss)]
        if worker.mould.gone.done():
            self._gone()

    def follow(
        self, plan: Plan, group: SlotGroup | None, on_unproved: Callable[[], None], payload: bytes
    ) -> ReusedAttempt | None:
        """Hand the next attempt to the worker that waits; only after ``serves``. None: it takes none."""
        worker = self._worker
        if worker is None or not _silent(worker.channel) or not worker.tidy():
            return None
        turn = os.urandom(frames.TURN_BYTES)
        ends = Ends.make(plan, (worker.channel, worker.channel))
        theirs = [ends.out[1], ends.err[1], *([] if ends.result is None else [ends.result])]
        try:
            socket.send_fds(worker.channel, [frames.pack(Op.NEXT, turn + payload)], theirs)
        except OSError:
            for fd in (ends.out[0], ends.err[0], *theirs):
                os.close(fd)
            return None
        os.close(ends.out[1])
        os.close(ends.err[1])
        self._forget()
        ours = (ends.out[0], ends.err[0], worker.channel, ends.result)
        attempt = ReusedAttempt(worker.mould, group, ours, on_unproved, worker.name, self)
        attempt.pids = plan.pids
        attempt.follow(worker, turn)
        return attempt

    def dismiss(self) -> None:
        """Have the worker leave; one that stays is killed, and its mould with it. Idempotent."""
        worker = self._worker
        if worker is None or self._over is not None:
            return
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        with suppress(OSError):
            worker.channel.shutdown(socket.SHUT_WR)
        self._timers.append(loop.call_later(_LEAVE_S, self._strike))

    async def kill(self) -> None:
        """Kill the worker, with its mould, and wait for the proof; one that can't be proved gone keeps its mould."""
        self.dismiss()
        self._strike()
        if self._over is not None:
            await asyncio.wait([self._over], timeout=PROOF_TIMEOUT_S)

    async def end(self) -> None:
        """Have the worker leave, or kill it, and wait for the proof as in ``kill``."""
        self.dismiss()
        if self._over is not None:
            await asyncio.wait([self._over], timeout=PROOF_TIMEOUT_S)

    def _strike(self) -> None:
        if self._worker is not None:
            self._worker.mould.kill()

    def _ended(self, end: End) -> None:
        """The mould's word that its namespace holds nobody else."""
        if self._worker is None or end.attempt != self._worker.name:
            self._strike()
        else:
            self._gone()

    def _gone(self) -> None:
        worker, over = self._worker, self._over
        self._forget()
        if worker is not None:
            worker.close()
        if over is not None and not over.done():
            over.set_result(None)
        self.on_over()

    def _forget(self) -> None:
        worker, self._worker, self._over = self._worker, None, None
        for timer in self._timers:
            timer.cancel()
        self._timers = []
        if worker is not None:
            worker.mould.on_end = worker.mould.on_gone = None


def _silent(channel: socket.socket) -> bool:
    """Whether the worker has said nothing more: a word before its time would be taken for one of the next attempt."""
    try:
        channel.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _counted(fds: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return, of each file system, the inodes and blocks in use, and owner and mode of its folder."""
    found = []
    for fd in fds:
        sizes, folder = os.fstatvfs(fd), os.fstat(fd)
        used = (sizes.f_files - sizes.f_ffree, sizes.f_blocks - sizes.f_bfree)
        found.append((*used, folder.st_uid, folder.st_gid, folder.st_mode))
    return tuple(found)
