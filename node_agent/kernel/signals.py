"""Signals to running jobs: what is told reaches their processes, what is enforced acts from outside, whatever they do.

Made by the desk; called by jobs (`signal.*`), operators' commands (control), loop detection and budgets. Must never let
a process of the job decide about a signal that is enforced, take a sender's name from a request, or let a job reach one
that it did not start and was not granted to watch.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from node_agent.kernel.bucket import Bucket
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.signalpost import Done, Listener, Post, Sent
from node_agent.kernel.signalroad import Road
from node_agent.kernel.table import Entry
from node_agent.lifecycle import Cause
from node_agent.pausing import Holder, Order, Pauser
from node_agent.run import KillOrder, Run, now_ms
from runner.wire import ids
from runner.wire import spec as specs
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.command import Command
from runner.wire.event import EventType
from runner.wire.receipt import PauseReceipt
from runner.wire.signals import FATAL, FREEZING, MAX_WHY, TOLD, UNMASKABLE, SignalName
from runner.wire.spec import JobSpec
from runner.wire.states import State

__all__ = ["Signals", "may_signal"]

log = logging.getLogger(__name__)

#: What a job may send at all; DRIFT only to jobs that it watches.
_BY_JOBS: Final = TOLD | {SignalName.KILL, SignalName.STOP, SignalName.CONT, SignalName.DRIFT}
#: How often an attempt may send.
PER_S: Final = 20.0
BURST: Final = 40.0
#: How often one job may stop an attempt, or let it go on; and most jobs whose rate is remembered for one attempt.
HOLDS_PER_S: Final = 2.0
HOLDS_BURST: Final = 10.0
_MOST_HOLDERS: Final = 64
#: Most jobs of other nodes whose rate is remembered.
_MOST_ARRIVING: Final = 1024
#: A process that takes no records is tried again so often, so many times.
_AGAIN_S: Final = 0.1
_TRIES: Final = 100
_SYSTEM: Final = {
    SignalName.INT: signal.SIGINT,
    SignalName.TERM: signal.SIGTERM,
    SignalName.USR1: signal.SIGUSR1,
    SignalName.USR2: signal.SIGUSR2,
}
_HOLDS: Final[dict[SignalName, Holder]] = {
    # Not "budget": that hold is lifted as soon as the job's budget has room.
    SignalName.BUDGET: "signal",
    SignalName.LOOP: "loop",
    SignalName.DRIFT: "drift",
}
_CAUSES: Final[dict[SignalName, Cause]] = {
    SignalName.KILL: "kill",
    SignalName.POLICY: "policy",
    SignalName.TRUST: "trust",
}


@dataclass(frozen=True, slots=True)
class SendSignal:
    """``job``: to whom; empty for the job itself."""

    signal: SignalName
    job: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Mask:
    """``blocked``: what this process holds up from now on, and nothing else."""

    blocked: tuple[SignalName, ...] = ()


@dataclass(frozen=True, slots=True)
class Nothing:
    """No fields."""


class Signals:
    """Signals of one boot."""

    def __init__(
        self, around: Around, pauser: Pauser, road: Road, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._around, self._pauser, self._road, self._clock = around, pauser, road, clock
        self._posts: dict[str, Post] = {}
        self._buckets: dict[str, Bucket] = {}
        #: By attempt, then by who sends.
        self._holds: dict[str, OrderedDict[str, Bucket]] = {}
        #: By job of another node: its node bounds it, too, if that is an honest one.
        self._arriving: OrderedDict[str, Bucket] = OrderedDict()
        self._timers: set[asyncio.TimerHandle] = set()
        road.arrived = self._arrived
        around.ending.append(self.ended)
        around.stopping.append(self.stop)
        around.stopping.append(road.stop)

    def entries(self) -> tuple[Entry, ...]:
        """Return every call of this part."""
        errors = (ErrorCode.NOT_FOUND, ErrorCode.UNAVAILABLE)
        return (
            Entry("signal.send", SendSignal, self._send, "Send a signal to the job itself, to one that it "
                  "started, or to one that it watches.", "{outcome, reason}", "", True, errors,
                  lambda asked: asked.signal),
            Entry("signal.listen", Nothing, self._listen, "Have signals told to this process, as records of their own.",
                  "{}"),
            Entry("signal.mask", Mask, self._mask, "Hold up what this process does not want now; what waited comes in "
                  "order.", "{blocked, pending}", errors=(ErrorCode.CONFLICT,)),
            Entry("signal.list", Nothing, self._list, "List the signals of this attempt, the last 32.",
                  "{history: [{signal, from, at_ms, why, outcome, reason}], pending}"),
        )  # fmt: skip # several to a line

    async def carry_out(self, run: Run, sent: Sent, *, holder: Holder | None = None, command: str = "") -> Done:
        """Carry out a signal for an attempt of this node and remember it.

        ``holder``: in whose name STOP and CONT hold and let go. ``command``: the operator's command, if it is one.
        """
        post = self._post(run)
        try:
            self._record(run, sent)
        except CallError as error:
            if sent.name not in FATAL:
                done = Done("refused", str(error))
                post.note(sent, done)
                return done
            log.warning("a kill is carried out without its record", extra={"job": run.job_id, "error": str(error)})
        done = await self._act(run, post, sent, holder or "watch", command)
        post.note(sent, done)
        self._tell_event(run, sent, done)
        return done

    async def ordered(self, run: Run, command: Command, act: bool) -> PauseReceipt:
        """Carry out an operator's signal for one attempt and return the signed answer."""
        done = Done("refused", "this order was carried out before: `ringfence events` shows what became of it")
        if act and command.signal is not None:
            sent = Sent(command.signal, f"operator {command.by}", command.issued_at_ms, command.reason)
            done = await self.carry_out(run, sent, command=command.id)
        return self._around.notary.pause_receipt(
            run.job_id,
            command.id,
            "signal",
            done.outcome,
            state=State.PAUSED if run.holders else State.RUNNING,
            attempt=run.attempt,
            reason=done.reason,
            by=command.by,
        )

    def notify(self, run: Run, name: SignalName, why: str) -> None:
        """Tell the job's processes that listen of something that another part enforces."""
        sent = Sent(name, f"node {self._around.node}", now_ms(), why)
        post = self._post(run)
        post.tell(sent)
        post.note(sent, Done("applied"))

    def raised(self, run: Run, name: SignalName, why: str) -> asyncio.Task[Done]:
        """Carry out a signal of the node's own, soon."""
        sent = Sent(name, f"node {self._around.node}", now_ms(), why)
        return asyncio.get_running_loop().create_task(self.carry_out(run, sent))

    def ended(self, caller: Caller) -> None:
        """An attempt is over."""
        self._posts.pop(caller.attempt, None)
        self._buckets.pop(caller.attempt, None)
        self._holds.pop(caller.attempt, None)

    async def stop(self) -> None:
        """Try nothing again. Idempotent."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    async def _send(self, caller: Caller, asked: SendSignal) -> Json:
        bucket = self._buckets.get(caller.attempt)
        if bucket is None:
            bucket = self._buckets[caller.attempt] = Bucket(PER_S, BURST, self._clock)
        if not bucket.take():
            raise CallError(ErrorCode.SLOW_DOWN, f"at most {PER_S:g} signals a second; send again in a moment")
        name, job = asked.signal, asked.job or caller.job
        if len(asked.why) > MAX_WHY or not asked.why.isprintable():
            raise CallError(ErrorCode.BAD_REQUEST, f"a reason has at most {MAX_WHY} printable characters")
        sent = Sent(name, f"job {caller.job}", now_ms(), asked.why)
        run = next((run for run in self._around.runs() if run.job_id == job), None)
        spec = run.spec if run is not None else await self._road.known(job, caller.tenant)
        # A job of another tenant is not there at all for this one.
        if spec is None or spec.tenant != caller.tenant:
            raise CallError(ErrorCode.NOT_FOUND, "no such job of this tenant, or nobody this node trusts signed it")
        problem = may_signal(caller.spec, spec, name, run.selectors if run is not None else ())
        if problem:
            raise CallError(ErrorCode.DENIED, problem)
        if run is not None:
            done = await self.carry_out(run, sent)
        else:
            done = await self._road.send(caller, job, sent)
        return {"outcome": done.outcome, "reason": done.reason}

    async def _arrived(self, sender: JobSpec, job: str, sent: Sent) -> Done:
        """A signal came from a job of another node, whose own signed words say what it may."""
        run = next((run for run in self._around.runs() if run.job_id == job), None)
        if run is None or run.spec is None:
            return Done("refused", "the job does not run on this node any more")
        problem = may_signal(sender, run.spec, sent.name, run.selectors)
        if not problem and not _bucket(self._arriving, sender.id, _MOST_ARRIVING, PER_S, BURST, self._clock).take():
            problem = f"at most {PER_S:g} signals a second; send again in a moment"
        return Done("refused", problem) if problem else await self.carry_out(run, sent)

    def _listen(self, caller: Caller, _: Nothing) -> Json:
        post = self._post(caller.run)
        number = caller.number
        if number not in post.listeners:
            post.listeners[number] = Listener(caller.push)
            caller.closing.append(lambda: post.leave(number))
        return {}

    def _mask(self, caller: Caller, asked: Mask) -> Json:
        listener = self._post(caller.run).listeners.get(caller.number)
        if listener is None:
            raise CallError(ErrorCode.CONFLICT, "this process does not listen: call signal.listen first")
        fixed = sorted(UNMASKABLE.intersection(asked.blocked))
        if fixed:
            raise CallError(ErrorCode.DENIED, f"{', '.join(fixed)} can't be held up: they act from outside")
        listener.mask(asked.blocked)
        self._again(listener)
        blocked: list[Json] = [str(name) for name in sorted(listener.blocked)]
        return {"blocked": blocked, "pending": [str(sent.name) for sent in listener.pending]}

    def _list(self, caller: Caller, _: Nothing) -> Json:
        post = self._post(caller.run)
        listener = post.listeners.get(caller.number)
        pending: list[Json] = [sent.shown() for sent in listener.pending] if listener is not None else []
        # The answer has to fit into one record.
        return {"history": list(post.history), "pending": pending}

    async def _act(self, run: Run, post: Post, sent: Sent, holder: Holder, command: str) -> Done:
        if sent.name in TOLD:
            return self._tell(run, post, sent)
        if sent.name in FATAL:
            return self._kill(run, sent, command)
        if sent.name in FREEZING:
            # Told before the freeze: who goes on later knows why it stood still.
            post.tell(sent)
            return await self._hold(run, Order("pause", _HOLDS[sent.name], command, sent.why, sent.sender))
        if holder == "watch" and not self._may_hold(run, sent.sender):
            return Done(
                "refused", f"{sent.sender} stops it and lets it go on too often: at most {HOLDS_PER_S:g} times a second"
            )
        op: Final = "pause" if sent.name is SignalName.STOP else "resume"
        if op == "resume":
            post.tell(sent)
        return await self._hold(run, Order(op, holder, command, sent.why, sent.sender))

    def _tell(self, run: Run, post: Post, sent: Sent) -> Done:
        if run.tree is None or run.started_at_ms is None or run.stopping or run.proved.done():
            return Done("refused", "the job does not run")
        outcome = post.tell(sent)
        if outcome is None:
            run.tree.tell(_SYSTEM[sent.name])
            outcome = "delivered"
        for listener in post.listeners.values():
            self._again(listener)
        if outcome == "delivered" and run.holders:
            return Done("queued", "the job stands still; it comes when the job goes on")
        return Done(outcome, "" if outcome != "queued" else "held up by the job's own mask, or its process is busy")

    def _kill(self, run: Run, sent: Sent, command: str) -> Done:
        if run.proved.done():
            return Done("refused", "the job has ended")
        reason = sent.why if sent.name is SignalName.KILL else f"{sent.name}: {sent.why}".rstrip(": ")
        order = KillOrder(command, sent.at_ms, reason=reason, by=sent.sender, cause=_CAUSES[sent.name])
        run.kill(order)
        return Done("applied")

    def _may_hold(self, run: Run, sender: str) -> bool:
        """Each of these writes to the store, and any job may send them to itself: that uses nobody else's rate up."""
        self._post(run)
        holds = self._holds.setdefault(ids.attempt_name(run.job_id, run.attempt), OrderedDict())
        return _bucket(holds, sender, _MOST_HOLDERS, HOLDS_PER_S, HOLDS_BURST, self._clock).take()

    async def _hold(self, run: Run, order: Order) -> Done:
        receipt = await self._pauser.carry_out(run, order)
        if receipt.outcome in ("paused", "resumed"):
            return Done("applied")
        if receipt.outcome == "unconfirmed":
            return Done("applied", receipt.reason)
        return Done("refused", receipt.reason or f"the job does not run ({receipt.state})")

    def _record(self, run: Run, sent: Sent) -> None:
        attempt = ids.attempt_name(run.job_id, run.attempt)
        # Never against the target's own room in the record: a job that has filled it could not be stopped any more.
        self._around.recorder.about("signal", attempt, signal=str(sent.name), by=sent.sender, why=sent.why)

    def _tell_event(self, run: Run, sent: Sent, done: Done) -> None:
        detail: dict[str, str | int | float | bool] = {
            "signal": str(sent.name),
            "by": sent.sender,
            "why": sent.why,
            "outcome": done.outcome,
        }
        if sent.sender.startswith("job "):
            # What a job can cause at will goes to the stream of the job that it hit (attack 32).
            self._around.told(run.job_id, run.attempt, EventType.JOB_SIGNALLED, detail)
        else:
            kind = EventType.JOB_SIGNALLED
            event = self._around.notary.event(kind, job=run.job_id, attempt=run.attempt, detail=detail)
            self._around.emit(run.spec.tenant if run.spec is not None else None, event)

    def _post(self, run: Run) -> Post:
        attempt = ids.attempt_name(run.job_id, run.attempt)
        post = self._posts.get(attempt)
        if post is None:
            live = {ids.attempt_name(run.job_id, run.attempt) for run in self._around.runs()}
            for name in [name for name in self._posts if name not in live]:
                del self._posts[name]
                self._holds.pop(name, None)
            post = self._posts[attempt] = Post()
        return post

    def _again(self, listener: Listener) -> None:
        """Try again what the process did not take, for a while; once at a time, however often it is asked for."""
        if not listener.tries:
            self._try(listener)
        if listener.tries:
            listener.tries = _TRIES

    def _try(self, listener: Listener) -> None:
        if not listener.pending_now() or listener.flush():
            listener.tries = 0
            return
        listener.tries = listener.tries - 1 if listener.tries else _TRIES
        if listener.tries:
            timer: list[asyncio.TimerHandle] = []

            def later() -> None:
                self._timers.discard(timer[0])
                self._try(listener)

            timer.append(asyncio.get_running_loop().call_later(_AGAIN_S, later))
            self._timers.add(timer[0])


