"""The order of a drain: the turn under way first, what it claimed goes back, and only then the answer (A-F03)."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis

from node_agent.dispatch import Dispatcher, TurnStore
from node_agent.lanes import Lanes
from node_agent.mail import Mail
from node_agent.operating import Operator
from node_agent.records import Notary, Signed
from node_agent.run import Run
from node_agent.runs import Runs
from node_agent.sequences import Sequences
from runner import orders
from runner.signing import Signer
from runner.wire.card import TrustedKey
from runner.wire.command import Command, Selector
from runner.wire.keys import Keys
from runner.wire.receipt import NodeReceipt
from tests.support.wait import await_until

KEY = TrustedKey("k", "p", ("operate",), ("*",))


class Post:
    """Keeps what the node says instead of sending it."""

    def __init__(self) -> None:
        self.answers: list[NodeReceipt] = []

    def operated(self, receipt: NodeReceipt) -> None:
        """Keep an answer."""
        self.answers.append(receipt)

    def emit(self, tenant: str | None, event: Signed) -> None:
        """Let an event go."""


class Crew:
    """Attempts of one boot, by hand."""

    def __init__(self) -> None:
        self.held: list[Run] = []

    def runs(self) -> tuple[Run, ...]:
        """Return what is held now."""
        return tuple(self.held)


class Stand:
    """An operator whose store, crew and mail are in the test's hands."""

    def __init__(self, folder: Path) -> None:
        self.post, self.crew = Post(), Crew()
        self.mark = folder / "drained"
        self.dispatcher = Dispatcher(cast("TurnStore", None), 2, tuple, lambda: None)
        self.sequences = Sequences(folder / "book", time.time_ns() // 1_000_000)
        self.operator = Operator(
            cast("Redis", None),
            Keys(),
            self.mark,
            Lanes("n1", ("*",), {}, "A"),
            self.dispatcher,
            cast("Runs", self.crew),
            Notary(Signer(secrets.token_bytes(32)), "n1", "b00t01234567", "A"),
            cast("Mail", self.post),
            self.sequences,
            lambda command, payload, signature: KEY,
        )


def order(grace_s: float | None = None) -> Command:
    """Return a drain of n1."""
    return orders.command("drain", Selector("node", "n1"), None, grace_s=grace_s or 0.0, force=grace_s is not None)


def test_the_answer_waits_for_the_turn_and_for_what_it_claimed(tmp_path: Path) -> None:
    """A claim that arrives after the order is handed back, acknowledged, and counted before the node says done."""

    async def drain() -> None:
        stand = Stand(tmp_path)
        stand.dispatcher.turning = True
        task = asyncio.create_task(stand.operator.carry_out(order(), KEY))
        await await_until(lambda: stand.operator.draining, "the node to claim nothing more")
        late = Run("main-x", 1, 0, 1)
        stand.crew.held.append(late)
        assert stand.post.answers == []
        stand.dispatcher.turning = False
        await await_until(lambda: late.cause == "drain", "the claim to be handed back")
        assert stand.post.answers == []
        stand.crew.held.clear()
        late.acknowledged.set_result(True)
        await task
        await await_until(lambda: len(stand.post.answers) == 2, "the second answer")
        assert [(one.outcome, one.handed_back) for one in stand.post.answers] == [("done", 1), ("done", 0)]
        assert stand.operator.state == "drained"
        await stand.operator.close()
        stand.sequences.close()

    asyncio.run(drain())


def test_what_can_not_be_remembered_is_refused(tmp_path: Path) -> None:
    """Without the mark on its disk a restart would undrain the node, so it says no and goes on."""

    async def drain() -> None:
        stand = Stand(tmp_path)
        stand.mark.mkdir()
        stand.operator.draining = False
        await stand.operator.carry_out(order(), KEY)
        (answer,) = stand.post.answers
        assert (answer.outcome, stand.operator.draining) == ("refused", False)
        assert "free its disk" in answer.reason
        stand.sequences.close()

    asyncio.run(drain())


@pytest.mark.parametrize(
    ("key", "word"),
    [(TrustedKey("k", "p", ("operate",), ("acme",)), "some tenants"), (KEY, "this is node n1")],
)
def test_who_or_what_it_is_not_for_is_refused(tmp_path: Path, key: TrustedKey, word: str) -> None:
    """A key of some tenants, and an order that stands in the wrong node's stream."""

    async def drain() -> None:
        stand = Stand(tmp_path)
        chosen = Selector("node", "n1" if key is not KEY else "n2")
        await stand.operator.carry_out(orders.command("drain", chosen, None), key)
        (answer,) = stand.post.answers
        assert (answer.outcome, stand.operator.draining) == ("refused", False)
        assert word in answer.reason
        stand.sequences.close()

    asyncio.run(drain())
