"""Turns: claims in order, fences, ends that are written once, retries and releases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis.exceptions import ResponseError

from node_agent.turns import Claim, Start
from runner.scripts import payload
from runner.wire import ids
from runner.wire.states import END_STATES, State
from tests.store.desk import ENVELOPE, Agent, Desk, end


def test_a_batch_is_enqueued_whole_and_in_order(desk: Desk) -> None:
    """Every job of a batch gets the next number, and the lane keeps the order."""
    rows = [desk.row(ids.new_job_id()) for _ in range(5)]
    assert desk.enqueue_all(rows) == [1, 2, 3, 4, 5]
    assert desk.waiting() == [row["id"] for row in rows]


@pytest.mark.parametrize("twice_in_batch", [True, False])
def test_a_duplicate_id_writes_nothing(desk: Desk, twice_in_batch: bool) -> None:
    """An id that exists, or stands twice in the batch, fails the whole batch and leaves no trace."""
    old = ids.new_job_id()
    if not twice_in_batch:
        desk.enqueue(job=old)
    before = sorted(desk.redis.keys("*")), desk.redis.get("rf:seq")
    rows = [desk.row(job) for job in (ids.new_job_id(), old, old if twice_in_batch else ids.new_job_id())]
    with pytest.raises(ResponseError, match=f"DUPLICATE {old}"):
        desk.enqueue_all(rows)
    assert (sorted(desk.redis.keys("*")), desk.redis.get("rf:seq")) == before


def test_a_claim_brings_the_signed_bytes(agent: Agent, desk: Desk) -> None:
    """A claim holds the envelope as it was sent, a number, and nothing odd."""
    job = desk.enqueue()
    claim = agent.claim()
    assert (claim.job, claim.attempt, claim.lane, claim.slot, claim.seq) == (job, 1, "agents", 0, 1)
    assert (claim.odd, claim.oversized) == ((), False)
    assert payload.parse(claim.data) == payload.JobData(ENVELOPE, "kid.sig")
    assert desk.job(job)["rf_claim"] == "n1/b00t01234567/0"
    assert agent.run(agent.store.held())[0].job == job
    assert agent.run(agent.store.holds(job))


def test_lanes_are_served_by_priority_and_slots_bound_the_claims(agent: Agent, desk: Desk) -> None:
    """Free slots take from the first lane first; without a free slot nothing leaves a lane."""
    low, high = desk.enqueue(lane="low"), desk.enqueue(lane="high")
    assert agent.turn(lanes=("high", "low")).claims == ()
    claims = agent.turn(free=(0,), lanes=("high", "low")).claims
    assert [claim.job for claim in claims] == [high]
    assert desk.waiting("low") == [low]


def test_two_agents_never_get_the_same_job(agents: Callable[..., Agent], desk: Desk) -> None:
    """Each job is claimed by exactly one agent start."""
    jobs = [desk.enqueue() for _ in range(4)]
    one, two = agents("n1"), agents("n2")
    for each in (one, two):
        each.register()
    claims = [each.turn(free=(0, 1), lanes=("agents",)).claims for each in (one, two)]
    assert sorted(claim.job for found in claims for claim in found) == sorted(jobs)


def test_an_end_is_written_once_with_one_event(agent: Agent, desk: Desk) -> None:
    """A finish ends the job, keeps its outcome, drops the claim and emits one end event; a repeat adds nothing."""
    job = desk.enqueue()
    claim = agent.claim()
    agent.start(claim)
    finish = end(claim, started=True, return_value=b"1")
    replies = [agent.turn(finishes=(finish,)).finishes[0].result for _ in range(3)]
    assert replies == ["done"] * 3  # the same end again is the answer that got lost
    assert agent.finish(claim, outcome_signature="k.other").result == "stale"
    found = desk.job(job)
    assert (found["rf_state"], found["rf_outcome"], found["rf_outcome_sig"]) == ("finished", '{"o":1}', f"k.{job}")
    assert [kind for kind, _ in desk.events()] == ["job.queued", "job.claimed", "job.ended"]
    assert desk.redis.xlen(f"rq:results:{job}") == 1
    assert agent.run(agent.store.held()) == ()


@pytest.mark.parametrize("kind", ["end", "retry", "release"])
def test_a_stale_fence_writes_nothing(agent: Agent, desk: Desk, kind: str) -> None:
    """Another attempt, another slot or another start than the holder's is told stale, and the job is untouched."""
    job = desk.enqueue()
    claim = agent.claim()
    agent.start(claim)
    before = desk.job(job), desk.events()
    for attempt, slot in ((2, 0), (0, 0), (1, 1), (1, None)):
        other = Claim(job, attempt, "agents", slot, "0" * 32)
        assert agent.finish(other, kind=kind).result == "stale"
        assert agent.turn(starts=(Start(other),)).starts[0].result == "stale"
    assert (desk.job(job), desk.events()) == before
    assert agent.finish(claim, started=True).result == "done"


