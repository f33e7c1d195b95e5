"""Port: runner.scripts. Every attempt that this boot holds, from its claim to its acknowledged end; and the ends of
jobs that never run here.

Called by the supervisor, which carries claims out on top of it, the dispatcher (answers), control and the local socket
(kills). Must never forget a job before the store has acknowledged its end, and never write two ends for one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from node_agent import endings, lifecycle
from node_agent.admission import Admitted, Denial, Offer, Rules, admit
from node_agent.containment.lower.slots import LowSlot
from node_agent.containment.slots import Slot
from node_agent.containment.sweep import Journal
from node_agent.dispatch import BACKOFF_S, Dispatcher
from node_agent.endings import Evidence
from node_agent.errors import StoreAwayError
from node_agent.kernel.desk import Desk as KernelDesk
from node_agent.kernel.errors import CallError
from node_agent.kernel.family import Family, order_of
from node_agent.kernel.witness import Witness
from node_agent.ledger import Ledger
from node_agent.lifecycle import Ending
from node_agent.placing import Placing
from node_agent.records import Notary
from node_agent.run import KillOrder, Proof, Run, now_ms
from node_agent.sandbox import Defaults
from node_agent.spread import spread
from node_agent.stage import Stage
from node_agent.telling import Desk
from node_agent.turns import Claim, Dead, Finish, FinishReply, KillWord, Orphan, Start, StartReply
from runner.scripts import payload
from runner.wire import spec as specs
from runner.wire.errors import WireError
from runner.wire.event import EventType
from runner.wire.spec import JobSpec
from runner.wire.states import NODE_LOST, POISON, RefuseReason, State

__all__ = ["Desk", "Runs", "Tools"]

log = logging.getLogger(__name__)

#: As turn.lua counts.
_CRASHES: Final = 3


@dataclass(frozen=True, slots=True)
class Tools:
    """What a supervisor works with; one set per boot."""

    rules: Rules
    defaults: Defaults
    notary: Notary
    ledger: Ledger
    stage: Stage
    desk: Desk
    slots: Mapping[int, Slot | LowSlot]
    journal: Journal
    #: See Lease.era.
    era: Callable[[], int]
    #: The kill that a cutoff holds for these selectors of the signed envelope, if any.
    cutoff: Callable[[str, int, Sequence[str]], KillWord | None]
    #: Whether this node may sign for a lane's jobs.
    serves: Callable[[str], bool]
    #: Looks at the jobs that one waited for: the job with their results in its arguments, or why it must not run.
    settle: Callable[[JobSpec], Awaitable[JobSpec | Denial]]
    #: Who records and counts what happens; None: nobody (tests).
    witness: Witness | None = None
    #: What running jobs may ask for; None: no calls.
    kernel: KernelDesk | None = None
    #: What jobs may ask for together.
    placing: Placing = field(default_factory=Placing)
    #: Called when the node's own disk took no more.
    no_room: Callable[[], None] = lambda: None


class Runs:
    """Every attempt of one boot, and what the store says of it."""

    def __init__(self, tools: Tools, dispatcher: Dispatcher) -> None:
        self._tools = tools
        self._dispatcher = dispatcher
        self._runs: dict[str, Run] = {}
        self._unproved: set[int] = set()

    @property
    def healthy(self) -> bool:
        """False while a kill of this node is not proved."""
        return not self._unproved

    @property
    def family(self) -> Family | None:
        """The ties between jobs, where jobs may start others."""
        return None if self._tools.kernel is None else self._tools.kernel.family

    def runs(self) -> tuple[Run, ...]:
        """Every attempt that this boot holds now."""
        return tuple(self._runs.values())

    def find(self, job_id: str) -> Run | None:
        """Return the attempt of a job that this boot holds."""
        return self._runs.get(job_id)

    def held(self) -> tuple[str, ...]:
        """Every job that this boot knows to hold, until the store has acknowledged its end."""
        return tuple(self._runs)

    def bury(self, dead: Dead) -> None:
        """End a claim that a kill hit before the start, and answer the kill."""
        run = self._open(dead.claim)
        run.kill(endings.order_of(dead.word))
        self._close_unstarted(dead.claim, run, Ending(State.KILLED, "kill"), dead.word)

    def lapse(self, claim: Claim) -> None:
        """End a claim whose time passed in the lane; only the signed envelope may say so."""
        run = self._open(claim)
        admitted = self._admit(claim, run)
        if run.spec is not None and now_ms() > run.spec.not_after_ms:
            ending = Ending(State.EXPIRED, "not_after", detail="the job was not started before its not_after")
        elif isinstance(admitted, Denial):
            ending = endings.denied(admitted)
        else:
            ending = Ending(
                State.REFUSED, RefuseReason.BAD_HASH, 125, detail="the stored not_after is not the signed one"
            )
        self._close_unstarted(claim, run, ending, None)

    def inherit(self, orphan: Orphan) -> None:
        """End, or give a next attempt to, a started attempt of an agent start that is no more."""
        claim, node, word = orphan.claim, orphan.node, orphan.word
        run = self._open(claim)
        self._admit(claim, run)
        run.started_at_ms = now_ms()
        ending = Ending(State.LOST, NODE_LOST, detail=f"node {node} was lost while the job ran")
        if word is not None:
            run.kill(endings.order_of(word))
        # Of a job that this node could not have run, readers believe it the loss alone (attack 3).
        if word is not None and self._tools.serves(claim.lane):
            ending = Ending(State.KILLED, "kill", detail=f"node {node} was lost after the kill was requested")
        run.settle(Proof(ending, None, now_ms()))
        self._dispatcher.finish(endings.finish_of(claim, run, ending, self._tools.notary), free_slot=False)
        if word is not None:
            self._tools.desk.answer(run, run.orders[-1])

    async def relieve(self) -> None:
        """The kernel passes no more descriptors for this user: kill the job with most sockets, and wait for its proof.

        Attack 34: at level B a job that leaves descriptors in flight would else keep every other one from starting.
        """
        trees = [(run.tree.sockets(), run) for run in self.runs() if run.tree is not None and not run.stopping]
        if not trees:
            return
        count, worst = max(trees, key=lambda pair: pair[0])
        node = self._tools.notary.node
        why = f"too many descriptors in flight on node {node}, and this job holds most sockets ({count})"
        detail: dict[str, str | int | float | bool] = {"what": "descriptors in flight", "sockets": count}
        self._tools.desk.emit(None, self._tools.notary.event(EventType.NODE_DEGRADED, detail=detail))
        worst.kill(KillOrder("", now_ms(), reason=why, by=f"node {node}"))
        await asyncio.shield(worst.proved)

    def stop_all(self, cause: lifecycle.Cause) -> None:
        """End every attempt for the node's own reason."""
        for run in self.runs():
            run.stop(cause)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every attempt is settled; return whether that is so."""
        pending = [run.proved for run in self.runs()]
        if pending:
            await asyncio.wait(pending, timeout=timeout_s)
        return all(future.done() for future in pending)

    def finished(self, finish: Finish, reply: FinishReply) -> None:
        """The store's answer to a finish: acknowledged, stale, or overruled by a kill."""
        run = self._runs.get(finish.claim.job)
        if run is None or (run.attempt, run.slot) != (finish.claim.attempt, finish.claim.slot):
            return
        if reply.result == "killed" and reply.word is not None:
            run.kill(endings.order_of(reply.word))
            ending = Ending(State.KILLED, "kill", detail="killed before its next attempt")
            run.settle(Proof(ending, None, now_ms()))
            self._dispatcher.finish(endings.finish_of(finish.claim, run, ending, self._tools.notary), free_slot=False)
            self._tools.desk.answer(run, run.orders[-1])
            return
        if reply.result == "poison":
            # Of a job that this node could not have run, readers believe it the loss alone (attack 3).
            detail = f"{_CRASHES} nodes were lost while they ran the job; it is not tried again"
            ending = Ending(State.LOST, POISON, detail=detail)
            run.settle(Proof(ending, None, now_ms()))
            self._dispatcher.finish(endings.finish_of(finish.claim, run, ending, self._tools.notary), free_slot=False)
            return
        del self._runs[finish.claim.job]
        if self._tools.witness is not None:
            self._tools.witness.ended(finish, taken=reply.result == "done")
        if reply.result == "done" and finish.state is State.KILLED and self.family is not None:
            self.family.killed(run)
        if reply.result == "done" and run.spec is not None and run.started_at_ms is not None:
            self._ended(run.spec, finish.claim.attempt)
        if not run.acknowledged.done():
            run.acknowledged.set_result(reply.result == "done")

    def _ended(self, spec: JobSpec, attempt: int) -> None:
        try:
            self._tools.ledger.ended(spec.nonce, attempt, spec.not_after_ms)
        except OSError as error:
            # The attempt stays one that was started: whoever hands it out again is told that it is lost.
            log.warning("the ledger can't be written", extra={"error": str(error)})
            self._tools.no_room()

    def _overruled(self, run: Run, ending: Ending, evidence: Evidence) -> Ending:
        """A kill that came while its attempt ended by itself still wins over the next one: the job was killed."""
        if not run.orders or endings.retry_ms(run, ending, run.attempt, evidence) is None:
            return ending
        ending = Ending(State.KILLED, "kill", detail="killed before its next attempt")
        run.settle(Proof(ending, evidence.verdict, now_ms()))
        return ending

    def marked(self, reply: StartReply) -> None:
        """The store's answer to a start mark: a stale one is killed, and so is one that a tombstone waits for."""
        run = self._runs.get(reply.job)
        if run is None or run.attempt != reply.attempt:
            return
        if reply.result == "stale":
            run.stop("lease")
        elif reply.word is not None:
            run.kill(endings.order_of(reply.word))
        if not run.marked.done():
            run.marked.set_result(reply.result == "done")

    def _open(self, claim: Claim) -> Run:
        run = Run(claim.job, claim.attempt, claim.slot, claim.seq)
        run.on_kill = lambda: self._show_killing(claim, run)
        run.show = lambda state: self._dispatcher.mark(Start(claim, state))
        if (witness := self._tools.witness) is not None:
            run.on_order = lambda order: witness.ordered(claim.job, claim.attempt, order)
        older = self._runs.get(claim.job)
        if older is not None and not older.acknowledged.done():
            # The store gave the job out anew, so it has written the older attempt's finish.
            older.acknowledged.set_result(True)
        self._runs[claim.job] = run
        return run

    def _show_killing(self, claim: Claim, run: Run) -> None:
        if run.started_at_ms is not None and not run.proved.done():
            self._dispatcher.mark(Start(claim, State.KILLING))

    def _close_unstarted(self, claim: Claim, run: Run, ending: Ending, word: KillWord | None) -> None:
        run.settle(Proof(ending, None, now_ms()))
        self._dispatcher.finish(endings.finish_of(claim, run, ending, self._tools.notary))
        if word is not None:
            self._tools.desk.answer(run, endings.order_of(word))

    async def _settled(self, run: Run, spec: JobSpec) -> JobSpec | Ending:
        """Look at the jobs above it and at those that it waited for.

        While the store is away, wait for it or for the run's own end.
        """
        wait_s = BACKOFF_S[0]
        if spec.ancestors and await self._killed_above(run, spec):
            return Ending(State.KILLED, "kill")
        while not run.stopping:
            try:
                found = await self._tools.settle(spec)
                return endings.denied(found) if isinstance(found, Denial) else found
            except StoreAwayError:
                await asyncio.sleep(spread(wait_s))
                wait_s = min(2 * wait_s, BACKOFF_S[1])
        why = "ended before the jobs that it waited for were looked at"
        return endings.denied(Denial(RefuseReason.DEPENDENCY_FAILED, why, spec))

    async def _killed_above(self, run: Run, spec: JobSpec) -> bool:
        """Whether a job above this one was killed: then this one is, too."""
        job = "" if self.family is None else await self.family.killed_above(spec, lambda: run.stopping)
        if job:
            run.kill(order_of(job))
        return bool(job)

    def _recorded(self, claim: Claim, run: Run, admitted: Admitted) -> bool:
        """Record that the attempt is let in; without a record it goes back to its lane, and none other is taken."""
        witness, policy = self._tools.witness, self._tools.rules.policy
        try:
            if witness is not None:
                rule, signer = admitted.rule, admitted.signer
                witness.admitted(admitted.spec, claim.attempt, signer=signer, rule=rule, policy=policy.version)
        except CallError:
            run.stop("lease")
            return False
        return True

    async def _parked(self, claim: Claim, run: Run) -> None:
        """Look how many attempts operators' words allow; a first attempt needs none."""
        if claim.attempt > 1 and self._tools.kernel is not None:
            # A kill by selector compares what was signed: it has to find the attempt while this waits for the store.
            self._judge(claim, run)
            await self._tools.kernel.parks(run)

    def _admit(self, claim: Claim, run: Run) -> Admitted | Denial:
        """Judge the received bytes; fill in what the signed envelope says; record a refusal."""
        decision = self._judge(claim, run)
        if isinstance(decision, Denial) and self._tools.witness is not None:
            self._tools.witness.refused(claim.job, claim.attempt, decision.reason, decision.message)
        return decision

    def _judge(self, claim: Claim, run: Run) -> Admitted | Denial:
        if claim.oversized or claim.odd:
            what = "is too large" if claim.oversized else f"carries {', '.join(claim.odd)}"
            return Denial(RefuseReason.BAD_HASH, f"the stored job {what}; no job of ours does")
        try:
            data = payload.parse(claim.data)
        except WireError as error:
            return Denial(RefuseReason.BAD_HASH, f"the stored job was refused: {error}")
        signed = (data.envelope, data.signature)
        offer = Offer(claim.job, claim.lane, claim.attempt, *signed, claim.flow, data.occurrence, data.links)
        offer = replace(offer, parks=run.parks, undecided=run.undecided) if run.parks or run.undecided else offer
        decision = admit(offer, self._tools.rules, self._tools.ledger.look, now_ms())
        run.spec = decision.spec
        run.signer = decision.signer if isinstance(decision, Admitted) else ""
        if run.spec is not None:
            run.envelope_sha256 = data.sha256
            run.selectors = specs.selectors_of(run.spec, self._tools.notary.node)
        return decision
