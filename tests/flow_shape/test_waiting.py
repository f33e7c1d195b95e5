"""Jobs that wait for others, as the scripts do it: deferred, released at every kind of end, killed, expired."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from rq import Queue
from rq.job import Job as RqJob
from rq.serializers import JSONSerializer

from runner.wire import ids
from runner.wire.states import State
from tests.store.desk import Agent, Desk, end

LANE = "agents"


def deferred(desk: Desk, *after: str, failed: str = "refuse", **fields: object) -> str:
    """Enqueue a job that waits for others."""
    fields |= {"after": list(after), "failed": failed}
    return desk.enqueue(job=None, **fields)


def state(desk: Desk, job: str) -> str:
    """Return what the store shows."""
    return desk.job(job)["rf_state"]


def registry(desk: Desk, lane: str = LANE) -> list[str]:
    """Return who RQ's tools see as deferred."""
    return [member.decode() for member in desk.redis.zrange(desk.keys.registry("deferred", lane), 0, -1)]


def end_one(agent: Agent, **fields: object) -> str:
    """Claim the next job of the lane, end it, and return its id."""
    claim = agent.claim(str(fields.pop("lane", LANE)))
    assert agent.finish(claim, **fields).result == "done"
    return claim.job


def test_a_job_waits_until_the_last_of_those_before_it_has_finished(desk: Desk, agent: Agent) -> None:
    """It stands in RQ's deferred registry, in no lane, and goes to its lane with the last end."""
    first, second = desk.enqueue(), desk.enqueue()
    job = deferred(desk, first, second)
    assert (state(desk, job), desk.job(job)["status"], registry(desk)) == ("deferred", "deferred", [job])
    assert desk.waiting() == [first, second]
    end_one(agent)
    assert state(desk, job) == "deferred"
    end_one(agent)
    assert (state(desk, job), desk.job(job)["status"], registry(desk)) == ("queued", "queued", [])
    assert desk.waiting() == [job]
    assert [kind for kind, who in desk.events() if who == job] == ["job.deferred", "job.queued"]
    assert desk.redis.exists(desk.keys.open(job), desk.keys.then(first), desk.keys.then(second)) == 0


def test_dependencies_reach_across_queues(desk: Desk, agent: Agent) -> None:
    """The end of a job in one lane releases a job into another one, and its agents are woken."""
    first = desk.enqueue(lane="other")
    job = deferred(desk, first)
    desk.redis.delete(desk.keys.wake(LANE))
    assert end_one(agent, lane="other") == first
    assert desk.waiting() == [job]
    assert desk.redis.llen(desk.keys.wake(LANE)) == 1


@pytest.mark.parametrize(
    ("ended", "started"),
    [
        (State.FAILED, True),
        (State.KILLED, True),
        (State.KILLED, False),
        (State.REFUSED, False),
        (State.EXPIRED, False),
        (State.LOST, True),
    ],
)
def test_any_bad_end_hands_the_waiting_job_out_at_once(desk: Desk, agent: Agent, ended: State, started: bool) -> None:
    """A job of which one dependency did not finish waits for no other: a node has to end it."""
    bad, slow = desk.enqueue(), desk.enqueue(lane="slow")
    job = deferred(desk, bad, slow)
    claim = agent.claim()
    if started:
        agent.start(claim)
    agent.finish(claim, state=ended, started=started)
    assert (state(desk, job), desk.waiting()) == ("queued", [job])
    assert state(desk, slow) == "queued"


def test_a_job_that_runs_all_the_same_waits_for_every_end(desk: Desk, agent: Agent) -> None:
    """With failed = run a bad end counts like a good one, and the others are still waited for."""
    job = deferred(desk, desk.enqueue(), desk.enqueue(), failed="run")
    end_one(agent, state=State.FAILED)
    assert state(desk, job) == "deferred"
    end_one(agent)
    assert state(desk, job) == "queued"


def test_a_retry_releases_nobody(desk: Desk, agent: Agent) -> None:
    """Only the one end of a job counts, not an attempt that is followed by another."""
    job = deferred(desk, desk.enqueue(retries=1))
    claim = agent.claim()
    agent.start(claim)
    agent.finish(claim, kind="retry", state=State.FAILED)
    assert state(desk, job) == "deferred"


