"""A node of the kernel's store parts in one process: quotas, approvals, budgets on a real store, jobs on paper.

Called by the tests of quotas, approvals and budgets. What a freeze does to processes is tested in tests/isolation and
tests/e2e; here a job is a Run with a tree that notes what it was told.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from redis.asyncio import Redis

from node_agent.containment.errors import GroupError
from node_agent.containment.freezing import Still
from node_agent.kernel.approvals import Approvals, Desk
from node_agent.kernel.budgets import Budgets
from node_agent.kernel.caller import Caller
from node_agent.kernel.deciding import Deciding
from node_agent.kernel.parking import Parking
from node_agent.kernel.prices import Prices
from node_agent.kernel.quotas import Quotas
from node_agent.kernel.storecalls import StoreCalls
from node_agent.kernel.words import Words
from node_agent.lifecycle import Ending
from node_agent.pausing import Pauser
from node_agent.policy import parse
from node_agent.records import Notary, Signed
from node_agent.run import Proof, Run, Tree, now_ms
from node_agent.storelink import answered
from runner.signing import Signer
from runner.wire import ids, record
from runner.wire.card import TrustedKey
from runner.wire.command import Command, Selector
from runner.wire.envelope import Domain
from runner.wire.event import Event
from runner.wire.flow import Budget
from runner.wire.grants import Grants
from runner.wire.keys import Keys
from runner.wire.receipt import PauseReceipt
from runner.wire.spec import JobSpec
from runner.wire.states import State
from tests.agent import build
from tests.kernel import rig
from tests.support.valkey import Valkey
from tests.support.wait import await_until

__all__ = ["Node", "Paper", "decision", "job_of", "node", "put", "raw", "run", "say", "until", "worded"]

T = TypeVar("T")
KEYS = Keys()


@dataclass(eq=False)
class Paper:
    """The tree of a job that does nothing: notes what it was told."""

    run: Run | None = None
    told: list[str] = field(default_factory=list)
    used_s: float = 0.0
    #: Nothing can freeze it.
    cannot: bool = False

    def terminate(self) -> None:
        """Note it."""
        self.told.append("term")

    def kill(self) -> None:
        """Die, with proof."""
        self.told.append("kill")
        if self.run is not None and not self.run.proved.done():
            self.run.settle(Proof(Ending(State.KILLED, "kill"), None, now_ms()))

    def sockets(self) -> int:
        """None."""
        return 0

    def cpu_s(self) -> float:
        """What the test says."""
        return self.used_s

    async def freeze(self, frozen: bool, timeout_s: float = 1.0) -> Still:
        """Stand still, or go on."""
        if self.cannot:
            raise GroupError("nothing here can")
        self.told.append("freeze" if frozen else "thaw")
        return Still(True, 1, "paper")


@dataclass(eq=False)
class Node:
    """One node's parts."""

    name: str
    redis: Redis
    operator: Signer
    stranger: Signer
    quotas: Quotas
    approvals: Approvals
    budgets: Budgets
    deciding: Deciding
    recorder: rig.FakeRecorder
    events: list[tuple[str | None, Event]]
    receipts: list[PauseReceipt]
    #: Types of the events of jobs' own streams.
    quiet: list[str]

    def caller(self, spec: JobSpec | None = None, *, attempt: int = 1, **grants: object) -> Caller:
        """Return a session of a running job with a paper tree."""
        who = rig.caller(spec, attempt=attempt, **grants)  # type: ignore[arg-type] # tests name real fields
        tree = Paper()
        tree.run = who.run
        who.run.tree = cast("Tree", tree)
        return who

    def types(self) -> list[str]:
        """The types of the events in order."""
        return [event.type for _, event in self.events]


def paper(who: Caller) -> Paper:
    """The tree of a caller's job."""
    return cast("Paper", who.run.tree)


