"""The turn loop: one script call per pass that finishes what is done, marks what started and claims for free slots.

Called by the session (one Dispatcher per boot) and the supervisor (hands in finishes and starts). Must never hold a
job's claim without either carrying it out or giving it back, and never send two turns at once.

A claim's path goes on in node_agent/supervisor.py, which asks node_agent/admission.py first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Protocol

from node_agent.errors import LeaseLostError, StoreAwayError
from node_agent.spread import spread
from node_agent.turns import Claim, Dead, Finish, FinishReply, Orphan, Start, StartReply, Turn, TurnReply
from runner.wire.states import State

__all__ = ["LOOK_S", "Crew", "Dispatcher", "TurnStore", "wake_loop"]

log = logging.getLogger(__name__)

#: First and longest wait after the store did not answer, in seconds.
BACKOFF_S: Final = (0.05, 2.0)
#: A start mark waits so long for the turn of another mark or end, in seconds: short jobs then take one turn, not two.
MARK_S: Final = 0.02
#: While more than CROWD other attempts run, turns follow each other at this distance, in seconds: the cores have work,
#: and one turn for several ends costs less than one each. A lone end, or one that somebody waits for, goes at once.
COMPANY_S: Final = 0.02
CROWD: Final = 1 + (os.cpu_count() or 1)
#: How often new lanes are looked for while the known ones hold work, in seconds.
LOOK_S: Final = 1.0


class TurnStore(Protocol):
    """What the loop needs of the store."""

    async def turn(self, turn: Turn) -> TurnReply:
        """Run one turn. Raises StoreAwayError."""


class Crew(Protocol):
    """Who carries claims out: the supervisor."""

    def take(self, claim: Claim) -> None:
        """Carry out a claim that has a slot; ends in ``Dispatcher.finish``."""

    def bury(self, dead: Dead) -> None:
        """End a claim that a kill hit before the start."""

    def lapse(self, claim: Claim) -> None:
        """End a claim whose time passed in the lane."""

    def inherit(self, orphan: Orphan) -> None:
        """End a started attempt that nobody carries on."""

    def held(self) -> tuple[str, ...]:
        """Every job that this boot knows to hold; the store hands out again what a lost answer left behind."""

    def finished(self, finish: Finish, reply: FinishReply) -> None:
        """The store's answer to a finish."""

    def marked(self, reply: StartReply) -> None:
        """The store's answer to a start mark."""


