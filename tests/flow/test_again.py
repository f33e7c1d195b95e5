"""Retries against the scripts: waits, kills that win over them, jobs that take their nodes with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from node_agent import resultcheck
from node_agent.admission import Admitted, admit
from node_agent.turns import Claim
from runner.wire import codec
from runner.wire import spec as specs
from runner.wire.flow import Concurrency, Rate, Unique
from runner.wire.states import NODE_LOST, State
from tests.agent.build import job as build_job
from tests.agent.test_admission import new, offer, reason, rules
from tests.flow.test_limits import all_due, due
from tests.store.desk import Agent, Desk


def fail(agent: Agent, claim: Claim, delay_ms: int = 0) -> str:
    """Fail a started attempt that may run again."""
    agent.start(claim)
    return agent.finish(claim, kind="retry", state=State.FAILED, started=True, delay_ms=delay_ms).result


def test_a_delayed_retry_waits_aside(agent: Agent, desk: Desk) -> None:
    """The job is scheduled for its time, RQ sees it in its registry, and then it is the next attempt."""
    job, other = desk.enqueue(), desk.enqueue()
    assert fail(agent, agent.claim(), 60_000) == "done"
    found = desk.job(job)
    assert (found["status"], found["rf_state"], found["rf_waits"]) == ("scheduled", "scheduled", "retry")
    assert "rf_claim" not in found
    assert 55 < float(desk.redis.zscore("rq:scheduled:agents", job)) - time.time() <= 60
    assert due(desk) == 0
    assert desk.waiting() == [other]
    assert all_due(desk) == 1
    assert desk.waiting() == [other, job]
    agent.finish(agent.claim(), started=True)
    assert agent.claim().attempt == 2
    assert [kind for kind, _ in desk.events()].count("job.retried") == 1


@pytest.mark.parametrize("delay_ms", [0, 60_000])
def test_a_k06_a_kill_wins_over_a_retry(agent: Agent, desk: Desk, delay_ms: int) -> None:
    """A kill that comes while the attempt ends: no next attempt, one end as killed (scenario A-K06)."""
    job = desk.enqueue()
    claim = agent.claim()
    agent.start(claim)
    desk.kill(job)
    reply = agent.finish(claim, kind="retry", state=State.FAILED, started=True, delay_ms=delay_ms)
    assert reply.result == "killed"
    assert reply.word is not None
    agent.finish(claim, state=State.KILLED, started=True)
    assert desk.job(job)["rf_state"] == "killed"
    assert all_due(desk) == 0
    assert desk.waiting() == []
    kinds = [kind for kind, _ in desk.events()]
    assert (kinds.count("job.retried"), kinds.count("job.ended")) == (0, 1)


@pytest.mark.parametrize("how", ["id", "selector"])
def test_a_k06_a_kill_ends_what_waits_for_its_retry(agent: Agent, desk: Desk, how: str) -> None:
    """A job between two attempts is ended by id at once, and by selector without a slot."""
    job = desk.enqueue()
    fail(agent, agent.claim(), 60_000)
    if how == "id":
        assert desk.kill(job) == ["removed"]
        assert not desk.redis.exists("rf:due")
        assert not desk.redis.exists("rq:scheduled:agents")
        (dead,) = agent.run(agent.store.sweep(jobs=(job,)))
    else:
        desk.cut("tenant:main")
        (dead,) = agent.run(agent.store.sweep(lanes=("agents",)))
    agent.finish(dead.claim, state=State.KILLED)
    assert desk.job(job)["rf_state"] == "killed"
    assert all_due(desk) == 0
    assert agent.turn(free=(0,), lanes=("agents",)).claims == ()


def lose(agents: Callable[..., Agent], number: int) -> Agent:
    """Have a new node start the job, vanish, and another one take it over; return that one."""
    victim, heir = agents(f"v{number}"), agents(f"h{number}", "he1400000000")
    victim.register()
    victim.start(victim.claim())
    heir.register()
    return heir


def test_a_l06_a_job_that_takes_its_nodes_with_it_ends(agents: Callable[..., Agent], desk: Desk) -> None:
    """The third node lost with the job is the last, however many retries were signed (scenario A-L06)."""
    job = desk.enqueue(retries=100)
    for number in range(3):
        heir = lose(agents, number)
        ((orphan,), _) = heir.recover(named=(f"v{number}/b00t01234567",))
        reply = heir.finish(orphan.claim, kind="retry", state=State.LOST, reason=NODE_LOST)
        assert reply.result == ("poison" if number == 2 else "done")
        again = heir.finish(orphan.claim, kind="retry", state=State.LOST, reason=NODE_LOST)
        assert again.result == ("poison" if number == 2 else "stale"), "a call sent again counts none twice"
    assert heir.finish(orphan.claim, state=State.LOST, reason="poison").result == "done"
    assert (desk.job(job)["rf_state"], desk.job(job)["rf_reason"]) == ("lost", "poison")


def test_a_l06_other_ends_do_not_count_as_lost_nodes(agent: Agent, desk: Desk) -> None:
    """A job that merely fails, or whose node stopped in order, runs as often as was signed."""
    desk.enqueue(retries=100)
    for _ in range(5):
        claim = agent.claim()
        agent.start(claim)
        stopped = agent.finish(claim, kind="retry", state=State.LOST, reason="shutdown", started=True)
        assert stopped.result == "done"
        assert fail(agent, agent.claim()) == "done"


@pytest.mark.parametrize("forged", ["x", "-5", "99999999999999999999", ""])
def test_attack_22_a_forged_count_of_lost_nodes(agents: Callable[..., Agent], desk: Desk, forged: str) -> None:
    """Whatever stands in the count, the turn is done and counts on from nothing."""
    job = desk.enqueue(retries=1)
    desk.redis.hset(f"rq:job:{job}", "rf_crashes", forged)
    heir = lose(agents, 0)
    ((orphan,), _) = heir.recover(named=("v0/b00t01234567",))
    assert heir.finish(orphan.claim, kind="retry", state=State.LOST, reason=NODE_LOST).result == "done"
    assert desk.job(job)["rf_crashes"] == "1"


@pytest.mark.parametrize(
    ("in_s", "asked"), [(0, 0.0), (2.5, 2.5), (-1, None), (1e12, None), ("5", None), (True, None), (None, None)]
)
def test_what_a_job_asks_for_is_taken_only_as_a_wait(in_s: object, asked: float | None) -> None:
    """The result record is the job's own: anything but a number of seconds within bounds asks for nothing."""
    raw = codec.dump({"error": {"type": "Retry", "message": "m", "traceback": "t", "retry_in_s": in_s}})
    result = asyncio.run(resultcheck.Reader().read(raw, 1 << 20))
    assert result.retry_in_s == asked
    assert result.error == {"type": "Retry", "message": "m", "traceback": "t"}


