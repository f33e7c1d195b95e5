"""One claim from its admission to its acknowledged end; every end goes one way.

An attempt's path goes on in node_agent/containment/zygote.py, which makes the slot's mould.

Called by the dispatcher (claims, answers), control and the local socket (kills). Must never release a job before it is
admitted, staged, restricted and written to the ledger, and never write an end before the proof that nothing of the
attempt is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace

from node_agent import endings, lifecycle, sandbox, stage
from node_agent.admission import Admitted, Denial
from node_agent.cancelling import end_all
from node_agent.containment.errors import ContainmentError, CrowdedError, SpawnError
from node_agent.containment.lower.slots import LowSlot
from node_agent.containment.plan import Plan, Profile, Verdict
from node_agent.containment.reused import ReusedAttempt
from node_agent.containment.slots import Attempt, Slot
from node_agent.dispatch import Dispatcher
from node_agent.errors import InvariantError
from node_agent.kernel.channel import Exchange
from node_agent.kernel.funding import funded
from node_agent.lifecycle import Ending
from node_agent.output import Capture
from node_agent.pipes import Pipes
from node_agent.resultcheck import Reader, Result
from node_agent.run import Proof, Run, now_ms
from node_agent.runs import Desk, Runs, Tools
from node_agent.stage import Staged, StageError
from node_agent.turns import Claim, Finish, KillWord, Start
from node_agent.walltime import WallTime
from runner.wire import frames
from runner.wire.event import EventType
from runner.wire.spec import JobSpec
from runner.wire.states import NODE_LOST, FailReason, State

__all__ = ["Desk", "Supervisor", "Tools"]

log = logging.getLogger(__name__)

#: How long the scrubber has, after the proof, to pass on what it holds, in seconds.
SCRUB_S = 2.0


class Supervisor(Runs):
    """Carries out the claims of one boot."""

    def __init__(self, tools: Tools, dispatcher: Dispatcher) -> None:
        super().__init__(tools, dispatcher)
        self._tasks: set[asyncio.Task[None]] = set()
        self._results = Reader()
        self._pipes = Pipes()
        self._exchange = Exchange(tools.kernel, self._pipes)
        self._moulds: dict[int, int] = {}

    def take(self, claim: Claim) -> None:
        """Carry out a claim that has a slot."""
        run = self._open(claim)
        self._spawn(self._carry(claim, run))

    async def close(self) -> None:
        """Give up what still waits for the store; only when the boot is over. Idempotent."""
        await end_all(self._tasks)
        self._pipes.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        self._tools.placing.leave(claim.job)
        self._dispatcher.finish(finish)

    async def _attempt(self, claim: Claim, run: Run) -> Finish:
        tools = self._tools
        run.era = tools.era()
        await self._parked(claim, run)
        admitted = self._admit(claim, run)
        if isinstance(admitted, Denial):
            return self._unstarted(claim, run, endings.denied(admitted))
        spec = admitted.spec
        if tools.ledger.look(spec.nonce, claim.attempt) == "started":
            run.started_at_ms = now_ms()
            ending = Ending(State.LOST, NODE_LOST, detail="an earlier start of this node died while the job ran")
            return self._unstarted(claim, run, ending)
        word = tools.cutoff(claim.job, claim.seq, run.selectors)
        if word is not None:
            run.kill(endings.order_of(word))
            return self._unstarted(claim, run, Ending(State.KILLED, "kill"), word)
        if spec.after is not None or spec.ancestors:
            settled = await self._settled(run, spec)
            if isinstance(settled, Ending):
                return self._unstarted(claim, run, settled)
            spec = settled
            admitted = replace(admitted, spec=spec)
        if not run.stopping and not self._placed(claim, spec):
            run.stop("crowded")
            return self._unstarted(claim, run, Ending(State.LOST, "crowded"))
        if not self._recorded(claim, run, admitted):
            return self._unstarted(claim, run, Ending(State.LOST, "unrecorded"))
        finish = await self._again(claim, run, admitted)
        if finish is not None:
            return finish
        try:
            staged = await tools.stage.open(spec, claim.attempt, admitted.net, admitted.signer)
        except StageError as error:
            return self._unstarted(claim, run, endings.denied(Denial(error.reason, str(error), spec)))
        try:
            return await self._confined(claim, run, admitted, staged)
        finally:
            await staged.ended()
            staged.close()

    def _placed(self, claim: Claim, spec: JobSpec) -> bool:
        """Take the room that the job asks for; without it the job goes back, and other nodes may have it."""
        placing = self._tools.placing
        alone = placing.sparing
        if not placing.place(claim.job, spec):
            return False
        if alone:
            self._dispatcher.wake()
        return True

    async def _confined(self, claim: Claim, run: Run, admitted: Admitted, staged: Staged) -> Finish:
        tools, spec = self._tools, admitted.spec
        slot = tools.slots[claim.slot or 0]
        plan = sandbox.plan_of(spec, claim.attempt, staged.mounts, staged.uid, staged.gid, tools.defaults)
        profile = sandbox.profile_of(spec, admitted.signer)
        hurried = self._hurry(claim, run, spec, slot, profile, plan)
        if hurried is not None:
            finish = await self._watched(claim, run, spec, staged, hurried, hurried=True)
            if finish is not None:
                return finish
        try:
            attempt = await self._begin(slot, profile, plan, staged)
        except ContainmentError as error:
            return self._unbuilt(claim, run, error)
        terms = sandbox.terms_of(spec, admitted.signer, tools.defaults)
        if terms is not None and isinstance(attempt, ReusedAttempt):
            attempt.keep(terms, staged.give(), staged.uid, staged.gid)
        finish = await self._watched(claim, run, spec, staged, attempt, hurried=False)
        if finish is None:
            raise InvariantError("an attempt that was ready is one that ran")
        return finish

    async def _watched(
        self, claim: Claim, run: Run, spec: JobSpec, staged: Staged, attempt: Attempt, *, hurried: bool
    ) -> Finish | None:
        """See one attempt to its end; None if it was hurried, nothing of it ran and another one may be tried."""
        tools = self._tools
        run.begun(attempt)
        plug = self._exchange.plug(run, spec, attempt)
        attempt.verdict.add_done_callback(plug.close)
        capture = Capture(
            (attempt.stdout, attempt.stderr),
            lambda chunks: tools.desk.log(claim, chunks),
            limit_bytes=spec.limits.output_bytes or tools.defaults.output_bytes,
            on_limit=lambda: run.stop("output_limit"),
            watch=self._pipes,
            on_listen=plug.listen,
        )
        timer = run.wall = WallTime(sandbox.timeout_of(spec, tools.defaults), lambda: run.stop("time_limit"))
        if staged.line is not None:
            staged.line.watch(lambda: run.stop("secret_leaked"))
        try:
            if not hurried:
                await self._release(claim, run, spec, attempt, staged)
            verdict = await attempt.verdict
            if not verdict.proved:
                verdict = await self._insist(claim, run, attempt, verdict)
            await run.unhelped()
        except BaseException:
            attempt.kill()
            await attempt.proved
            await run.unhelped()
            capture.close()
            attempt.close()
            raise
        finally:
            timer.cancel()
        if staged.line is not None:
            # The scrubber may still hold what the job wrote last.
            await capture.ended(SCRUB_S)
            staged.line.hear()
        # Nothing but reading a result waits between verdict and proof, and no proof waits for the store.
        capture.drain()
        if hurried and (problem := attempt.unready(verdict)) is not None:
            attempt.close()
            run.started_at_ms = None
            if isinstance(problem, SpawnError) and not run.stopping:
                return None
            return self._unbuilt(claim, run, problem)
        try:
            await staged.cleaned(attempt)
            ending, result = await self._conclude(run, spec, verdict, attempt)
        finally:
            attempt.close()
        run.settle(Proof(ending, verdict, now_ms()))
        await attempt.freed()
        if capture.total_bytes:
            await capture.finish()
        if staged.looked:
            await self._tell_plants(claim, spec, staged)
        evidence = endings.Evidence(verdict, result, capture.evidence, capture.total_bytes)
        return endings.finish_of(claim, run, self._overruled(run, ending, evidence), tools.notary, evidence)

    def _hurry(
        self, claim: Claim, run: Run, spec: JobSpec, slot: Slot | LowSlot, profile: Profile, plan: Plan
    ) -> Attempt | None:
        """Start the job in the worker that stands, if nothing has to happen between its READY and its payload.

        The order stays: the ledger first, then the plan; the worker restricts itself before it reads the payload.
        """
        once = spec.at_most_once or plan.mounts or plan.reuse or spec.grants.net or spec.needs_broker or spec.budget
        if once or not isinstance(slot, Slot) or not slot.waits_for(plan, profile):
            return None
        payload = sandbox.payload_of(spec, claim.attempt)
        if len(payload) > frames.CHUNK_BYTES or not self._may_start(claim, run, spec):
            return None
        self._record_mould(slot)
        attempt = slot.eager(plan, payload)
        if attempt is not None:
            run.started_at_ms = now_ms()
            self._mark(claim, spec)
        return attempt

    async def _again(self, claim: Claim, run: Run, admitted: Admitted) -> Finish | None:
        """Run the job in the worker of one like it (``reuse=N``), if that waits for it; None: nothing of it ran."""
        tools, spec = self._tools, admitted.spec
        slot, terms = tools.slots[claim.slot or 0], sandbox.terms_of(spec, admitted.signer, tools.defaults)
        whose = slot.keeper.serves(terms) if terms is not None and isinstance(slot, Slot) else None
        if terms is None or whose is None or not isinstance(slot, Slot):
            return None
        payload = sandbox.payload_of(spec, claim.attempt)
        if len(payload) > frames.CHUNK_BYTES or not self._may_start(claim, run, spec):
            return None
        plan = sandbox.plan_of(spec, claim.attempt, (), *whose, tools.defaults)
        attempt = slot.again(plan, terms, payload)
        if attempt is None:
            return None
        run.started_at_ms = now_ms()
        self._mark(claim, spec)
        return await self._watched(claim, run, spec, Staged(*whose), attempt, hurried=True)

    async def end_idle(self) -> None:
        """End workers that wait for another attempt: what was asked of a job must hold for what it left in one, too."""
        keepers = [slot.keeper for slot in self._tools.slots.values() if isinstance(slot, Slot) and slot.keeper.holds]
        await asyncio.gather(*(keeper.kill() for keeper in keepers))

    def _unbuilt(self, claim: Claim, run: Run, error: ContainmentError) -> Finish:
        if run.era < 0 or self._tools.era() != run.era:
            # The lease had ended, or did in the middle, and the mould with it: no fault of the job, it is given back.
            run.stop("lease")
        return self._unstarted(claim, run, endings.unbuilt(error))

    async def _begin(self, slot: Slot | LowSlot, profile: Profile, plan: Plan, staged: Staged) -> Attempt:
        """Have a restricted worker stand; a mould that ended since its last attempt (the lease) is replaced once."""
        for left in (1, 0):
            try:
                await slot.prepare(profile)
                self._record_mould(slot)
                attempt = await slot.begin(plan, staged.plan_fds)
            except SpawnError as error:
                if not left:
                    raise
                if isinstance(error, CrowdedError):
                    await self.relieve()
            else:
                staged.sent()
                await staged.connected(attempt)
                return attempt
        raise InvariantError("unreachable")

    def _record_mould(self, slot: Slot | LowSlot) -> None:
        """Note a mould before it gets its first job: the next start of this node waits until it is gone."""
        pid, known = slot.mould_pid, self._moulds.get(slot.index)
        if pid is not None and pid != known:
            self._tools.journal.add(pid, spare=isinstance(slot, LowSlot))
            self._moulds[slot.index] = pid
            if known is not None:
                self._tools.journal.remove(known)

    async def _release(self, claim: Claim, run: Run, spec: JobSpec, attempt: Attempt, staged: Staged) -> None:
        """Let the restricted worker run: after the ledger, and for at-most-once jobs after the acknowledged mark."""
        if spec.budget is not None:
            await funded(self._tools.kernel, run, attempt.verdict)
        if not self._may_start(claim, run, spec):
            return
        run.started_at_ms = now_ms()
        self._mark(claim, spec)
        if spec.at_most_once and not await run.marked:
            return
        if not run.stopping:
            await attempt.release(sandbox.payload_of(spec, claim.attempt, staged.authority, staged.sdks))

    def _may_start(self, claim: Claim, run: Run, spec: JobSpec) -> bool:
        """Write the ledger; return whether the job may run now."""
        if run.era < 0 or self._tools.era() != run.era:
            run.stop("lease")
        if run.stopping:
            return False
        try:
            self._tools.ledger.started(spec.nonce, claim.attempt, spec.not_after_ms)
        except OSError as error:
            # No record, no start. The job goes back to its lane, and this node takes no other until it can write again.
            log.warning("the ledger can't be written", extra={"error": str(error)})
            self._tools.no_room()
            run.stop("lease")
            return False
        return True

    def _mark(self, claim: Claim, spec: JobSpec) -> None:
        event = self._tools.notary.turn_event(EventType.JOB_STARTED, job=claim.job, attempt=claim.attempt, detail={})
        mark = Start(claim, State.RUNNING, event.payload, event.signature)
        self._dispatcher.mark(mark, urgent=spec.at_most_once)

    async def _insist(self, claim: Claim, run: Run, attempt: Attempt, verdict: Verdict) -> Verdict:
        """No proof of death in time: say so loudly, keep the slot, wait for as long as it takes."""
        ending = Ending(State.KILLED, "kill", detail="the kill is not proved yet")
        run.settle(Proof(ending, verdict, now_ms()))
        number = claim.slot or 0
        self._unproved.add(number)
        detail: dict[str, str | int | float | bool] = {"slot": number, "processes": verdict.usage.processes}
        event = self._tools.notary.event(
            EventType.KILL_UNCONFIRMED, job=claim.job, attempt=claim.attempt, detail=detail
        )
        self._tools.desk.emit(run.spec.tenant if run.spec is not None else None, event)
        # The node's own stream names the job by its slot alone: tenants don't read each other's.
        self._tools.desk.emit(None, self._tools.notary.event(EventType.NODE_UNHEALTHY, detail=detail))
        log.error("kill not proved, the node takes no more work", extra={"job": claim.job, "slot": number})
        await attempt.proved
        self._unproved.discard(number)
        if self.healthy:
            self._tools.desk.emit(None, self._tools.notary.event(EventType.NODE_HEALTHY, detail={"slot": number}))
        return replace(verdict, proved=True, kill_ms=attempt.kill_ms)

    async def _conclude(
        self, run: Run, spec: JobSpec, verdict: Verdict, attempt: Attempt
    ) -> tuple[Ending, Result | None]:
        if not run.cause and verdict.kind == "worker_died" and self._tools.era() != run.era:
            run.cause = "lease"
        if run.cause in ("drain", "parked") and not run.forced and verdict.kind == "exit" and verdict.code == 0:
            # Told to end, it did so by itself and says that all is done: its own word counts.
            run.cause = ""
        if run.cause == "exit" and run.exit_code is not None:
            ending = lifecycle.left(run.exit_code)
            return ending, endings.command_result(ending)
        if spec.task is None:
            ending = lifecycle.conclude(verdict, run.cause)
            return ending, endings.command_result(ending)
        if run.cause or verdict.kind != "exit":
            return lifecycle.conclude(verdict, run.cause), None
        result = await self._results.take(attempt.result, self._tools.defaults.result_bytes)
        if result.error is not None:
            data_bytes = self._tools.defaults.data_bytes
            return endings.exception_ending(result.error, verdict.limit, data_bytes), result
        return lifecycle.conclude(verdict, run.cause, result_problem=result.problem), result

    async def _tell_plants(self, claim: Claim, spec: JobSpec, staged: Staged) -> None:
        """Say what the operator's own tools would run by now of what stands below the write grants (attack 8)."""
        if paths := await self._tools.stage.planted(staged):
            detail = stage.told(paths)
            kind = EventType.GRANT_CODE_CHANGED
            event = self._tools.notary.event(kind, job=claim.job, attempt=claim.attempt, detail=detail)
            self._tools.desk.emit(spec.tenant, event)

    def _unstarted(self, claim: Claim, run: Run, ending: Ending, word: KillWord | None = None) -> Finish:
        if run.orders and ending.state is not State.LOST:
            ending = Ending(State.KILLED, "kill")
        run.settle(Proof(ending, None, now_ms()))
        if word is not None:
            self._tools.desk.answer(run, endings.order_of(word))
        return endings.finish_of(claim, run, ending, self._tools.notary)
