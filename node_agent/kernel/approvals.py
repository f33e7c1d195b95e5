"""Calls that a person decides on: parked in the store, answered by a signed word, a no when nobody answers in time.

Called by deciding for a verdict of ``ask``. The question is what is asked, not who asks: the same call of one job is
the same question after a restart of the agent, on another node and in the next attempt. Must never let a call through
without a word that a key with the right to operate signed for exactly this question, nor twice by one word.

    wait      the call waits a while, then it is answered PENDING: the job goes on, and asks again
    freeze    nothing of the job runs until there is an answer
    requeue   the attempt ends and gives its slot free; the next one makes the same call (parking.py)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.pace import Pace
from node_agent.kernel.parking import Parking
from node_agent.kernel.storecalls import StoreCalls, text_of
from node_agent.kernel.words import Words
from node_agent.pausing import Order, Pauser
from node_agent.policycalls import Ask, Verdict
from node_agent.records import Notary, Signed
from node_agent.run import Run, now_ms
from runner.wire import codec
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.command import Command
from runner.wire.envelope import Domain
from runner.wire.event import EventType
from runner.wire.receipt import PauseReceipt

__all__ = ["Approvals", "Desk", "Yes"]

log = logging.getLogger(__name__)

#: Most questions of one job, ever; and most that one attempt waits for at a time.
MOST: Final = 64
MOST_WAITING: Final = 8
#: Most questions of one attempt that the tenant's stream of events hears of.
MOST_LOUD: Final = 4
#: How long an answer is kept after the time to decide was over, in milliseconds.
KEEP_MS: Final = 7 * 86_400_000
#: How often an answer is looked for, and how long a call waits for one before it is PENDING, in seconds.
LOOK_S: Final = 0.5
_LOOKS_PER_S: Final = 10.0
_MOST_TEXT: Final = 512
_MOST_USED: Final = 4096
WAIT_S: Final = 25.0


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the words about approvals go. ``reply``: answers a command, as Mail.paused does.

    ``told``: an event of the job's own stream, for what a job can cause at will.
    """

    notary: Notary
    emit: Callable[[str | None, Signed], None]
    reply: Callable[[PauseReceipt], None]
    record: Callable[..., None]
    told: Callable[[str, int, EventType, dict[str, str | int | float | bool]], object]


@dataclass(frozen=True, slots=True)
class Yes:
    """An approval that is not used up yet."""

    job: str
    tenant: str
    base: str
    era: int
    word: Command


@dataclass(frozen=True, slots=True)
class _Stand:
    """How a question stands in the store."""

    era: int
    word: Command | None
    left_s: float
    is_new: bool


