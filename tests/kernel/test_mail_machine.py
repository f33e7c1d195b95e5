"""A mailbox against a plain model: whatever is called in whatever order, no letter is lost or had twice."""

from __future__ import annotations

import asyncio
from typing import ClassVar, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from node_agent.kernel.caller import Caller
from node_agent.kernel.mailstore import MOST_TIMES
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.grants import MailGrant
from tests.agent import build
from tests.kernel import rig
from tests.kernel.post import Node, fleet
from tests.support.valkey import Valkey

WHO = st.integers(0, 3)
Answer = dict[str, Json]


class Letters:
    """The model: letters in order, who has which, how often each was given out."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.holder: dict[int, int] = {}
        self.times: dict[int, int] = {}
        self.dead: set[int] = set()

    def next(self) -> int | None:
        """The letter that the next receiver gets: what was given back before what was never out, oldest first."""
        free = [number for number in self.order if number not in self.holder]
        back = [number for number in free if self.times.get(number)]
        while back and self.times[back[0]] >= MOST_TIMES:
            self.dead.add(back[0])
            self.order.remove(back[0])
            free.remove(back[0])
            del back[0]
        return next(iter(back or free), None)


class Machine(RuleBasedStateMachine):
    """Two nodes with two jobs each, which share one mailbox."""

    store: ClassVar[Valkey]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.model = Letters()
        self.sent = 0
        self.entries: dict[int, str] = {}
        self.jobs: list[Caller] = []
        self.fleet = fleet(self.store, "n1", "n2")
        self.nodes: list[Node] = []

    @initialize()
    def begin(self) -> None:
        """Two nodes with two jobs each, and an empty store."""
        with self.store.client() as client:
            client.flushall()
        self.nodes = list(self.loop.run_until_complete(self.fleet.__aenter__()).values())
        self.jobs = [rig.caller(build.job(), mail=(MailGrant("desk"),)) for _ in range(4)]

    def ask(self, who: int, op: str, **fields: object) -> Answer:
        """One call of a job on its node."""
        entries = self.nodes[who % 2].mail.entries()
        call = rig.ask(entries, self.jobs[who], f"mail.{op}", box="desk", **fields)
        return cast("Answer", self.loop.run_until_complete(call))

    def refused(self, who: int, op: str, number: int) -> ErrorCode:
        """One call that must be refused."""
        entries = self.nodes[who % 2].mail.entries()
        call = rig.refused(entries, self.jobs[who], f"mail.{op}", box="desk", id=self.entries.get(number, "1-1"))
        return self.loop.run_until_complete(call)

    @rule(who=WHO)
    def send(self, who: int) -> None:
        """A letter goes in."""
        self.ask(who, "send", body=self.sent)
        self.model.order.append(self.sent)
        self.sent += 1

    @rule(who=WHO)
    def receive(self, who: int) -> None:
        """The next letter comes out, to one job."""
        expected = self.model.next()
        rows = cast("list[Answer]", self.ask(who, "receive")["letters"])
        assert [row["body"] for row in rows] == ([] if expected is None else [expected])
        if expected is not None:
            self.model.times[expected] = self.model.times.get(expected, 0) + 1
            assert rows[0]["times"] == self.model.times[expected]
            self.model.holder[expected] = who
            self.entries[expected] = str(rows[0]["id"])

    @rule(who=WHO, pick=st.integers(0, 9), op=st.sampled_from(("ack", "back", "keep")))
    def handle(self, who: int, pick: int, op: str) -> None:
        """Only its holder can do anything with a letter."""
        number = pick % (self.sent or 1)
        if self.model.holder.get(number) != who:
            assert self.refused(who, op, number) is ErrorCode.NOT_FOUND
            return
        self.ask(who, op, id=self.entries[number])
        if op != "keep":
            del self.model.holder[number]
        if op == "ack":
            self.model.order.remove(number)

    @rule(who=WHO)
    def end(self, who: int) -> None:
        """A job ends: what it held is free."""
        node = self.nodes[who % 2]

        async def over() -> None:
            node.mail.ended(self.jobs[who])
            await asyncio.gather(*node.mail._tasks)

        self.loop.run_until_complete(over())
        self.model.holder = {number: holder for number, holder in self.model.holder.items() if holder != who}

    @invariant()
    def counts(self) -> None:
        """The box holds what the model holds."""
        if self.nodes:
            call = rig.ask(self.nodes[0].mail.entries(), self.jobs[0], "mail.boxes")
            (row,) = cast("list[Answer]", self.loop.run_until_complete(call))
            assert (row["letters"], row["held"]) == (len(self.model.order), self.held())
            assert row["dead"] == len(self.model.dead)
            assert bool(row["bytes"]) == bool(self.model.order)

    def held(self) -> int:
        """Letters that were given out and not acknowledged: those that were given back wait in the same list."""
        return sum(bool(self.model.times.get(number)) for number in self.model.order)

    def teardown(self) -> None:
        """Close everything."""
        if self.nodes:
            self.loop.run_until_complete(self.fleet.__aexit__(None, None, None))
        self.loop.close()


def test_a_mailbox_behaves_as_its_model(valkey: Valkey) -> None:
    """No sequence of calls loses a letter, gives one to two jobs at a time, or lets a stranger take one."""
    Machine.store = valkey
    run_state_machine_as_test(Machine, settings=settings(max_examples=12, stateful_step_count=25))
