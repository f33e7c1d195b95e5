"""Pause and resume of what runs on this node: the freeze, the clock, the shown state and the event, in one order.

Called by control (orders from afar), the disk watch and the kill of many. Must never show a job as paused before
nothing of it runs, and never let one go on that somebody else still holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from node_agent.containment.errors import ContainmentError
from node_agent.containment.freezing import Still
from node_agent.records import Notary, Signed
from node_agent.run import Run, Tree, now_ms
from runner.wire.event import EventType
from runner.wire.receipt import PauseReceipt
from runner.wire.states import State

__all__ = ["Holder", "Order", "Pauser", "still_all"]

#: Who holds a job. Each lifts its own hold alone, but for an operator, who lifts them all.
Holder = Literal["operator", "owner", "disk", "approval", "budget", "watch", "loop", "drift", "signal"]
#: Holds that a job can bring about: its time limit goes on, or it could keep its slot until its not_after.
_TIMED: Final[frozenset[Holder]] = frozenset({"watch", "loop", "drift"})
#: Stores an event in a job's own stream: job, attempt, type, detail.
Told = Callable[[str, int, EventType, dict[str, str | int | float | bool]], object]
#: How long a kill of many waits for the freeze that comes before it, in seconds: then it goes on without.
KILL_FREEZE_S: Final = 0.25
#: How long a pause waits for a claimed job to start, in seconds.
START_WAIT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Order:
    """One pause or resume. ``command`` is empty for the node's own."""

    op: Literal["pause", "resume"]
    holder: Holder
    command: str = ""
    reason: str = ""
    by: str = ""


class Emits(Protocol):
    """Where a pause's events go."""

    def emit(self, tenant: str | None, event: Signed, /) -> None:
        """Store an event soon; never blocks, never raises."""


class Pauser:
    """Pauses for one boot."""

    def __init__(self, notary: Notary, desk: Emits, told: Told | None = None) -> None:
        """``told``: where pauses that jobs ordered are told, an event of the job's own stream."""
        self._notary = notary
        self._desk = desk
        self._told = told

    async def carry_out(self, run: Run, order: Order, *, act: bool = True) -> PauseReceipt:
        """Carry out an order for one attempt and return the signed answer; without ``act`` only say how it stands."""
        began_s = asyncio.get_running_loop().time()
        await _started(run)
        async with run.holding:
            if run.stopping or run.proved.done() or run.tree is None or run.started_at_ms is None:
                return self._ended(run, order)
            recorded = not act or self._recorded(run, order)
            if not act:
                still = Still(True, 0, "none")
            elif order.op == "resume" and not recorded:
                # To stand still is the safe side: a job goes on by what is in the record alone.
                still = Still(False, 0, "none")
            elif order.op == "pause":
                still = await self._pause(run, run.tree, order)
            else:
                still = await self._resume(run, run.tree, order)
            return self._answer(run, order, still, (asyncio.get_running_loop().time() - began_s) * 1000)

    def _recorded(self, run: Run, order: Order) -> bool:
        witness = self._notary.witness
        return witness is None or witness.held(run, order.op, order.holder, order.command, order.by, order.reason)

    async def _pause(self, run: Run, tree: Tree, order: Order) -> Still:
        first = not run.holders
        run.holders.add(order.holder)
        try:
            still = await tree.freeze(True)
            await run.still(True)
        except ContainmentError:
            run.holders.discard(order.holder)
            return Still(False, 0, "none")
        if order.holder not in _TIMED and not run.stopping:
            self._stop_clock(run)
        if first and not run.stopping:
            self._show(run, order, State.PAUSED, still)
        return still

    async def _resume(self, run: Run, tree: Tree, order: Order) -> Still:
        if not run.holders:
            return Still(True, 0, "none")
        if order.holder == "operator":
            run.holders.clear()
        run.holders.discard(order.holder)
        if run.holders:
            return Still(False, 0, "none")
        with suppress(ContainmentError):
            still = await tree.freeze(False)
            await run.still(False)
            if run.wall is not None:
                run.wall.resume()
            if not run.stopping:
                self._show(run, order, State.RUNNING, still)
            return still
        return Still(False, 0, "none")

    def _stop_clock(self, run: Run) -> None:
        if run.wall is not None and run.spec is not None:
            run.wall.pause((run.spec.not_after_ms - now_ms()) / 1000, lambda: run.stop("pause_limit"))

    def _show(self, run: Run, order: Order, state: State, still: Still) -> None:
        if run.show is not None:
            run.show(state)
        kind = EventType.JOB_PAUSED if state is State.PAUSED else EventType.JOB_RESUMED
        detail: dict[str, str | int | float | bool] = {"by": order.by, "reason": order.reason}
        if state is State.PAUSED:
            detail |= {"processes": still.processes, "method": still.method, "still": still.done}
        if order.holder == "watch" and self._told is not None:
            # What jobs can cause at will goes to the stream of the job that it hit (attack 32).
            self._told(run.job_id, run.attempt, kind, detail)
            return
        event = self._notary.event(kind, job=run.job_id, attempt=run.attempt, detail=detail)
        self._desk.emit(run.spec.tenant if run.spec is not None else None, event)

    def _answer(self, run: Run, order: Order, still: Still, took_ms: float) -> PauseReceipt:
        state = State.PAUSED if run.holders else State.RUNNING
        outcome, reason = ("paused" if order.op == "pause" else "resumed"), order.reason
        if order.op == "resume" and run.holders:
            outcome, reason = (
                "refused",
                f"still held by: {', '.join(sorted(run.holders))}; a key that may operate lifts it",
            )
        elif order.op == "pause" and not run.holders:
            outcome, reason = "refused", "this node can't pause it: no cgroup v2 freezer and no pid namespace"
        elif not still.done:
            outcome, reason = "unconfirmed", "a process stands in the kernel; it stops before it runs any code again"
        return self._notary.pause_receipt(
            run.job_id,
            order.command,
            order.op,
            outcome,
            state=state,
            attempt=run.attempt,
            processes=still.processes,
            method=still.method,
            took_ms=took_ms,
            reason=reason,
            by=order.by,
        )

    def _ended(self, run: Run, order: Order) -> PauseReceipt:
        ending = run.proof.ending.state if run.proof is not None else None
        outcome = "already_ended" if ending is not None else "not_running"
        state = ending or (State.KILLING if run.stopping else State.CLAIMED)
        return self._notary.pause_receipt(
            run.job_id, order.command, order.op, outcome, state=state, attempt=run.attempt, by=order.by
        )


async def still_all(runs: Iterable[Run]) -> None:
    """Freeze many at once, before they are killed, so that none can react to another's end; waits a moment at most."""
    trees = [run.tree for run in runs if run.tree is not None and not run.stopping]
    if len(trees) > 1:
        await asyncio.gather(*(tree.freeze(True, KILL_FREEZE_S) for tree in trees), return_exceptions=True)


async def _started(run: Run) -> None:
    """Wait a moment for a job that was claimed just now."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_WAIT_S
    while run.started_at_ms is None and not run.stopping and not run.proved.done() and loop.time() < deadline:
        await asyncio.sleep(0.005)
