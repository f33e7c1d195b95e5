"""Who is woken for work: one agent for a job, one that can take it, and nobody for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node_agent.lanes import WINDOW, Lanes
from node_agent.wakeups import Wakeups
from tests.store.desk import Agent, Desk
from tests.support.wait import await_until


class Slots:
    """Slots that are free, or not."""

    def __init__(self, free: bool) -> None:
        self.room = asyncio.Event()
        if free:
            self.room.set()


class Store:
    """Remembers what was asked; `wait` returns when the test says so."""

    def __init__(self) -> None:
        self.waits: list[tuple[str, ...]] = []
        self.passed: list[str] = []
        self.looks = 0
        self.answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def wait(self, lanes: Sequence[str]) -> str | None:
        self.waits.append(tuple(lanes))
        return await self.answer

    async def pass_on(self, lane: str) -> None:
        self.passed.append(lane)

    async def lanes(self) -> tuple[str, ...]:
        self.looks += 1
        return ("agents",)


def made(store: Store, slots: Slots, fit: bool = True) -> Wakeups:
    """The object under test, on lane agents."""
    lanes = Lanes("n1", ["*"], {}, "A")
    lanes.refresh(["agents"])
    return Wakeups(store, lanes, slots, lambda: fit, asyncio.get_running_loop().time)


def test_a_full_agent_waits_for_a_slot_first() -> None:
    """Without a free slot no wake-up is asked for; as soon as there is one it is."""

    async def scene() -> None:
        store, slots = Store(), Slots(free=False)
        waiting = asyncio.create_task(made(store, slots).wait(True))
        await asyncio.sleep(0)
        assert store.waits == []
        slots.room.set()
        await await_until(lambda: store.waits == [("agents",)], "the wake-up to be asked for")
        store.answer.set_result("agents")
        await waiting
        assert store.passed == []

    asyncio.run(scene())


def test_a_wake_up_without_a_slot_is_given_back() -> None:
    """The last slot was taken while the agent waited: the wake-up goes to the next one."""

    async def scene() -> None:
        store, slots = Store(), Slots(free=True)
        waiting = asyncio.create_task(made(store, slots).wait(True))
        await await_until(lambda: len(store.waits) == 1, "the wait")
        slots.room.clear()
        store.answer.set_result("agents")
        await waiting
        assert store.passed == ["agents"]

    asyncio.run(scene())


def test_who_may_not_claim_asks_for_no_wake_up() -> None:
    """A drained or unhealthy agent waits on no lane."""

    async def scene() -> None:
        store = Store()
        store.answer.set_result(None)
        await made(store, Slots(free=True), fit=False).wait(True)
        assert store.waits == [()]

    asyncio.run(scene())


def test_names_are_read_seldom_where_turns_tell_of_new_ones() -> None:
    """A second later the turn's own count is enough; with more lanes than a window, or no turns, names are read."""

    async def looks(fit: bool, lanes: int) -> int:
        store, now = Store(), 100.0
        store.answer.set_result(None)
        known = Lanes("n1", ["*"], {}, "A")
        known.refresh(f"q{number}" for number in range(lanes))
        wakeups = Wakeups(store, known, Slots(free=True), lambda: fit, lambda: now)
        for _ in range(5):
            now += 1.1
            await wakeups.wait(True)
        return store.looks

    assert asyncio.run(looks(True, 2)) == 0
    assert asyncio.run(looks(True, WINDOW + 1)) == 1
    assert asyncio.run(looks(False, 2)) == 5


def test_a_new_lane_is_found_by_the_next_turn(agent: Agent, desk: Desk) -> None:
    """A turn that knew one lane fewer claims nothing and names them all; the next one claims."""
    agent.run(agent.store.lanes())
    job = desk.enqueue()
    reply = agent.turn(free=(0,), lanes=())
    assert (reply.lanes, reply.claims, reply.more) == (("agents",), (), True)
    assert [claim.job for claim in agent.turn(free=(0,), lanes=reply.lanes).claims] == [job]


def test_a_wake_up_that_was_given_back_wakes_another(agent: Agent, desk: Desk) -> None:
    """It is there for the next agent, and has a life."""
    desk.enqueue()
    assert agent.run(agent.store.wait(("agents",), timeout_s=0.01)) == "agents"
    agent.run(agent.store.pass_on("agents"))
    assert 0 < int(str(desk.redis.ttl("rf:wake:agents"))) <= 60
    assert agent.run(agent.store.wait(("agents",), timeout_s=0.01)) == "agents"


def test_the_woken_lane_is_looked_into_first() -> None:
    """Whoever was woken for a lane serves it before any other, and the others in turn."""
    lanes = Lanes("n1", ["*"], {}, "A")
    lanes.refresh([f"q{number}" for number in range(5)])
    for lane in lanes.known:
        lanes.woken = lane
        order = lanes.order()
        assert order[0] == lane
        assert sorted(order) == list(lanes.known)