def test_what_has_ended_before_the_enqueue_is_decided_then(desk: Desk, agent: Agent) -> None:
    """A finished one is not waited for; after one that failed the job goes to a node to be ended, or runs."""
    good, bad = desk.enqueue(), desk.enqueue()
    end_one(agent)
    end_one(agent, state=State.FAILED)
    slow = desk.enqueue(lane="slow")
    jobs = [deferred(desk, good), deferred(desk, bad), deferred(desk, bad, failed="run"), deferred(desk, slow, bad)]
    assert desk.waiting() == jobs
    assert state(desk, deferred(desk, bad, slow, failed="run")) == "deferred"


def test_an_unknown_dependency_refuses_the_whole_batch(desk: Desk) -> None:
    """A wrong id, or one that its own batch brings only later, leaves nothing behind."""
    job, other = ids.new_job_id(), ids.new_job_id()
    for rows in (
        [desk.row(other), desk.row(job, after=[ids.new_job_id()], failed="refuse")],
        [desk.row(job, after=[other], failed="refuse"), desk.row(other)],
        [desk.row(job, after=[job], failed="refuse")],
    ):
        with pytest.raises(redis.ResponseError, match=r"^UNKNOWN_AFTER "):
            desk.enqueue_all(rows)
    assert desk.redis.keys("*") == []


def test_no_more_than_a_thousand_jobs_wait_for_one(desk: Desk) -> None:
    """The end of a job releases all that wait for it in one step, so their number is bounded."""
    first = desk.enqueue()
    desk.redis.sadd(desk.keys.then(first), *(f"main-{number}" for number in range(999)))
    desk.redis.expire(desk.keys.then(first), 60)
    rows = [desk.row(ids.new_job_id(), after=[first], failed="refuse") for _ in range(2)]
    with pytest.raises(redis.ResponseError, match=rf"^CROWDED_AFTER {first}"):
        desk.enqueue_all(rows)
    desk.enqueue_all(rows[:1])


def test_a_kill_of_a_waiting_job_ends_it_and_what_waits_for_it(desk: Desk, agent: Agent) -> None:
    """It leaves the registry in the step of the kill, and its signed end hands out the next one."""
    first = desk.enqueue(lane="slow")
    job = deferred(desk, first)
    after = deferred(desk, job)
    assert desk.kill(job) == ["removed"]
    assert registry(desk) == [after]
    (dead,) = agent.run(agent.store.sweep(jobs=[job]))
    assert dead.claim.job == job
    agent.finish(dead.claim, state=State.KILLED, started=False)
    assert (state(desk, job), state(desk, after)) == ("killed", "queued")
    # The end that it waited for comes later and changes nothing.
    end_one(agent, lane="slow")
    assert state(desk, job) == "killed"


def test_a_selector_kill_takes_waiting_jobs(desk: Desk, agent: Agent) -> None:
    """The sweep of a cutoff finds deferred jobs as it finds those of the lane."""
    sel = "all\ngroup:g1"
    job = deferred(desk, desk.enqueue(lane="slow", sel=sel), sel=sel)
    other = deferred(desk, desk.enqueue(lane="slow"))
    desk.cut("group:g1")
    dead = agent.run(agent.store.sweep(lanes=[LANE, "slow"], serves=[LANE, "slow"]))
    assert {one.claim.job for one in dead} >= {job}
    assert registry(desk) == [other]
    assert desk.redis.exists(desk.keys.open(job)) == 0


def test_a_kill_meets_a_released_job_at_its_claim(desk: Desk, agent: Agent) -> None:
    """A cutoff from before the release hits the job when it is taken from the lane."""
    first = desk.enqueue()
    job = deferred(desk, first, sel="all\ngroup:g1")
    desk.cut("group:g1")
    end_one(agent)
    reply = agent.turn(free=(0,), lanes=(LANE,))
    assert [dead.claim.job for dead in reply.dead] == [job]


