"""Port: runner.scripts. One claim from its admission to its acknowledged end; every end goes one way.

An attempt's path goes on in node_agent/containment/zygote.py, which makes the slot's mould.

Called by the dispatcher (claims, answers), control and the local socket (kills). Must never release a job before it is
admitted, staged, restricted and written to the ledger, and never write an end before the proof that nothing of the
attempt is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from node_agent import endings, lifecycle, sandbox
from node_agent.admission import Admitted, Denial, Offer, Rules, admit
from node_agent.containment.errors import ContainmentError, SpawnError
from node_agent.containment.plan import Plan, Profile, Verdict
from node_agent.containment.slots import Attempt, Slot
from node_agent.containment.sweep import Journal
from node_agent.dispatch import Dispatcher
from node_agent.errors import InvariantError
from node_agent.ledger import Ledger
from node_agent.lifecycle import Ending
from node_agent.output import Capture, Chunk
from node_agent.records import Notary, Signed
from node_agent.resultcheck import Reader, Result
from node_agent.run import KillOrder, Proof, Run, now_ms
from node_agent.sandbox import Defaults
from node_agent.stage import Stage, Staged, StageError
from node_agent.turns import Claim, Dead, Finish, FinishReply, KillWord, Orphan, Start, StartReply
from runner.scripts import payload
from runner.wire import spec as specs
from runner.wire.errors import WireError
from runner.wire.event import EventType
from runner.wire.spec import JobSpec
from runner.wire.states import FailReason, RefuseReason, State

__all__ = ["Desk", "Supervisor", "Tools"]

log = logging.getLogger(__name__)


class Desk(Protocol):
    """Where the supervisor's words go besides the turn."""

    async def log(self, claim: Claim, chunks: Sequence[Chunk]) -> None:
        """Store output in order; waits while the store is away, never raises."""

    def emit(self, tenant: str | None, event: Signed) -> None:
        """Store an event soon; never blocks, never raises."""

    def answer(self, run: Run, order: KillOrder) -> None:
        """Send the receipt of a kill that was found in the store, once the end is acknowledged."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a supervisor works with; one set per boot."""

    rules: Rules
    defaults: Defaults
    notary: Notary
    ledger: Ledger
    stage: Stage
    desk: Desk
    slots: Mapping[int, Slot]
    journal: Journal
    #: See Lease.era.
    era: Callable[[], int]
    #: The kill that a cutoff holds for these selectors of the signed envelope, if any.
    cutoff: Callable[[str, int, Sequence[str]], KillWord | None]
    #: Whether this node may sign for a lane's jobs.
    serves: Callable[[str], bool]


