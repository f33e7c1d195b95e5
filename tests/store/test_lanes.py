"""Lanes are not kept for ever, and no number of them makes a turn dear: forgetting, windows, the cap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Final

import pytest
import redis

from node_agent import scheduler_store
from node_agent.dispatch import Dispatcher
from node_agent.lanes import RECENT, WINDOW, Lanes
from node_agent.turns import Claim, FinishReply, Turn, TurnReply
from runner import EnqueueError
from runner.wire import ids
from runner.wire.keys import Keys
from tests.agent.test_dispatch import Crew
from tests.client.paper import Fleet
from tests.schedule.clock import Keeper
from tests.store.desk import Agent, Desk
from tests.support import scratch
from tests.support.valkey import Valkey
from tests.support.wait import await_until

KEYS = Keys()
MOST: Final = 10_000
OWN: Final = 2500
HOUR_MS: Final = 3_600_000


@pytest.fixture
def keeper(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """A scheduler that keeps no lane for its own sake."""
    monkeypatch.setattr(scheduler_store, "KEPT_LANES", 0)
    with Keeper(valkey, "n1/one") as one:
        yield one


def look(desk: Desk, keeper: Keeper) -> set[str]:
    """Let the leader look a second later; return the lanes that are left."""
    desk.redis.hdel(KEYS.leader(), "lanes")
    keeper.look()
    return {lane.decode() for lane in desk.redis.smembers(KEYS.lanes())}


def grow_old(desk: Desk, lane: str = "agents") -> None:
    """Let the ends of a lane lie more than an hour back."""
    for kind in ("finished", "failed", "canceled"):
        key = KEYS.registry(kind, lane)
        for job, score in desk.redis.zrange(key, 0, -1, withscores=True):
            desk.redis.zadd(key, {job: score - 3601})


def run(agent: Agent) -> None:
    """Run the next job to its end."""
    claim = agent.claim()
    agent.start(claim)
    assert agent.finish(claim, started=True).result == "done"


def test_an_empty_lane_is_forgotten_an_hour_after_its_last_end(desk: Desk, agent: Agent, keeper: Keeper) -> None:
    """Not before; and the next job of the lane runs as any other, and names the lane again."""
    job = desk.enqueue()
    run(agent)
    assert desk.job(job)["rf_state"] == "finished"
    assert look(desk, keeper) == {"agents"}
    grow_old(desk)
    assert look(desk, keeper) == set()
    again = desk.enqueue()
    assert look(desk, keeper) == {"agents"}
    assert agent.claim().job == again


def queued(desk: Desk, agent: Agent) -> None:
    desk.enqueue()


def held(desk: Desk, agent: Agent) -> None:
    desk.enqueue()
    agent.claim()


def scheduled(desk: Desk, agent: Agent) -> None:
    desk.enqueue(due=time.time_ns() // 1_000_000 + HOUR_MS)


def deferred(desk: Desk, agent: Agent) -> None:
    first = desk.enqueue(lane="other")
    desk.enqueue(after=[first], failed="refuse")


def doomed(desk: Desk, agent: Agent) -> None:
    assert desk.kill(desk.enqueue()) == ["removed"]


@pytest.mark.parametrize("waits", [queued, held, scheduled, deferred, doomed])
def test_a_lane_is_kept_while_anything_waits(
    desk: Desk, agent: Agent, keeper: Keeper, waits: Callable[[Desk, Agent], None]
) -> None:
    """In the lane itself, in RQ's registries beside it, or killed with nobody's signature yet."""
    waits(desk, agent)
    grow_old(desk)
    desk.redis.sadd(KEYS.lanes(), "empty")
    assert look(desk, keeper) - {"other"} == {"agents"}


def test_a_job_that_comes_back_names_its_lane(desk: Desk, agent: Agent, agents: Callable[..., Agent]) -> None:
    """Given back, to be tried again, or taken over from a lost start, with its lane forgotten meanwhile."""
    desk.enqueue()
    for kind in ({"kind": "release"}, {"kind": "retry"}, {"kind": "retry", "delay_ms": HOUR_MS}):
        claim = agent.claim()
        if kind["kind"] == "retry":
            agent.start(claim)
        desk.redis.delete(KEYS.lanes())
        assert agent.finish(claim, **kind).result == "done"
        assert desk.redis.smembers(KEYS.lanes()) == {b"agents"}
    assert desk.redis.zcard(KEYS.registry("scheduled", "agents")) == 1
    job = desk.enqueue()
    assert agent.claim().job == job
    heir = agents("n2", "b00t76543210")
    heir.register("host-2")
    desk.redis.delete(KEYS.lanes())
    heir.recover([f"{agent.node}/{agent.boot}"])
    assert desk.waiting() == [job]
    assert desk.redis.smembers(KEYS.lanes()) == {b"agents"}


def test_few_lanes_are_all_kept(desk: Desk, valkey: Valkey) -> None:
    """Up to a window's worth costs nothing, so it stays; of more, some go at a look, once a second."""
    desk.redis.sadd(KEYS.lanes(), *(f"q{number}" for number in range(scheduler_store.KEPT_LANES)))
    with Keeper(valkey, "n1/one") as keeper:
        assert len(look(desk, keeper)) == scheduler_store.KEPT_LANES
        desk.redis.sadd(KEYS.lanes(), *(f"more{number}" for number in range(300)))
        left = len(look(desk, keeper))
        assert scheduler_store.KEPT_LANES < left <= scheduler_store.KEPT_LANES + 200
        keeper.look()
        assert desk.redis.scard(KEYS.lanes()) == left
        for _ in range(3):
            left = len(look(desk, keeper))
        assert left == scheduler_store.KEPT_LANES


