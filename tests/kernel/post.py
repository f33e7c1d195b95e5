"""Nodes of a fleet as far as mail and signals go: real store, real keys and cards, no agents. Called by their tests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis.asyncio import Redis

from node_agent.kernel.bell import Bell
from node_agent.kernel.mail import Mail
from node_agent.kernel.mailstore import HOLD_MS, MailStore
from node_agent.kernel.seals import Seals
from node_agent.kernel.seams import Around
from node_agent.kernel.signalroad import Road
from node_agent.kernel.signals import Signals
from node_agent.kernel.storecalls import StoreCalls
from node_agent.kernel.watch import Watch
from node_agent.pausing import Pauser
from node_agent.records import Notary
from node_agent.run import Run
from runner.signing import Signer
from runner.wire.card import NodeCard
from runner.wire.keys import Keys
from runner.wire.spec import JobSpec
from tests.agent import build
from tests.kernel import rig
from tests.support.valkey import Valkey

__all__ = ["Fleet", "Node", "fleet"]


@dataclass(slots=True)
class Fleet:
    """What every node knows of the others: cards, and jobs as their keys signed them."""

    cards: list[NodeCard] = field(default_factory=list)
    jobs: dict[str, JobSpec] = field(default_factory=dict)

    async def fleet_cards(self, *, fresh: bool) -> Sequence[NodeCard]:
        """Return all cards."""
        return self.cards

    async def known(self, job: str, tenant: str) -> JobSpec | None:
        """Return a job of the tenant."""
        spec = self.jobs.get(job)
        return spec if spec is not None and spec.tenant == tenant else None


@dataclass(slots=True)
class Node:
    """One node's mail."""

    name: str
    around: Around
    bell: Bell
    mail: Mail
    store: MailStore
    seals: Seals
    signals: Signals
    watch: Watch
    runs: list[Run]


@asynccontextmanager
async def fleet(
    store: Valkey,
    *names: str,
    hold_ms: int = HOLD_MS,
    known: Fleet | None = None,
    clock: Callable[[], float] = time.monotonic,
    password: str | None = None,
    **served: tuple[str, ...],
) -> AsyncIterator[dict[str, Node]]:
    """Yield nodes by name; ``served``: the tenants of a node, by default every one.

    ``password``: of their users in the store, agent-NAME; by default they are its default one.
    """
    known, clients = known or Fleet(), []
    nodes: dict[str, Node] = {}
    for name in names:
        user = f"agent-{name}" if password is not None else None
        client = Redis(unix_socket_path=str(store.socket), username=user, password=password)
        clients.append(client)
        nodes[name] = _node(known, name, client, build.signer(), served.get(name, ("*",)), hold_ms, clock)
    for node in nodes.values():
        node.bell.start()
    try:
        yield nodes
    finally:
        for node in nodes.values():
            for stop in node.around.stopping:
                await stop()
            await node.bell.stop()
        for client in clients:
            await client.aclose()


def _node(
    known: Fleet,
    name: str,
    client: Redis,
    key: Signer,
    tenants: tuple[str, ...],
    hold_ms: int,
    clock: Callable[[], float],
) -> Node:
    known.cards.append(NodeCard(name, key.public, "B", time.time_ns() // 1_000_000 + 3_600_000, tenants))
    runs: list[Run] = []
    around = rig.around(client, node=name, notary=Notary(key, name, f"boot-{name}", "B"), runs=lambda: tuple(runs))
    bell = Bell(client, Keys(), name)
    seals = Seals(around.notary, known)
    store = MailStore(StoreCalls(client, Keys()), name, hold_ms)
    mail = Mail(around, store, seals, bell, look_s=0.05 if hold_ms < HOLD_MS else 5.0, clock=clock)
    road = Road(client, Keys(), name, bell, seals)
    signals = Signals(around, Pauser(around.notary, around), road, clock=clock)
    return Node(name, around, bell, mail, store, seals, signals, Watch(around, seals), runs)


def texts(rows: Mapping[str, object]) -> list[object]:
    """Return the bodies of an answer of mail.receive."""
    letters = rows["letters"]
    assert isinstance(letters, list)
    return [letter["body"] for letter in letters]