class Approvals:
    """One boot's waiting calls."""

    def __init__(
        self,
        calls: StoreCalls,
        words: Words,
        desk: Desk,
        pauser: Pauser,
        parking: Parking,
        *,
        look_s: float = LOOK_S,
        wait_s: float = WAIT_S,
    ) -> None:
        self._calls, self._words, self._desk, self._pauser = calls, words, desk, pauser
        self._parking = parking
        self._look_s, self._wait_s = look_s, wait_s
        self._waiting: dict[str, int] = {}
        self._paces: dict[str, Pace] = {}
        #: Commands that were answered, and questions whose time was said to be over.
        self._told: dict[str, set[str]] = {}
        #: Words that a call of this boot was let through by, by their ids: the store may forget that they were used.
        self._used: OrderedDict[str, None] = OrderedDict()
        self._lifting: set[asyncio.Task[PauseReceipt]] = set()

    async def decided(
        self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json], verdict: Verdict
    ) -> Yes:
        """Return the yes to a call, once there is one; it is to be used up before the call is carried out.

        Raises CallError: PENDING (ask again), DENIED (a no, or nobody decided in time), QUOTA (too many questions),
        UNAVAILABLE.
        """
        ask = verdict.ask or Ask("wait", 3600.0)
        base = _digest(action, resource, facts)
        text = json.dumps(
            {
                "job": caller.job,
                "ask": base,
                "action": action,
                "resource": _short(resource),
                "rule": verdict.rule,
                "why": verdict.reason,
                "policy": verdict.policy,
                "how": ask.how,
                "attempt": caller.run.attempt,
                "node": self._desk.notary.node,
                "asked_at_ms": now_ms(),
            }
        )
        await self._pace(caller.attempt)
        stand = await self._look(caller, base, text, ask)
        if stand.is_new:
            self._tell_asked(caller, action, resource, verdict, f"{base}.{stand.era}")
        if stand.word is None and stand.left_s > 0:
            if ask.how == "requeue" and not caller.spec.at_most_once:
                self._parking.park(caller.run, stand.left_s)
                raise CallError(ErrorCode.PENDING, "a person has to decide; the job goes on with its next attempt")
            stand = await self._awaited(caller, base, text, ask)
        return self._answer(caller, base, action, resource, stand)

    async def use(self, yes: Yes) -> bool:
        """Use an approval up; False if another call has. Raises CallError(UNAVAILABLE)."""
        document: dict[str, object] = {"op": "use", "base": yes.base, "era": yes.era, "job": yes.job}
        if yes.word.id in self._used:
            return False
        (first,) = await self._calls.run("ask", self._keys(yes.job, yes.tenant), document)
        if first != 1 or yes.word.id in self._used:
            return False
        self._used[yes.word.id] = None
        while len(self._used) > _MOST_USED:
            self._used.popitem(last=False)
        return True

    def ended(self, attempt: str) -> None:
        """An attempt is over: nothing of it waits."""
        self._paces.pop(attempt, None)
        self._waiting.pop(attempt, None)
        self._told.pop(attempt, None)

    async def _pace(self, attempt: str) -> None:
        """A job that asks without end waits for it: the store is everybody's."""
        pace = self._paces.get(attempt)
        if pace is None:
            pace = self._paces[attempt] = Pace(_LOOKS_PER_S, MOST)
        await pace.turn()

    def _keys(self, job: str, tenant: str) -> tuple[str, str]:
        return self._calls.keys.ask(job), self._calls.keys.asks(tenant)

    async def _look(self, caller: Caller, base: str, text: str, ask: Ask) -> _Stand:
        document: dict[str, object] = {
            "op": "park",
            "base": base,
            "text": text,
            # Whoever decides reads this: it has to be what a node saw, not what somebody put into the store.
            "sig": self._desk.notary.signer.sign(Domain.QUESTION, text.encode()),
            "timeout": round(ask.timeout_s * 1000),
            "keep": KEEP_MS,
            "most": MOST,
            "job": caller.job,
        }
        reply = await self._calls.run("ask", self._keys(caller.job, caller.tenant), document)
        if reply[0] == -1:
            why = f"this job has asked {MOST} questions, and a job has no more"
            raise CallError(ErrorCode.QUOTA, why)
        era, _, word, expires, at, is_new = (text_of(part) for part in reply)
        return _Stand(
            int(era),
            self._word(caller, word, f"{base}.{era}"),
            # The store's word alone makes nobody wait longer than policy says.
            min((int(expires) - int(at)) / 1000, ask.timeout_s),
            is_new == "1",
        )

    def _word(self, caller: Caller, text: str, question: str) -> Command | None:
        word = self._words.read(text, caller.tenant) if text else None
        if word is None or word.ask != question or word.selector.value != caller.job:
            return None
        return word

    async def _awaited(self, caller: Caller, base: str, text: str, ask: Ask) -> _Stand:
        """Wait for the word, or for the end of its time. Raises CallError(PENDING)."""
        count = self._waiting.get(caller.attempt, 0)
        if count >= MOST_WAITING:
            raise CallError(ErrorCode.PENDING, f"{count} calls of this job wait for a person already; ask again")
        self._waiting[caller.attempt] = count + 1
        # A job that runs at most once has no next attempt to go on with: it stands still.
        frozen = ask.how != "wait"
        # A cancellation alone may get lost on its way through the store's client (cancelling.py).
        gone = asyncio.Event()
        caller.closing.append(gone.set)
        try:
            if frozen:
                await self._freeze(caller.run, "pause", "waits for a person's decision")
            return await self._polled(caller, base, text, ask, None if frozen else self._wait_s, gone)
        finally:
            if gone.set in caller.closing:
                caller.closing.remove(gone.set)
            if caller.attempt in self._waiting:
                self._waiting[caller.attempt] -= 1
            if frozen:
                # Also if this call is given up: nobody else lifts this hold.
                task = asyncio.get_running_loop().create_task(self._freeze(caller.run, "resume", "decided"))
                self._lifting.add(task)
                task.add_done_callback(self._lifting.discard)
                await asyncio.shield(task)

    async def _polled(
        self, caller: Caller, base: str, text: str, ask: Ask, longest_s: float | None, gone: asyncio.Event
    ) -> _Stand:
        loop = asyncio.get_running_loop()
        until_s = None if longest_s is None else loop.time() + longest_s
        over_s = loop.time() + ask.timeout_s
        while True:
            try:
                stand = await self._look(caller, base, text, ask)
            except CallError as error:
                # A job that stands still can't ask again: its question waits for the store.
                if error.error is not ErrorCode.UNAVAILABLE or until_s is not None:
                    raise
            else:
                if stand.word is not None or stand.left_s <= 0 or loop.time() >= over_s:
                    return stand
            if caller.run.stopping or caller.run.proved.done() or gone.is_set():
                raise CallError(ErrorCode.ENDED, "this attempt ends")
            if until_s is not None and loop.time() >= until_s:
                raise CallError(ErrorCode.PENDING, "a person has to decide; ask again")
            await asyncio.sleep(self._look_s)

    async def _freeze(self, run: Run, op: str, reason: str) -> PauseReceipt:
        order = Order("pause" if op == "pause" else "resume", "approval", reason=reason, by=self._by)
        return await self._pauser.carry_out(run, order)

    @property
    def _by(self) -> str:
        return f"node {self._desk.notary.node}"

    def _answer(self, caller: Caller, base: str, action: str, resource: str, stand: _Stand) -> Yes:
        word, question = stand.word, f"{base}.{stand.era}"
        told = self._told.setdefault(caller.attempt, set())
        if word is None:
            if question not in told:
                told.add(question)
                self._tell_answered(caller, action, resource, question, "timed_out", "")
            raise CallError(ErrorCode.DENIED, "nobody decided in time, which is a no")
        outcome = "approved" if word.op == "approve" else "denied"
        if word.id not in told:
            told.add(word.id)
            notary = self._desk.notary
            self._desk.reply(
                notary.pause_receipt(
                    caller.job, word.id, word.op, outcome, attempt=caller.run.attempt, reason=word.reason, by=word.by
                )
            )
            self._tell_answered(caller, action, resource, question, outcome, word.by)
        if word.op != "approve":
            reason = f": {word.reason}" if word.reason else ""
            raise CallError(ErrorCode.DENIED, f"denied by {word.by}{reason}")
        return Yes(caller.job, caller.tenant, base, stand.era, word)

    def _tell_asked(self, caller: Caller, action: str, resource: str, verdict: Verdict, question: str) -> None:
        self._desk.record("ask", caller.attempt, action=action, resource=resource, rule=verdict.rule, ask=question)
        detail = {"ask": question, "action": action, "resource": resource[:256], "rule": verdict.rule}
        asked = self._told.setdefault(caller.attempt, set())
        asked.add(f"asked {question}")
        # The tenant's stream hears of a few: a job may ask as it likes, and must push nothing out of it (attack 32).
        self._tell(EventType.JOB_ASKED, caller, detail, loud=len(asked) <= MOST_LOUD)

    def _tell_answered(self, caller: Caller, action: str, resource: str, question: str, outcome: str, by: str) -> None:
        self._desk.record("answer", caller.attempt, action=action, ask=question, outcome=outcome, by=by)
        detail = {"ask": question, "action": action, "resource": resource[:256], "outcome": outcome, "by": by}
        self._tell(EventType.JOB_ANSWERED, caller, detail, loud=bool(by))

    def _tell(self, kind: EventType, caller: Caller, detail: dict[str, str], *, loud: bool) -> None:
        facts: dict[str, str | int | float | bool] = {**detail}
        if not loud:
            self._desk.told(caller.job, caller.run.attempt, kind, facts)
            return
        event = self._desk.notary.event(kind, job=caller.job, attempt=caller.run.attempt, detail=facts)
        self._desk.emit(caller.tenant, event)


def _short(resource: str) -> str:
    """Return what a person is shown of a name; what is left out is said, for it may be what matters."""
    left = len(resource) - _MOST_TEXT
    return resource if left <= 0 else f"{resource[: _MOST_TEXT - 40]}… and {left + 40} characters more"


def _digest(action: str, resource: str, facts: Mapping[str, Json]) -> str:
    """What is asked, in one form: another argument is another question."""
    return hashlib.sha256(codec.dump([action, resource, dict(facts)])).hexdigest()[:32]