def test_no_client_fills_the_set(desk: Desk, agent: Agent) -> None:
    """At the cap a batch that needs a new lane is refused whole; lanes that are there go on."""
    desk.redis.sadd(KEYS.lanes(), "agents", *(f"q{number}" for number in range(MOST - 2)))
    rows = [desk.row(f"main-01m8nz26cyrcb2h2mm73g5wp{end}", lane=f"new-{end}") for end in ("00", "01")]
    with pytest.raises(redis.ResponseError, match=f"^CROWDED_LANES {MOST}$"):
        desk.enqueue_all(rows)
    assert desk.redis.scard(KEYS.lanes()) == MOST - 1
    assert not desk.redis.exists(KEYS.job(str(rows[0]["id"])), KEYS.seq())
    desk.enqueue_all(rows[:1])
    with pytest.raises(redis.ResponseError, match=f"^CROWDED_LANES {MOST}$"):
        desk.enqueue_all(rows[1:])
    job = desk.enqueue()
    assert agent.claim().job == job


def test_attack_56_no_tenant_takes_all_lanes(desk: Desk, agent: Agent) -> None:
    """At its share a tenant gets no new lane, others do; what was forgotten of its lanes makes room again."""
    own = [f"own{number}" for number in range(OWN)]
    desk.redis.sadd(KEYS.lanes(), *own)
    desk.redis.sadd(KEYS.named("acme"), *own)
    row = desk.row(ids.new_job_id("acme"), lane="one-more")
    with pytest.raises(redis.ResponseError, match=f"^CROWDED_LANES {OWN}$"):
        desk.enqueue_all([row])
    assert not desk.redis.exists(KEYS.job(str(row["id"])), KEYS.seq())
    desk.enqueue_all([desk.row(ids.new_job_id("acme"), lane=own[0]), desk.row(ids.new_job_id("other"), lane="theirs")])
    assert desk.redis.smembers(KEYS.named("other")) == {b"theirs"}
    desk.redis.srem(KEYS.lanes(), *own[1:100])
    desk.enqueue_all([row])
    assert desk.redis.scard(KEYS.named("acme")) == OWN - 99 + 1
    desk.redis.delete(KEYS.named("acme"))
    desk.redis.set(KEYS.named("acme"), "spoilt")
    desk.enqueue_all([desk.row(ids.new_job_id("acme"), lane="last")])
    assert desk.redis.smembers(KEYS.named("acme")) == {b"last"}