class Dispatcher:
    """Slots, pending finishes and starts of one boot.

    ``lanes``: the lanes to claim from, best first. ``fit``: whether this boot may run jobs now (its lease stands).
    ``learn`` gets every lane there is when a turn found new ones.
    """

    def __init__(
        self,
        store: TurnStore,
        slots: int,
        lanes: Callable[[], tuple[str, ...]],
        lost: Callable[[], None],
        fit: Callable[[], bool] = lambda: True,
        learn: Callable[[Sequence[str]], object] = lambda _: None,
    ) -> None:
        self._store = store
        self._free = set(range(slots))
        self._slots = slots
        self._lanes = lanes
        self._lost = lost
        self._fit = fit
        self._learn = learn
        self._finishes: list[Finish] = []
        self._starts: list[Start] = []
        self._stirred = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._sent_s = 0.0
        self._work = True
        #: Set while the last turn found the lanes empty; and while a slot is free.
        self.dry = asyncio.Event()
        self.room = asyncio.Event()
        self._note_room()
        self._claiming = True
        #: Whether to claim one job at a time.
        self.sparing: Callable[[], bool] = lambda: False
        #: Gets the lanes that gave claims; and whether lanes are left that no turn has looked into since the last look.
        self.found: Callable[[Iterable[str]], object] = lambda _: None
        self.unseen: Callable[[], bool] = lambda: False
        #: A turn is under way whose claims are not known yet.
        self.turning = False
        self._crew: Crew | None = None

    @property
    def busy(self) -> int:
        """Slots that hold a claim."""
        return self._slots - len(self._free)

    def serve(self, crew: Crew) -> None:
        """Name the crew; once, before ``run``."""
        self._crew = crew

    def wake(self) -> None:
        """There may be work in a lane."""
        self._work = True
        self.dry.clear()
        self._stirred.set()

    def stop_claiming(self) -> None:
        """Take no more work; finishes still go out."""
        self._claiming = False

    def finish(self, finish: Finish, *, free_slot: bool = True) -> None:
        """Hand in an end, a retry or a release; its slot is free for the same turn's claims."""
        self._finishes.append(finish)
        if free_slot and finish.claim.slot is not None:
            self._free.add(finish.claim.slot)
            self.room.set()
        if self.busy > CROWD and finish.state is not State.KILLED:
            self._stir_at(self._sent_s + COMPANY_S)
        else:
            self._stirred.set()

    def mark(self, start: Start, *, urgent: bool = False) -> None:
        """Hand in a start mark; it waits a moment for company unless it is ``urgent`` (somebody waits for it)."""
        self._starts.append(start)
        if urgent:
            self._stirred.set()
        else:
            self._stir_at(asyncio.get_running_loop().time() + MARK_S)

    async def run(self) -> None:
        """Turn until cancelled. Raises LeaseLostError when this boot has no lease any more."""
        wait_s = BACKOFF_S[0]
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            self._disarm()
            turn = self._next()
            if turn is None:
                continue
            self._sent_s = asyncio.get_running_loop().time()
            self.turning = True
            try:
                reply = await self._store.turn(turn)
            except StoreAwayError as error:
                self.turning = False
                log.warning("turn failed, the store is away", extra={"error": str(error), "wait_s": wait_s})
                self._put_back(turn)
                await asyncio.sleep(spread(wait_s))
                wait_s = min(2 * wait_s, BACKOFF_S[1])
                self._stirred.set()
                continue
            wait_s = BACKOFF_S[0]
            self._apply(turn, reply)
            self.turning = False

    async def flush(self, timeout_s: float) -> bool:
        """Wait until every finish was sent, at most ``timeout_s``; return whether that is so."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._finishes:
                    self._stirred.set()
                    await asyncio.sleep(0.01)
        return not self._finishes

    def _stir_at(self, due_s: float) -> None:
        """Have the next turn not later than ``due_s``, by the loop's clock."""
        if self._stirred.is_set() or (self._timer is not None and self._timer.when() <= due_s):
            return
        self._disarm()
        self._timer = asyncio.get_running_loop().call_at(due_s, self._stirred.set)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self) -> Turn | None:
        finishes, self._finishes = self._finishes, []
        ended = {(finish.claim.job, finish.claim.attempt) for finish in finishes}
        # A job that ended meanwhile still gets its mark and job.started event, but nobody has to see it killing.
        starts = [
            start
            for start in self._starts
            if start.state is State.RUNNING or (start.claim.job, start.claim.attempt) not in ended
        ]
        self._starts = []
        free: tuple[int, ...] = ()
        if self._claiming and (self._work or finishes) and self._free and self._fit():
            free = tuple(sorted(self._free))
            if self.sparing():
                free = free[:1]
        if not (finishes or starts or free):
            return None
        lanes = self._lanes() if free else ()
        return Turn(tuple(finishes), tuple(starts), free, lanes, held=self._need_crew().held())

    def _put_back(self, turn: Turn) -> None:
        self._finishes[:0] = turn.finishes
        self._starts[:0] = turn.starts

    def _apply(self, turn: Turn, reply: TurnReply) -> None:
        crew = self._need_crew()
        if reply.lanes:
            self._learn(reply.lanes)
        self._note_work(turn, reply)
        self._free -= {claim.slot for claim in reply.claims}
        self._note_room()
        for finish, answer in zip(turn.finishes, reply.finishes, strict=True):
            crew.finished(finish, answer)
        for mark in reply.starts:
            crew.marked(mark)
        for claim in reply.claims:
            crew.take(claim)
        for dead in reply.dead:
            crew.bury(dead)
        for claim in reply.expired:
            crew.lapse(claim)
        for orphan in reply.orphans:
            crew.inherit(orphan)
        if reply.lost:
            self._lost()
            raise LeaseLostError("the store knows no lease of this agent start")
        # What became free meanwhile has its own time: an end that came during the turn waits for company, too.
        if self._work and not self._free.isdisjoint(turn.free):
            self._stirred.set()

    def _note_room(self) -> None:
        if self._free:
            self.room.set()
        else:
            self.room.clear()

    def _note_work(self, turn: Turn, reply: TurnReply) -> None:
        if turn.free:
            self.found(claim.lane for claim in reply.claims)
            self._work = reply.more or self.unseen()
            if not self._work:
                self.dry.set()

    def _need_crew(self) -> Crew:
        if self._crew is None:
            raise LeaseLostError("no crew serves this dispatcher")
        return self._crew


async def wake_loop(wait: Callable[[bool], Awaitable[None]], dispatcher: Dispatcher) -> None:
    """Wake the dispatcher whenever ``wait`` returns: when a lane got work, and about once a second in any case.

    ``wait(idle)`` looks for new lanes; it blocks until one gets work only if ``idle``. Raises StoreAwayError.
    """
    delay_s = BACKOFF_S[0]
    dispatcher.wake()  # what waited for this agent's start is not left to wait for a first look
    while True:
        # While the lanes are known to hold work, each turn looks anyway: no wake-up has to be fetched for it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await dispatcher.dry.wait()
        try:
            await wait(dispatcher.dry.is_set())
        except StoreAwayError:
            await asyncio.sleep(spread(delay_s))
            delay_s = min(2 * delay_s, BACKOFF_S[1])
            continue
        delay_s = BACKOFF_S[0]
        dispatcher.wake()