@asynccontextmanager
async def node(
    valkey: Valkey,
    name: str = "n1",
    *,
    policy: str = "",
    operator: Signer | None = None,
    prices: Prices | None = None,
    life_ms: int = 20_000,
    keep_s: float = 5.0,
    wait_s: float = 1.0,
    look_s: float = 0.02,
    step_s: float = 0.05,
    password: str | None = None,
) -> AsyncIterator[Node]:
    """Start a node's parts; two of them share the store alone."""
    key, stranger = operator or build.signer(), build.signer()
    trust = {
        key.key_id: TrustedKey(key.key_id, key.public, ("operate",), ("main",), ("*",)),
        stranger.key_id: TrustedKey(stranger.key_id, stranger.public, ("enqueue", "kill"), ("main",), ("*",)),
    }
    user = None if password is None else f"agent-{name}"
    redis = Redis(unix_socket_path=str(valkey.socket), username=user, password=password)
    notary = Notary(build.signer(), name, f"boot-{name}", "A")
    events: list[tuple[str | None, Event]] = []
    receipts: list[PauseReceipt] = []
    recorder = rig.FakeRecorder()

    def emit(tenant: str | None, signed: Signed) -> None:
        events.append((tenant, record.loads(Event, signed.payload)))

    async def unlogged(*_: object) -> None:
        return None

    class _Mail:
        log, answer = unlogged, unlogged

        def emit(self, tenant: str | None, event: Signed) -> None:
            emit(tenant, event)

    pauser = Pauser(notary, _Mail())
    calls, words = StoreCalls(redis, KEYS), Words(name, trust)
    quiet: list[str] = []
    desk = Desk(notary, emit, receipts.append, recorder.about, lambda _job, _number, kind, _detail: quiet.append(kind))
    quotas = Quotas(calls, f"boot-{name}", keep_s, life_ms)
    parking = Parking(calls, words)
    approvals = Approvals(calls, words, desk, pauser, parking, look_s=look_s, wait_s=wait_s)
    budgets = Budgets(calls, words, desk, pauser, f"boot-{name}", prices, step_s=step_s)
    deciding = Deciding(parse("version = 1\n" + policy).calls, name, quotas, approvals)
    budgets.start()
    try:
        yield Node(name, redis, key, stranger, quotas, approvals, budgets, deciding, recorder, events, receipts, quiet)
    finally:
        await budgets.stop()
        await quotas.stop()
        await parking.stop()
        await redis.aclose()


def job_of(budget: Budget | None = None, **grants: object) -> JobSpec:
    """A job with a budget."""
    return build.job(budget=budget, grants=Grants(**grants))  # type: ignore[arg-type] # tests name real fields


def decision(
    op: Literal["approve", "deny"],
    *,
    job: str = "",
    ask: str | None = None,
    budget: str | None = None,
    add: dict[str, float] | None = None,
    reason: str = "",
) -> Command:
    """An approve or deny of now."""
    at_ms = now_ms()
    return Command(
        id=ids.new_command_id(),
        op=op,
        selector=Selector("tenant", "main") if budget is not None else Selector("job", job),
        issued_at_ms=at_ms,
        expires_at_ms=at_ms + 3_600_000,
        sequence=at_ms * 1000,
        by="ann",
        reason=reason,
        ask=ask,
        budget=budget,
        add=add or {},
    )


async def say(on: Node, command: Command, signer: Signer | None = None) -> list[str]:
    """Write a word down as the client does; return what the script says."""
    word = worded(command, signer or on.operator)
    tenant, job = "main", command.selector.value
    key = KEYS.budget(tenant, command.budget) if command.budget is not None else KEYS.ask(job)
    document: dict[str, object] = {
        "form": "budget" if command.budget is not None else "ask",
        "word": word,
        "ask": command.ask or "",
        "job": job,
        "key": command.budget or "",
        "command": command.id,
    }
    reply = await StoreCalls(on.redis, KEYS).run("decide", (key, KEYS.asks(tenant), KEYS.due()), document)
    return [part.decode() if isinstance(part, bytes) else str(part) for part in reply]


async def question(on: Node, job: str) -> tuple[str, dict[str, Any]]:
    """The newest question of a job: its id and what it says."""
    table = cast("dict[bytes, bytes]", await answered(on.redis.hgetall(KEYS.ask(job))))
    found = sorted(name.decode()[2:] for name in table if name.startswith(b"a:"))
    assert found
    newest = max(found, key=lambda name: int(name.rpartition(".")[2]))
    return newest, json.loads(table[f"a:{newest}".encode()])


async def until(what: Callable[[], bool], told: str) -> None:
    """Wait until something is so."""
    await await_until(what, told, 5.0)


async def looks(on: Node, who: Caller) -> None:
    """Wait until the node has looked at a job's budget three times more."""
    account, _ = on.budgets._by_attempt[who.attempt]
    seen = account.batch
    await until(lambda: account.batch >= seen + 3, "three looks")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine."""
    return asyncio.run(work)


def worded(command: Command, signer: Signer) -> str:
    """A command as it lies in the store."""
    payload = record.dumps(command)
    return f"{signer.sign(Domain.COMMAND, payload)} {payload.decode()}"


async def raw(on: Node, key: str, field: str) -> str:
    """One field of a hash."""
    return cast("bytes", await answered(on.redis.hget(key, field))).decode()


async def put(on: Node, key: str, field: str, text: str) -> None:
    """Write into the store as nobody should."""
    await answered(on.redis.hset(key, field, text))