def test_a_client_is_told_why_and_what_to_do(valkey: Valkey) -> None:
    """The refusal of the cap names the number, what makes lanes, and how room is made."""
    with scratch.folder() as folder, valkey.client() as store:
        paper = Fleet(folder, store, valkey.url)
        store.sadd(KEYS.lanes(), *(f"q{number}" for number in range(MOST)))
        told = "nothing was enqueued: it needs a new lane, and the fleet has 10,000.*Use fewer of these, or wait"
        with pytest.raises(EnqueueError, match=told):
            paper.app.call("app:work")
        assert paper.app.jobs() == []
        paper.app.close()


def many(count: int) -> Lanes:
    """A node's lanes."""
    lanes = Lanes("n1", ("*",), {}, "A")
    lanes.refresh(f"q{number:05}" for number in range(count))
    return lanes


def test_a_turn_looks_into_a_bounded_number_of_lanes() -> None:
    """However many there are; a round sees them all, and each comes first at times."""
    lanes = many(3 * WINDOW + 7)
    seen: set[str] = set()
    turns = 0
    while lanes.unseen:
        order = lanes.order()
        assert len(order) == WINDOW
        seen.update(order)
        turns += 1
    assert (seen, turns) == (set(lanes.known), 4)
    first = {lanes.order()[0] for _ in range(len(lanes.known) * turns)}
    assert first == seen
    assert len(lanes.awaited()) == WINDOW
    assert {lane for _ in range(8) for lane in lanes.awaited()} == seen


def test_lanes_with_work_are_looked_into_at_once() -> None:
    """The one that was woken comes first, once; those that gave work last stay in sight. None of others' nodes is."""
    lanes = many(20 * WINDOW)
    far, other = lanes.known[-1], lanes.known[-2]
    lanes.woken = far
    assert lanes.order()[0] == far
    assert far not in lanes.order()
    lanes.found([other])
    assert lanes.order()[-1] == lanes.awaited()[-1] == other
    lanes.found(lanes.known[-200:])
    assert len(lanes.order()) == WINDOW + RECENT
    lanes.suspended = frozenset({far})
    lanes.woken = far
    assert far not in lanes.order()
    lanes.woken = "agents@node=n2"
    assert "agents@node=n2" not in lanes.order()


class LastLane:
    """A store with jobs in one lane alone."""

    def __init__(self, lane: str, jobs: int) -> None:
        self.lane = lane
        self.left = jobs
        self.turns: list[Turn] = []

    async def turn(self, turn: Turn) -> TurnReply:
        self.turns.append(turn)
        finishes = tuple(FinishReply(end.claim.job, end.claim.attempt, "done") for end in turn.finishes)
        claims: tuple[Claim, ...] = ()
        if turn.free and self.left and self.lane in turn.lanes:
            claims = (Claim(f"main-{self.left}", 1, self.lane, turn.free[0]),)
            self.left -= 1
        return TurnReply(finishes, (), claims)


def test_a_far_lane_is_found_and_worked_off() -> None:
    """One look goes round until it finds work; the lane's other jobs follow at once, a turn each."""

    async def scene() -> LastLane:
        lanes = many(8 * WINDOW)
        store = LastLane(lanes.known[-1], 20)
        dispatcher = Dispatcher(store, 1, lanes.order, lambda: None)
        dispatcher.found, dispatcher.unseen = lanes.found, lambda: lanes.unseen
        dispatcher.serve(Crew(dispatcher))
        dispatcher.wake()
        task = asyncio.create_task(dispatcher.run())
        try:
            await await_until(lambda: dispatcher.dry.is_set() and not dispatcher.busy, "all is worked off")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return store

    store = asyncio.run(scene())
    assert store.left == 0
    assert len(store.turns) <= 8 + 20 + 2
    assert all(len(turn.lanes) <= WINDOW + RECENT for turn in store.turns)


def test_few_lanes_are_one_window() -> None:
    """Nothing is left to see after a turn, and wake-ups of all are waited for."""
    lanes = many(WINDOW)
    assert not lanes.unseen
    assert set(lanes.order()) == set(lanes.awaited()) == set(lanes.known)