def test_a_job_is_repeated_once(desk: Desk) -> None:
    """Two operators who repeat the same ended job make one new job."""
    old = desk.enqueue()
    new = desk.enqueue(again=old)
    with pytest.raises(Exception, match=f"REPEATED {old} {new}"):
        desk.enqueue(again=old)
    assert desk.waiting() == [old, new]


LIMITED = build_job(unique=Unique("k"), rate=Rate("k", 2, 0.5), concurrency=Concurrency("k", 3), priority=7)
SIGNED = "u end 0 k\nr 2 500 k\nc 3 k"


@pytest.mark.parametrize("stored", ["", SIGNED[:-1], SIGNED.replace("c 3", "c 4"), "u end 0 k", SIGNED + "\n"])
def test_attack_22_a_node_compares_the_limits_with_the_signed_ones(stored: str) -> None:
    """A job that started under other limits than its envelope asks for is refused as bad_hash."""
    assert specs.flow_of(LIMITED) == SIGNED
    assert isinstance(admit(offer(LIMITED, flow=SIGNED), rules(), new, 1), Admitted)
    assert reason(offer(LIMITED, flow=stored)) == "bad_hash"
    assert reason(offer(build_job(), flow=SIGNED)) == "bad_hash"


def test_attack_22_a_priority_is_bound_by_the_signature() -> None:
    """A job that lies in the lane of another priority than the signed one is a forgery."""
    assert reason(offer(LIMITED, flow=SIGNED, lane="agents@priority=999")) == "bad_signature"