def _bucket(
    known: OrderedDict[str, Bucket], name: str, most: int, per_s: float, burst: float, clock: Callable[[], float]
) -> Bucket:
    """Return the rate of a name; who was heard of least lately is forgotten first."""
    found = known.pop(name, None) or Bucket(per_s, burst, clock)
    known[name] = found
    if len(known) > most:
        known.popitem(last=False)
    return found


def may_signal(sender: JobSpec, target: JobSpec, name: SignalName, selectors: tuple[str, ...] = ()) -> str:
    """Return why a job may not send this to another one of its tenant; nothing if it may. Pure.

    ``selectors``: of the running target, where they are known; else they are worked out from its signed words.
    """
    if name not in _BY_JOBS:
        return f"{name} is sent by nodes and operators, never by a job"
    if sender.tenant != target.tenant:
        return "the job belongs to another tenant"
    watched = set(sender.grants.watch).intersection((*(selectors or specs.selectors_of(target)), f"job:{target.id}"))
    if name is SignalName.DRIFT:
        return "" if watched else "DRIFT is sent to jobs that the sender watches (--watch SELECTOR)"
    if target.id == sender.id or sender.id in target.ancestors or watched:
        return ""
    return f"this job did not start {target.id} and was not granted to watch it (--watch SELECTOR)"