def test_a_late_node_cannot_overwrite_a_newer_attempt(agents: Callable[..., Agent], desk: Desk) -> None:
    """What a declared-dead start writes about its old attempt is stale, while the newer one ends normally."""
    job = desk.enqueue(retries=1)
    late, other = agents("n1"), agents("n2")
    for each in (late, other):
        each.register()
    old = late.claim()
    late.start(old)
    ((orphan,), _) = other.recover(named=("n1/b00t01234567",))
    assert other.finish(orphan.claim, kind="retry", state=State.LOST).result == "done"
    new = other.claim()
    assert (new.job, new.attempt) == (job, 2)
    assert late.finish(old, started=True).result == "stale"
    assert other.finish(new, started=True, return_value=b"2").result == "done"
    assert [kind for kind, _ in desk.events()].count("job.ended") == 1


def test_a_retry_goes_to_the_head_and_counts(agent: Agent, desk: Desk) -> None:
    """A retried job is first in its lane, its next claim is the next attempt, and RQ sees a retried result."""
    job = desk.enqueue()
    claim = agent.claim()
    agent.start(claim)
    other = desk.enqueue()
    assert agent.finish(claim, kind="retry", state=State.FAILED, started=True, failure="exit 1").result == "done"
    assert desk.waiting() == [job, other]
    assert desk.job(job)["rf_state"] == desk.job(job)["status"] == "queued"
    assert agent.claim().attempt == 2
    assert [kind for kind, _ in desk.events()].count("job.retried") == 1


def test_an_overruled_retry_leaves_its_slots_next_job_alone(agent: Agent, desk: Desk) -> None:
    """A retry that a kill overrules while its slot is filled again in the same turn ends later; the slot stays busy."""
    job, following = desk.enqueue(), desk.enqueue()
    claim = agent.claim()
    agent.start(claim)
    desk.kill(job)
    reply = agent.turn(finishes=(end(claim, kind="retry", started=True),), free=(0,), lanes=("agents",))
    assert reply.finishes[0].result == "killed"
    assert [found.job for found in reply.claims] == [following]
    assert agent.finish(claim, state=State.KILLED, started=True).result == "done"
    assert desk.redis.hget("rq:worker:n1.b00t01.0", "state") == b"busy"
    assert agent.finish(reply.claims[0], started=True).result == "done"
    assert desk.redis.hget("rq:worker:n1.b00t01.0", "state") == b"idle"


def test_a_release_is_uncounted_and_only_for_what_was_not_started(agent: Agent, desk: Desk) -> None:
    """An unstarted claim goes back to the head as if never claimed; a started one cannot be given back."""
    job, other = desk.enqueue(), desk.enqueue()
    assert agent.finish(agent.claim(), kind="release").result == "done"
    assert desk.waiting() == [job, other]
    claim = agent.claim()
    assert claim.attempt == 1
    agent.start(claim)
    assert agent.finish(claim, kind="release").result == "stale"
    assert desk.job(job)["rf_state"] == "running"


@pytest.mark.parametrize("state", sorted(END_STATES))
def test_an_ended_job_is_never_claimed_again(agent: Agent, desk: Desk, state: State) -> None:
    """An id of an ended or held job that lies in a lane is dropped (attack 24)."""
    job = desk.enqueue()
    agent.finish(agent.claim(), state=state)
    desk.redis.rpush("rq:queue:agents", job)
    reply = agent.turn(free=(0,), lanes=("agents",))
    assert (reply.claims, reply.dropped) == ((), 1)


def test_ids_without_a_waiting_job_are_dropped(agent: Agent, desk: Desk) -> None:
    """A repeated id, an unknown one, a malformed one and one whose key is no hash cost no slot and stop no turn."""
    job = desk.enqueue()
    desk.redis.rpush("rq:queue:agents", job, "nobody", "a:b", "x" * 200, "text")
    desk.redis.set("rq:job:text", "no hash", ex=60)
    last = desk.enqueue()
    reply = agent.turn(free=(0, 1), lanes=("agents",))
    assert [claim.job for claim in reply.claims] == [job, last]
    assert reply.dropped == 5


def test_keys_of_a_wrong_type_stop_no_turn(agent: Agent, desk: Desk) -> None:
    """A job whose own keys were replaced by others' types still ends, and a lane of a wrong type is skipped."""
    job = desk.enqueue()
    claim = agent.claim()
    execution = f"rq:execution:{job}:{claim.execution}"
    for key in (
        f"rq:results:{job}",
        "rf:ev:main",
        f"rq:executions:{job}",
        execution,
        "rf:doomed",
        "rq:finished:agents",
    ):
        desk.redis.set(key, "wrong", ex=60)
    desk.redis.set("rf:claims:n1/b00t01234567", "wrong", ex=60)
    desk.redis.hset("rq:worker:n1.b00t01.0", mapping={"successful_job_count": "x", "total_working_time": "x"})
    desk.redis.set("rq:queue:odd", "wrong", ex=60)
    reply = agent.turn(finishes=(end(claim),), free=(0,), lanes=("odd", "agents"))
    assert reply.finishes[0].result == "done"
    assert desk.job(job)["rf_state"] == "finished"
    assert [kind for kind, _ in desk.events()] == ["job.ended"]
    waiting = desk.enqueue()
    assert agent.claim().job == waiting
    desk.redis.delete("rq:queue:odd")