def test_a_job_that_waits_past_its_time_is_handed_out_as_expired(desk: Desk, agent: Agent) -> None:
    """The periodic sweep moves it to its lane, where the claim finds its time over."""
    job = deferred(desk, desk.enqueue(lane="slow"), not_after=int(time.time() * 1000) - 2000)
    agent.run(agent.store.sweep(serves=[LANE]))
    assert desk.waiting() == [job]
    reply = agent.turn(free=(0,), lanes=(LANE,))
    assert [claim.job for claim in reply.expired] == [job]


def test_a_released_job_that_is_due_later_is_scheduled(desk: Desk, agent: Agent) -> None:
    """An ETA counts on top of the dependencies."""
    job = deferred(desk, desk.enqueue(), due=int(time.time() * 1000) + 60_000)
    end_one(agent)
    assert (state(desk, job), desk.waiting()) == ("scheduled", [])


def test_a_deferred_job_in_a_lane_is_not_claimed(desk: Desk, agent: Agent) -> None:
    """Whoever pushes its id into the lane gains nothing."""
    job = deferred(desk, desk.enqueue(lane="slow"))
    desk.redis.rpush(desk.keys.queue(LANE), job)
    reply = agent.turn(free=(0,), lanes=(LANE,))
    assert (reply.claims, reply.dropped) == ((), 1)


def test_two_ends_in_one_turn_release_a_job_once(desk: Desk, agent: Agent) -> None:
    """The jobs before it may end in the same script call."""
    job = deferred(desk, desk.enqueue(), desk.enqueue())
    claims = agent.turn(free=(0, 1), lanes=(LANE,)).claims
    agent.turn(finishes=tuple(end(claim) for claim in claims))
    assert desk.waiting() == [job]


def test_a_chain_of_refusals_runs_to_its_end(desk: Desk, agent: Agent) -> None:
    """Each refused job hands out the next one."""
    jobs = [desk.enqueue()]
    for _ in range(5):
        jobs.append(deferred(desk, jobs[-1]))
    end_one(agent, state=State.FAILED)
    for job in jobs[1:]:
        assert end_one(agent, state=State.REFUSED, started=False) == job
    assert desk.waiting() == []


def test_attack_56_one_tenants_ends_release_its_own_jobs_alone(desk: Desk, agent: Agent) -> None:
    """Names of jobs carry their tenant: equal shapes of two tenants never see each other."""
    firsts = {tenant: desk.enqueue(job=ids.new_job_id(tenant), lane=tenant) for tenant in ("red", "blue")}
    jobs = {
        tenant: desk.enqueue(job=ids.new_job_id(tenant), lane=tenant, after=[first], failed="refuse")
        for tenant, first in firsts.items()
    }
    end_one(agent, lane="red")
    assert {tenant: state(desk, job) for tenant, job in jobs.items()} == {"red": "queued", "blue": "deferred"}


def test_forged_waiters_break_nothing(desk: Desk, agent: Agent, agents: Callable[..., Any]) -> None:
    """Keys of a wrong type, and ids that name no deferred job, are passed over."""
    first, second = desk.enqueue(), desk.enqueue()
    job = deferred(desk, second)
    desk.redis.hset(desk.keys.job(first), "rf_then", "1")
    desk.redis.set(desk.keys.then(first), "x", ex=60)
    desk.redis.sadd(desk.keys.then(second), "../../etc", first)
    desk.redis.set(desk.keys.open(job), "x", ex=60)
    end_one(agent)
    end_one(agent)
    assert (state(desk, first), state(desk, second), state(desk, job)) == ("finished", "finished", "queued")


def test_rqs_own_tools_see_who_waits(desk: Desk, agent: Agent) -> None:
    """A deferred job is one to rq's classes, in their registry, until it is queued; their clean-up moves nobody."""
    job = deferred(desk, desk.enqueue())
    queue = Queue(LANE, connection=desk.redis, serializer=JSONSerializer)
    assert queue.deferred_job_registry.get_job_ids() == [job]
    queue.deferred_job_registry.cleanup()
    assert RqJob.fetch(job, connection=desk.redis, serializer=JSONSerializer).get_status() == "deferred"
    end_one(agent)
    assert queue.deferred_job_registry.get_job_ids() == []
    assert RqJob.fetch(job, connection=desk.redis, serializer=JSONSerializer).get_status() == "queued"
    assert queue.get_job_ids() == [job]