class Supervisor:
    """Every attempt of one boot."""

    def __init__(self, tools: Tools, dispatcher: Dispatcher) -> None:
        self._tools = tools
        self._dispatcher = dispatcher
        self._runs: dict[str, Run] = {}
        self._claims: dict[str, Claim] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproved: set[int] = set()
        self._results = Reader()
        self._moulds: dict[int, int] = {}

    @property
    def healthy(self) -> bool:
        """False while a kill of this node is not proved."""
        return not self._unproved

    def runs(self) -> tuple[Run, ...]:
        """Every attempt that this boot holds now."""
        return tuple(self._runs.values())

    def find(self, job_id: str) -> Run | None:
        """Return the attempt of a job that this boot holds."""
        return self._runs.get(job_id)

    def held(self) -> tuple[str, ...]:
        """Every job that this boot knows to hold, until the store has acknowledged its end."""
        return tuple(self._runs)

    def take(self, claim: Claim) -> None:
        """Carry out a claim that has a slot."""
        run = self._open(claim)
        self._spawn(self._carry(claim, run))

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
        ending = Ending(State.LOST, "node_lost", detail=f"node {node} was lost while the job ran")
        if word is not None:
            run.kill(endings.order_of(word))
        # Of a job that this node could not have run, readers believe it the loss alone (attack 3).
        if word is not None and self._tools.serves(claim.lane):
            ending = Ending(State.KILLED, "kill", detail=f"node {node} was lost after the kill was requested")
        run.settle(Proof(ending, None, now_ms()))
        self._dispatcher.finish(endings.finish_of(claim, run, ending, self._tools.notary), free_slot=False)
        if word is not None:
            self._tools.desk.answer(run, run.orders[-1])

    def stop_all(self, cause: lifecycle.Cause) -> None:
        """End every attempt for the node's own reason."""
        for run in self.runs():
            run.stop(cause)

    async def close(self) -> None:
        """Give up what still waits for the store; only when the boot is over. Idempotent."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        del self._runs[finish.claim.job]
        if reply.result == "done" and run.spec is not None and run.started_at_ms is not None:
            self._tools.ledger.ended(run.spec.nonce, finish.claim.attempt, run.spec.not_after_ms)
        if not run.acknowledged.done():
            run.acknowledged.set_result(reply.result == "done")

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
        older = self._runs.get(claim.job)
        if older is not None and not older.acknowledged.done():
            # The store gave the job out anew, so it has written the older attempt's finish.
            older.acknowledged.set_result(True)
        self._runs[claim.job] = run
        return run

    def _show_killing(self, claim: Claim, run: Run) -> None:
        if run.started_at_ms is not None and not run.proved.done():
            self._dispatcher.mark(Start(claim, State.KILLING))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _close_unstarted(self, claim: Claim, run: Run, ending: Ending, word: KillWord | None) -> None:
        run.settle(Proof(ending, None, now_ms()))
        self._dispatcher.finish(endings.finish_of(claim, run, ending, self._tools.notary))
        if word is not None:
            self._tools.desk.answer(run, endings.order_of(word))

    def _admit(self, claim: Claim, run: Run) -> Admitted | Denial:
        """Judge the received bytes; fill in what the signed envelope says."""
        if claim.oversized or claim.odd:
            what = "is too large" if claim.oversized else f"carries {', '.join(claim.odd)}"
            return Denial(RefuseReason.BAD_HASH, f"the stored job {what}; no job of ours does")
        try:
            data = payload.parse(claim.data)
        except WireError as error:
            return Denial(RefuseReason.BAD_HASH, f"the stored job was refused: {error}")
        offer = Offer(claim.job, claim.lane, claim.attempt, data.envelope, data.signature)
        decision = admit(offer, self._tools.rules, self._tools.ledger.look, now_ms())
        run.spec = decision.spec
        if run.spec is not None:
            run.selectors = specs.selectors_of(run.spec, self._tools.notary.node)
        return decision

    async def _carry(self, claim: Claim, run: Run) -> None:
        """Run one claim; whatever goes wrong here becomes node_fault, never a lost claim."""
        try:
            finish = await self._attempt(claim, run)
        except Exception as error:
            log.exception("attempt failed in the agent", extra={"job": claim.job, "attempt": claim.attempt})
            ending = Ending(
                State.FAILED, FailReason.NODE_FAULT, detail=f"the node agent failed ({type(error).__name__})"
            )
            run.settle(Proof(ending, None, now_ms()))
            finish = endings.finish_of(claim, run, ending, self._tools.notary)
        self._dispatcher.finish(finish)

    async def _attempt(self, claim: Claim, run: Run) -> Finish:
        tools = self._tools
        run.era = tools.era()
        admitted = self._admit(claim, run)
        if isinstance(admitted, Denial):
            return self._unstarted(claim, run, endings.denied(admitted))
        spec = admitted.spec
        if tools.ledger.look(spec.nonce, claim.attempt) == "started":
            run.started_at_ms = now_ms()
            ending = Ending(State.LOST, "node_lost", detail="an earlier start of this node died while the job ran")
            return self._unstarted(claim, run, ending)
        word = tools.cutoff(claim.job, claim.seq, run.selectors)
        if word is not None:
            run.kill(endings.order_of(word))
            return self._unstarted(claim, run, Ending(State.KILLED, "kill"), word)
        try:
            staged = await tools.stage.open(spec)
        except StageError as error:
            return self._unstarted(claim, run, endings.denied(Denial(error.reason, str(error), spec)))
        try:
            return await self._confined(claim, run, admitted, staged)
        finally:
            staged.close()

    async def _confined(self, claim: Claim, run: Run, admitted: Admitted, staged: Staged) -> Finish:
        tools, spec = self._tools, admitted.spec
        slot = tools.slots[claim.slot or 0]
        plan = sandbox.plan_of(spec, claim.attempt, staged.mounts, staged.uid, staged.gid, tools.defaults)
        try:
            attempt = await self._begin(slot, sandbox.profile_of(spec, admitted.signer), plan, staged)
        except ContainmentError as error:
            if tools.era() != run.era:
                # The lease ended in the middle, and the mould with it: no fault of the job, which is given back.
                run.stop("lease")
            return self._unstarted(claim, run, endings.unbuilt(error))
        run.begun(attempt)
        capture = Capture(
            (attempt.stdout, attempt.stderr),
            lambda chunks: tools.desk.log(claim, chunks),
            limit_bytes=spec.limits.output_bytes or tools.defaults.output_bytes,
            on_limit=lambda: run.stop("output_limit"),
        )
        timer = asyncio.get_running_loop().call_later(
            sandbox.timeout_of(spec, tools.defaults), lambda: run.stop("time_limit")
        )
        try:
            await self._release(claim, run, spec, attempt)
            verdict = await attempt.verdict
            if not verdict.proved:
                verdict = await self._insist(claim, run, attempt, verdict)
        except BaseException:
            attempt.kill()
            await attempt.proved
            capture.close()
            attempt.close()
            raise
        finally:
            timer.cancel()
        # Nothing but reading a result waits between verdict and proof, and no proof waits for the store.
        capture.drain()
        try:
            ending, result = await self._conclude(run, spec, verdict, attempt)
        finally:
            attempt.close()
        run.settle(Proof(ending, verdict, now_ms()))
        await capture.finish()
        evidence = endings.Evidence(verdict, result, capture.evidence, capture.total_bytes)
        return endings.finish_of(claim, run, ending, tools.notary, evidence)

    async def _begin(self, slot: Slot, profile: Profile, plan: Plan, staged: Staged) -> Attempt:
        """Have a restricted worker stand; a mould that ended since its last attempt (the lease) is replaced once."""
        for left in (1, 0):
            try:
                await slot.prepare(profile)
                self._record_mould(slot)
                attempt = await slot.begin(plan, staged.fds)
            except SpawnError:
                if not left:
                    raise
            else:
                staged.sent()
                return attempt
        raise InvariantError("unreachable")

    def _record_mould(self, slot: Slot) -> None:
        """Note a mould before it gets its first job: the next start of this node waits until it is gone."""
        pid, known = slot.mould_pid, self._moulds.get(slot.index)
        if pid is not None and pid != known:
            self._tools.journal.add(pid)
            self._moulds[slot.index] = pid
            if known is not None:
                self._tools.journal.remove(known)

    async def _release(self, claim: Claim, run: Run, spec: JobSpec, attempt: Attempt) -> None:
        """Let the restricted worker run: after the ledger, and for at-most-once jobs after the acknowledged mark."""
        if run.era < 0 or self._tools.era() != run.era:
            run.stop("lease")
        if run.stopping:
            return
        self._tools.ledger.started(spec.nonce, claim.attempt, spec.not_after_ms)
        run.started_at_ms = now_ms()
        event = self._tools.notary.event(EventType.JOB_STARTED, job=claim.job, attempt=claim.attempt, detail={})
        mark = Start(claim, State.RUNNING, event.payload, event.signature)
        self._dispatcher.mark(mark, urgent=spec.at_most_once)
        if spec.at_most_once and not await run.marked:
            return
        if not run.stopping:
            await attempt.release(sandbox.payload_of(spec, claim.attempt))

    async def _insist(self, claim: Claim, run: Run, attempt: Attempt, verdict: Verdict) -> Verdict:
        """No proof of death in time: say so loudly, keep the slot, wait for as long as it takes."""
        ending = Ending(State.KILLED, "kill", detail="the kill is not proved yet")
        run.settle(Proof(ending, verdict, now_ms()))
        number = claim.slot or 0
        self._unproved.add(number)
        event = self._tools.notary.event(
            EventType.KILL_UNCONFIRMED, job=claim.job, attempt=claim.attempt, detail={"slot": number}
        )
        self._tools.desk.emit(run.spec.tenant if run.spec is not None else None, event)
        log.error("kill not proved", extra={"job": claim.job, "slot": number})
        await attempt.proved
        self._unproved.discard(number)
        return replace(verdict, proved=True)

    async def _conclude(
        self, run: Run, spec: JobSpec, verdict: Verdict, attempt: Attempt
    ) -> tuple[Ending, Result | None]:
        if not run.cause and verdict.kind == "worker_died" and self._tools.era() != run.era:
            run.cause = "lease"
        if spec.task is None:
            ending = lifecycle.conclude(verdict, run.cause)
            return ending, endings.command_result(ending)
        if run.cause or verdict.kind != "exit":
            return lifecycle.conclude(verdict, run.cause), None
        result = await self._results.take(attempt.result, self._tools.defaults.result_bytes)
        if result.error is not None:
            return endings.exception_ending(result.error), result
        return lifecycle.conclude(verdict, run.cause, result_problem=result.problem), result

    def _unstarted(self, claim: Claim, run: Run, ending: Ending, word: KillWord | None = None) -> Finish:
        if run.orders and ending.state is not State.LOST:
            ending = Ending(State.KILLED, "kill")
        run.settle(Proof(ending, None, now_ms()))
        if word is not None:
            self._tools.desk.answer(run, endings.order_of(word))
        return endings.finish_of(claim, run, ending, self._tools.notary)