def test_an_expired_job_is_handed_out_as_expired(agent: Agent, desk: Desk) -> None:
    """A job whose stored not_after has passed takes no slot and ends as expired."""
    job = desk.enqueue(not_after=1)
    waiting = desk.enqueue()
    reply = agent.turn(free=(0,), lanes=("agents",))
    assert [claim.job for claim in reply.expired] == [job]
    assert [claim.job for claim in reply.claims] == [waiting]
    assert agent.finish(reply.expired[0], state=State.EXPIRED).result == "done"
    assert (desk.job(job)["status"], desk.job(job)["rf_state"]) == ("failed", "expired")


def test_a_start_without_a_lease_claims_nothing(agents: Callable[..., Agent], desk: Desk) -> None:
    """Who never registered, or whose lease has lapsed, gets no job and is told so; finishes still count."""
    desk.enqueue()
    stranger = agents("n9")
    assert stranger.turn(free=(0,), lanes=("agents",)).lost
    lapsed = agents("n1")
    lapsed.register()
    claim = lapsed.claim()
    desk.enqueue()
    desk.redis.zadd("rf:leases", {"n1/b00t01234567": 1})
    reply = lapsed.turn(finishes=(end(claim),), free=(0,), lanes=("agents",))
    assert (reply.lost, reply.claims, reply.finishes[0].result) == (True, (), "done")


def test_the_budget_bounds_a_turn(agent: Agent, desk: Desk) -> None:
    """A turn takes no more ids than its budget and says that there is more."""
    desk.redis.rpush("rq:queue:agents", *(f"none-{i}" for i in range(10)))
    reply = agent.turn(free=(0,), lanes=("agents",), budget=4)
    assert (reply.dropped, reply.more) == (4, True)


def test_a_lost_answer_loses_no_claim(agent: Agent, desk: Desk) -> None:
    """Claims and dead jobs of an answer that never arrived are found by the next turn that names what it holds."""
    job = desk.enqueue()
    agent.turn(free=(0,), lanes=("agents",), held=())
    reply = agent.turn(free=(0,), lanes=("agents",), held=())
    assert [(claim.job, claim.attempt) for claim in reply.claims] == [(job, 1)]
    assert agent.turn(free=(1,), lanes=("agents",), held=(job,)).claims == ()
    assert desk.job(job)["rf_state"] == "claimed"


def test_wake_ups_are_bounded(agent: Agent, desk: Desk) -> None:
    """A batch wakes one waiting agent per sixteen jobs, and more of them add nothing to a list that nobody reads."""
    assert not agent.run(agent.store.wait(("agents",), timeout_s=0.01))
    for _ in range(3):
        desk.enqueue_all([desk.row(ids.new_job_id()) for _ in range(100)])
    assert desk.redis.llen("rf:wake:agents") == 7
    assert 0 < int(str(desk.redis.ttl("rf:wake:agents"))) <= 60
    assert agent.run(agent.store.wait(("agents",)))


def test_a_flood_of_wake_ups_is_cut(agent: Agent, desk: Desk) -> None:
    """Who may write the list can't have agents look for nothing for long: the next enqueue or turn leaves one."""
    desk.redis.lpush("rf:wake:agents", *("1" * 1000))
    desk.enqueue()
    assert desk.redis.llen("rf:wake:agents") == 1
    assert 0 < int(str(desk.redis.ttl("rf:wake:agents"))) <= 60


def test_who_leaves_work_behind_wakes_another(agent: Agent, desk: Desk) -> None:
    """One enqueue wakes one agent; each that fills its slots and leaves jobs wakes one more, the last one nobody."""
    for _ in range(3):
        desk.enqueue()
    woken = []
    for slot in range(3):
        woken.append(agent.run(agent.store.wait(("agents",), timeout_s=0.01)))
        assert not agent.run(agent.store.wait(("agents",), timeout_s=0.01))
        assert agent.turn(free=(slot,), lanes=("agents",)).claims
    assert woken == ["agents"] * 3
    assert not agent.run(agent.store.wait(("agents",), timeout_s=0.01))


def test_a_wake_up_that_nobody_fetched_counts_for_later_jobs(agent: Agent, desk: Desk) -> None:
    """An agent that comes late finds one wake-up, takes the jobs, and is not woken for nothing after that."""
    for _ in range(5):
        desk.enqueue()
    assert agent.run(agent.store.wait(("agents",), timeout_s=0.01))
    assert len(agent.turn(free=(0, 1, 2, 3, 4), lanes=("agents",)).claims) == 5
    assert not agent.run(agent.store.wait(("agents",), timeout_s=0.01))
