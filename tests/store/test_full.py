"""A store without room (A-L05): enqueues fail loudly; leases, ends and kills go through; memory levels off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from runner.wire import ids
from runner.wire.states import State
from tests.store.desk import Agent, Desk, end
from tests.support.wait import wait_until

RESULT = b'"' + b"x" * 50_000 + b'"'
BATCH = 60


@contextmanager
def full(desk: Desk) -> Iterator[None]:
    """Let the store have no room."""
    desk.redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        desk.redis.config_set("maxmemory", 0)


def used(desk: Desk) -> int:
    """Return the bytes that all keys take."""
    sizes = [desk.redis.memory_usage(key) for key in cast("list[bytes]", desk.redis.keys("*"))]
    return sum(cast("int", size) or 0 for size in sizes)


def test_a_l05_an_enqueue_into_a_full_store_leaves_nothing_half_made(desk: Desk) -> None:
    """It is refused with the reason, and no key is made or changed."""
    desk.enqueue()
    before = {key: desk.redis.dump(key) for key in cast("list[bytes]", desk.redis.keys("*"))}
    with full(desk), pytest.raises((OutOfMemoryError, ResponseError), match="maxmemory"):
        desk.enqueue_all([desk.row(ids.new_job_id()) for _ in range(3)])
    assert {key: desk.redis.dump(key) for key in cast("list[bytes]", desk.redis.keys("*"))} == before


def test_a_l05_leases_marks_ends_and_kills_go_through(agent: Agent, desk: Desk) -> None:
    """A running job's end, another one's start, the renewal and two kills are written; nothing more is claimed."""
    running, starting, waiting, held = (desk.enqueue() for _ in range(4))
    first, second, third = agent.turn(free=(0, 1, 2), lanes=("agents",), held=()).claims
    assert [first.job, second.job, third.job] == [running, starting, waiting]
    agent.start(first)
    agent.start(third)
    with full(desk):
        assert agent.run(agent.store.renew(b"{}", 10_000))
        agent.start(second)
        reply = agent.turn(
            finishes=(end(first, state=State.FINISHED, started=True, return_value=b"1"),),
            free=(0,),
            lanes=("agents",),
        )
        assert reply.finishes[0].result == "done"
        assert reply.claims == ()
        assert desk.kill(third.job)[0] == "sent"
        assert desk.kill(held)[0] == "removed"
        assert desk.cut("all")[0] == 4
        assert [dead.claim.job for dead in agent.run(agent.store.sweep())] == [held]
    assert desk.job(running)["rf_state"] == "finished"
    assert desk.job(starting)["rf_state"] == "running"


def test_a_l05_an_agent_takes_work_again_once_there_is_room(agent: Agent, desk: Desk) -> None:
    """What waited in the lane is claimed by the first turn after the store has room."""
    job = desk.enqueue()
    with full(desk):
        assert agent.turn(free=(0,), lanes=("agents",), held=()).claims == ()
        assert desk.waiting() == [job]
    assert [claim.job for claim in agent.turn(free=(0,), lanes=("agents",), held=()).claims] == [job]


def test_a_l05_lost_nodes_are_recovered_in_a_full_store(desk: Desk, agents: Callable[..., Agent]) -> None:
    """What never started goes back to its lane, what did is handed to the finder."""
    desk.enqueue()
    old, new = agents(node="n1", boot="0" * 12), agents(node="n2", boot="1" * 12)
    old.register(slots=1)
    new.register(slots=1)
    claim = old.claim()
    old.start(claim)
    with full(desk):
        found, _ = new.recover(named=(f"n1/{'0' * 12}",))
    assert [orphan.claim.job for orphan in found] == [claim.job]


def test_a_l05_memory_levels_off_after_one_retention(desk: Desk, agents: Callable[..., Agent]) -> None:
    """Results of 50 KB each, kept for a second: a second and a third batch need no more than the first did."""
    agent = agents(ttl_s=1)
    agent.register(slots=1)
    most, least = [], []
    for _ in range(3):
        for _ in range(BATCH):
            desk.enqueue()
            claim = agent.claim()
            agent.start(claim)
            agent.finish(claim, started=True, state=State.FINISHED, return_value=RESULT)
        most.append(used(desk))
        wait_until(lambda: not desk.redis.keys("rq:results:*") and not desk.redis.keys("rq:job:*"), "the results to go")
        least.append(used(desk))
    assert most[0] > BATCH * len(RESULT)
    assert max(most[1:]) < 1.1 * most[0]
    # What stays are ids in bounded lists and events in a bounded stream.
    assert max(least) < 3 * BATCH * 1000
