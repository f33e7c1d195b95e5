"""Budgets: what the jobs of a key have used together, in the whole fleet, and what happens when it is used up.

Called by the supervisor (start and end of an attempt), the egress line (what models took), tool calls, and its own
clock. Every node adds what its jobs used to one counter in the store and reads the sum in the same call, so that all of
them stop within a step of each other. Must never let a job run on that has passed its bound, nor lift the hold for a
word that no key with the right to operate signed.

A job goes over its bound by at most what its node's jobs use between two tellings: half a second of wall and CPU time
(STEP_S), and of requests and tokens one report of the egress process, that is what ended within a tenth of a second.
While the store is away nothing more is known, and the lease ends those jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from node_agent.cancelling import end_all
from node_agent.containment.plan import Usage
from node_agent.doornews import Metered
from node_agent.kernel import charging
from node_agent.kernel.account import Account, Member, Over
from node_agent.kernel.approvals import Desk
from node_agent.kernel.budgetstore import BudgetStore
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.prices import Prices
from node_agent.kernel.storecalls import StoreCalls
from node_agent.kernel.table import Entry
from node_agent.kernel.words import Words
from node_agent.pausing import Order, Pauser
from node_agent.run import KillOrder, Run, now_ms
from runner.wire import ids
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.command import Command
from runner.wire.event import EventType

__all__ = ["Budgets", "ShowBudget"]

log = logging.getLogger(__name__)

#: How often wall and CPU time are charged and the sums are read, in seconds; and the least time between two tellings.
STEP_S: Final = 0.5
_LEAST_S: Final = 0.02
#: Budgets that are told at a time: the kernel has one connection.
_AT_ONCE: Final = 8
#: How long after an attempt's end late reports of it are taken, in seconds.
_LATE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class ShowBudget:
    """budget.show has no fields."""


class Budgets:
    """The budgets of one boot's jobs."""

    def __init__(
        self,
        calls: StoreCalls,
        words: Words,
        desk: Desk,
        pauser: Pauser,
        boot: str,
        prices: Prices | None = None,
        *,
        step_s: float = STEP_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._desk, self._pauser = desk, pauser
        self._store = BudgetStore(calls, words, f"{desk.notary.node}/{boot}")
        self._prices = prices or Prices()
        self._step_s = step_s
        self._clock = clock or asyncio.get_running_loop().time
        #: Tells the processes of a job that listen (signal BUDGET), before it stands still.
        self.notify: Callable[[Run, str], None] = lambda _run, _why: None
        self._accounts: dict[tuple[str, str], Account] = {}
        self._by_attempt: dict[str, tuple[Account, Member]] = {}
        self._stirred = asyncio.Event()
        #: What has changed since the last look: one job's many reports must not have every budget looked at.
        self._moved: set[Account] = set()
        self._turned = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._orders: set[asyncio.Task[None]] = set()

    # The supervisor's side.

    async def begin(self, run: Run) -> None:
        """Return once a job may run, as far as its budget goes, or is told to end. A job without one: at once.

        Its worker stands and waits; nothing of the job has run.
        """
        spec = run.spec
        if spec is None or spec.budget is None:
            return
        account = self._accounts.setdefault((spec.tenant, spec.budget.key), Account(spec.tenant, spec.budget.key))
        attempt = ids.attempt_name(run.job_id, run.attempt)
        member = Member(run, attempt, spec.budget, looked_s=self._clock())
        account.members[attempt] = member
        account.known = False
        self._by_attempt[attempt] = (account, member)
        self._wake(account)
        await self._until_room(account, member)
        member.waits = False
        member.looked_s = self._clock()

    def ended(self, run: Run, usage: Usage | None) -> None:
        """Charge what an attempt used that was not charged yet. What the egress process tells later is taken, too."""
        found = self._by_attempt.get(ids.attempt_name(run.job_id, run.attempt))
        if found is None:
            return
        account, member = found
        if usage is not None and not member.waits:
            charging.charge_seconds(account, member, self._clock())
            charging.charge_cpu(account, member, usage.cpu_s)
        member.ended_s = self._clock()
        account.leave(member.attempt)
        self._wake(account)

    # What is used.

    def metered(self, told: Metered) -> None:
        """Charge what went through an attempt's door."""
        found = self._by_attempt.get(told.attempt)
        if found is None:
            return
        account, member = found
        account.charge("requests", told.requests)
        # Of an answer that does not say its tokens, each byte counts as one: it has not more of them.
        inward = told.tokens_in + told.unknown_sent_bytes
        outward = told.tokens_out + told.unknown_bytes
        account.charge("tokens", inward + outward)
        bound = member.budget.bounds.get("cost_usd")
        if bound is not None and (inward or outward):
            cost = charging.cost_usd(self._prices, told, member, bound, inward, outward)
            account.charge("cost_usd", cost)
        self._wake(account)

    async def spend(self, caller: Caller, unit: str, amount: float = 1.0) -> None:
        """Charge before something is done, and return once there was room for it. Raises CallError(ENDED)."""
        found = self._by_attempt.get(caller.attempt)
        if found is None:
            return
        account, member = found
        account.charge(unit, amount)
        if unit in member.budget.bounds:
            account.known = False
            self._wake(account)
            await self._until_room(account, member)
            if member.run.stopping:
                raise CallError(ErrorCode.ENDED, "this attempt ends")

    # The part.

    def entries(self) -> tuple[Entry, ...]:
        """Return this part's calls."""
        return (
            Entry(
                "budget.show",
                ShowBudget,
                self._show,
                "What the job's budget has left, over all jobs that share it.",
                "{key, on_hit, units: {unit: {used, bound, left}}}",
                errors=(ErrorCode.NOT_FOUND,),
            ),
        )

    def start(self) -> None:
        """Begin to look after the clock. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Tell the store what was used, and end. Idempotent."""
        if self._task is None:
            return
        await end_all([self._task, *self._orders])
        self._task = None
        for account in self._accounts.values():
            if account.pending or account.sending:
                try:
                    await self._store.tell(account)
                except CallError:
                    log.warning("what was used of budgets is not told, the store is away", extra={"key": account.key})
                    return

    def _show(self, caller: Caller, _: object) -> Json:
        found = self._by_attempt.get(caller.attempt)
        if found is None:
            raise CallError(ErrorCode.NOT_FOUND, "this job has no budget")
        account, member = found
        units: dict[str, Json] = {unit: dict(row) for unit, row in account.view(member.budget).items()}
        return {"key": account.key, "on_hit": member.budget.on_hit, "units": units}

    async def _run(self) -> None:
        loop, all_s = asyncio.get_running_loop(), 0.0
        while True:
            if not self._accounts:
                await self._stirred.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(all_s):
                    await self._stirred.wait()
            self._stirred.clear()
            moved, self._moved = self._moved, set()
            if loop.time() >= all_s:
                all_s, moved = loop.time() + self._step_s, set(self._accounts.values())
            await self._step([account for account in self._accounts.values() if account in moved])
            await asyncio.sleep(_LEAST_S)

    async def _step(self, live: Sequence[Account]) -> None:
        """Charge the time, tell and read these budgets, act on what they say."""
        for account in live:
            for member in tuple(account.members.values()):
                charging.charge_seconds(account, member, self._clock())
                # Each may have read hundreds of processes: the loop belongs to others in between (attack 41).
                await asyncio.sleep(0)
        places = asyncio.Semaphore(_AT_ONCE)

        async def looked(account: Account) -> None:
            async with places:
                await self._look(account)

        await asyncio.gather(*map(looked, live))
        self._forget()
        async with self._turned:
            self._turned.notify_all()

    async def _look(self, account: Account) -> None:
        try:
            await self._store.tell(account)
            await self._judge(account)
        except CallError as error:
            log.debug("a budget is not told", extra={"key": account.key, "error": str(error)})
        except Exception:
            # What is odd about one budget must not end the look after all others.
            log.exception("a budget can't be looked after", extra={"key": account.key})

    async def _judge(self, account: Account) -> None:
        """Hold, end or let go on first; what can't be written down or told must not let a job run on."""
        members = tuple(account.members.values())
        for member in members:
            over = account.over(member.budget)
            if not member.busy and not member.run.stopping and not member.waits:
                self._act(account, member, over)
            elif member.waits and over is not None and self._ends(account, member):
                self._kill(account, member, over)
        # Who was killed just now is a member no more a moment later.
        self._answer(account, members)
        for member in members:
            over = account.over(member.budget)
            # After a no there is nothing left to decide.
            if over is not None and account.denied is None:
                await self._tell_hit(account, member, over)

    def _act(self, account: Account, member: Member, over: Over | None) -> None:
        holds = "budget" in member.run.holders
        if over is not None and self._ends(account, member):
            self._kill(account, member, over)
        elif over is not None and not holds:
            self._order(account, member, "pause", f"budget {account.key}: {over}")
        elif over is None and holds:
            self._order(account, member, "resume", f"budget {account.key} has room")

    def _ends(self, account: Account, member: Member) -> bool:
        return member.budget.on_hit == "kill" or account.denied is not None

    def _kill(self, account: Account, member: Member, over: Over) -> None:
        denied = account.denied
        by = denied.by if denied is not None else self._by
        member.run.kill(KillOrder("", now_ms(), reason=f"budget {account.key}: {over}", by=by))

    def _order(self, account: Account, member: Member, op: str, reason: str) -> None:
        member.busy = True
        task = asyncio.get_running_loop().create_task(self._carry_out(account, member, op, reason))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _carry_out(self, account: Account, member: Member, op: str, reason: str) -> None:
        order = Order("pause" if op == "pause" else "resume", "budget", reason=reason, by=self._by)
        if op == "pause":
            self.notify(member.run, reason)
        try:
            receipt = await self._pauser.carry_out(member.run, order)
            if op == "pause" and receipt.outcome == "refused" and not member.run.stopping:
                # What can't stand still would spend on.
                why = f"{reason}; {receipt.reason}"
                member.run.kill(KillOrder("", now_ms(), reason=why, by=self._by))
        finally:
            member.busy = False
        self._wake(account)

    @property
    def _by(self) -> str:
        return f"node {self._desk.notary.node}"

    async def _tell_hit(self, account: Account, member: Member, over: Over) -> None:
        """Say once in the fleet, and once after each word, that a budget is used up."""
        era = len(account.words)
        if account.hit_told >= era:
            return
        try:
            first = await self._store.hit(account, over)
        except CallError:
            return
        account.hit_told = era
        self._desk.record("budget.hit", member.attempt, key=account.key, unit=over.unit, used=over.used)
        if first:
            detail: dict[str, str | int | float | bool] = {
                "key": account.key,
                "unit": over.unit,
                "used": round(over.used, 6),
                "bound": over.bound,
                "on_hit": member.budget.on_hit,
            }
            self._tell(EventType.BUDGET_HIT, account, member, detail)

    def _answer(self, account: Account, members: Sequence[Member]) -> None:
        """Answer the commands whose words were found, once for each job that was here then.

        Nobody waits for the answer to a command that has run out: a job that joins a budget is no news of old words.
        """
        for word_id, attempts in tuple(account.unanswered.items()):
            word = account.words[word_id]
            attempts.intersection_update(member.attempt for member in members)
            if word.expires_at_ms < now_ms():
                attempts.clear()
            for member in members:
                if member.attempt in attempts and not member.busy:
                    attempts.discard(member.attempt)
                    self._reply(account, member, word)
            if not attempts:
                del account.unanswered[word_id]

    def _reply(self, account: Account, member: Member, word: Command) -> None:
        outcome = "approved" if word.op == "approve" else "denied"
        run, over = member.run, account.over(member.budget)
        reason = word.reason
        if word.op == "approve" and over is not None:
            reason = f"budget {account.key}: {over}, still"
        elif word.op == "deny" and over is None:
            reason = f"budget {account.key} has room; its jobs are killed once it is used up"
        receipt = self._desk.notary.pause_receipt(
            run.job_id, word.id, word.op, outcome, attempt=run.attempt, reason=reason, by=word.by
        )
        self._desk.reply(receipt)
        self._desk.record("budget.word", member.attempt, key=account.key, outcome=outcome, by=word.by)
        detail: dict[str, str | int | float | bool] = {"key": account.key, "outcome": outcome, "by": word.by}
        self._tell(EventType.BUDGET_ANSWERED, account, member, detail)

    def _tell(
        self, kind: EventType, account: Account, member: Member, detail: dict[str, str | int | float | bool]
    ) -> None:
        event = self._desk.notary.event(kind, job=member.run.job_id, attempt=member.run.attempt, detail=detail)
        self._desk.emit(account.tenant, event)

    async def _until_room(self, account: Account, member: Member) -> None:
        async with self._turned:
            while not member.run.stopping and (not account.known or account.over(member.budget) is not None):
                await self._turned.wait()

    def _forget(self) -> None:
        """Forget attempts that ended a while ago, and budgets that nobody here spends from."""
        now_s = self._clock()
        for attempt, (_, member) in tuple(self._by_attempt.items()):
            if member.ended_s is not None and now_s > member.ended_s + _LATE_S:
                del self._by_attempt[attempt]
        kept = {id(account) for account, _ in self._by_attempt.values()}
        for name, account in tuple(self._accounts.items()):
            if id(account) not in kept and not account.pending and not account.sending:
                del self._accounts[name]

    def _wake(self, account: Account) -> None:
        self._moved.add(account)
        self._stirred.set()
