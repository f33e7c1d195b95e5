"""Kills in every state, cutoffs and their laws, sweeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from node_agent.turns import Start
from runner.wire.states import State
from tests.store.desk import Agent, Desk


def test_a_kill_of_an_unknown_job_says_so(desk: Desk) -> None:
    """An id that nobody enqueued is unknown; should it appear later, its tombstone waits."""
    assert desk.kill("main-01m8nz26cyrcb2h2mm73g5wppq") == ["unknown"]


def test_a_waiting_job_is_removed_and_buried_once(agents: Callable[..., Agent], desk: Desk) -> None:
    """A kill before the start takes the job out of its lane; one agent gets it, with the command, to sign its end."""
    job, other = desk.enqueue(), desk.enqueue()
    one, two = agents("n1"), agents("n2")
    for each in (one, two):
        each.register()
    assert desk.kill(job) == ["removed"]
    assert desk.waiting() == [other]
    assert (desk.job(job)["rf_state"], desk.job(job)["status"]) == ("killing", "canceled")
    assert len(desk.redis.xrange("rf:ctl:all")) == 1
    found = [dead for each in (one, two) for dead in each.run(each.store.sweep(jobs=(job,)))]
    (dead,) = found
    assert (dead.claim.job, dead.claim.attempt, dead.word.command) == (job, 0, b'{"id":"c1"}')
    assert one.finish(dead.claim, state=State.KILLED, reason="kill").result == "done"
    assert (desk.job(job)["rf_state"], desk.job(job)["status"]) == ("killed", "canceled")
    assert desk.redis.exists("rf:doomed") == 0


def test_a_removed_job_is_found_without_its_notice(agent: Agent, desk: Desk) -> None:
    """Whoever deletes the notice cannot keep a removed job from its end."""
    job = desk.enqueue()
    desk.kill(job)
    desk.redis.delete("rf:ctl:all")
    (dead,) = agent.run(agent.store.sweep())
    assert dead.claim.job == job


def test_a_held_job_sends_the_command_to_its_node(agent: Agent, desk: Desk) -> None:
    """Claimed, running, paused and killing jobs: the node that holds the job gets the command, and its state stays."""
    job = desk.enqueue()
    claim = agent.claim()
    for state in (None, State.RUNNING, State.PAUSED, State.KILLING):
        if state is not None:
            agent.turn(starts=(Start(claim, state),))
        before = desk.job(job)
        assert desk.kill(job) == ["sent", "n1"]
        assert desk.job(job) == before
    assert len(desk.redis.xrange("rf:ctl:n1")) == 4
    assert agent.finish(claim, state=State.KILLED, started=True).result == "done"
    assert desk.job(job)["status"] == "stopped"


@pytest.mark.parametrize("state", [State.FINISHED, State.FAILED, State.KILLED, State.LOST])
def test_an_ended_job_stays_ended(agent: Agent, desk: Desk, state: State) -> None:
    """A kill after the end changes nothing and names the state."""
    job = desk.enqueue()
    agent.finish(agent.claim(), state=state, started=True)
    before = desk.job(job), desk.events()
    assert desk.kill(job) == ["ended", state]
    assert (desk.job(job), desk.events()) == before
    assert desk.redis.exists(f"rf:tomb:{job}") == 0


def test_repeated_kills_change_nothing(agent: Agent, desk: Desk) -> None:
    """Killing twice, in both forms, leaves one removal and one end."""
    job = desk.enqueue()
    assert desk.kill(job) == desk.kill(job) == ["removed"]
    (dead,) = agent.run(agent.store.sweep(jobs=(job, job)))
    assert desk.kill(job) == ["sent", "n1"]
    assert agent.run(agent.store.sweep(jobs=(job,))) == ()
    agent.finish(dead.claim, state=State.KILLED)
    assert desk.kill(job) == ["ended", "killed"]
    assert [kind for kind, _ in desk.events()].count("job.ended") == 1


def test_a_tombstone_is_met_by_claim_start_and_retry(agent: Agent, desk: Desk) -> None:
    """A job put back by a store writer, a start mark and a retry each meet the kill; dead jobs take no slot."""
    job = desk.enqueue()
    desk.kill(job)
    desk.redis.hset(f"rq:job:{job}", "rf_state", "queued")
    desk.redis.rpush("rq:queue:agents", job)
    last = desk.enqueue()
    reply = agent.turn(free=(0,), lanes=("agents",))
    assert [dead.claim.job for dead in reply.dead] == [job]
    (claim,) = reply.claims
    assert claim.job == last
    desk.kill(last)
    (mark,) = agent.turn(starts=(Start(claim),)).starts
    assert mark.word is not None
    assert mark.word.command == b'{"id":"c1"}'
    answer = agent.finish(claim, kind="retry", state=State.FAILED, started=True)
    assert answer.result == "killed"
    assert desk.job(last)["rf_state"] == "killing"
    assert agent.finish(claim, state=State.KILLED, started=True).result == "done"


def test_an_unreadable_tombstone_kills(agent: Agent, desk: Desk) -> None:
    """A tombstone without signature, or of another type, is honoured: killing is the safe side."""
    jobs = [desk.enqueue() for _ in range(2)]
    desk.redis.set(f"rf:tomb:{jobs[0]}", "nonsense", ex=60)
    desk.redis.sadd(f"rf:tomb:{jobs[1]}", "wrong type")
    desk.redis.expire(f"rf:tomb:{jobs[1]}", 60)
    reply = agent.turn(free=(0,), lanes=("agents",))
    assert [dead.claim.job for dead in reply.dead] == jobs
    assert all(dead.word.signature == "" for dead in reply.dead)


def test_a_cutoff_hits_what_was_enqueued_before_it(agent: Agent, desk: Desk) -> None:
    """Jobs up to the cutoff die, jobs after it live, and the live nodes are named."""
    old = [desk.enqueue() for _ in range(3)]
    assert desk.cut("all") == (3, ["n1"])
    new = desk.enqueue()
    reply = agent.turn(free=(0,), lanes=("agents",))
    assert [dead.claim.job for dead in reply.dead] == old
    assert [claim.job for claim in reply.claims] == [new]
    assert all(dead.word.seq == 3 and dead.word.kind == "cutoff" for dead in reply.dead)


@pytest.mark.parametrize("field", ["tag:team=acme", "queue:agents", "tenant:acme", "task:app:work", "group:g"])
def test_selectors_hit_their_jobs_alone(agent: Agent, desk: Desk, field: str) -> None:
    """A selector kills jobs that carry it, hinted or evident from id and lane, and no others."""
    hit = desk.enqueue(tenant="acme", sel=f"all\n{field}", lane="agents@gpu=yes")
    spared = desk.enqueue(tenant="other", sel="all", lane="misc")
    desk.cut(field)
    reply = agent.turn(free=(0,), lanes=("agents@gpu=yes", "misc"))
    assert [dead.claim.job for dead in reply.dead] == [hit]
    assert [claim.job for claim in reply.claims] == [spared]


def test_attack_22_no_hash_field_makes_a_job_immune(agent: Agent, desk: Desk) -> None:
    """kill --all hits jobs with a sequence number of 2^53, without one, with nonsense, and with no selectors."""
    jobs = [desk.enqueue() for _ in range(6)]
    desk.redis.hset(f"rq:job:{jobs[5]}", "rf_seq", "7")
    desk.redis.hset(f"rq:job:{jobs[0]}", "rf_seq", str(2**53))
    desk.redis.hdel(f"rq:job:{jobs[1]}", "rf_seq")
    desk.redis.hset(f"rq:job:{jobs[2]}", "rf_seq", "soon")
    desk.redis.hset(f"rq:job:{jobs[3]}", "rf_sel", "")
    desk.redis.hset(f"rq:job:{jobs[4]}", mapping={"rf_seq": "-1", "rf_tenant": "nobody"})
    desk.cut("all")
    reply = agent.turn(free=(0,), lanes=("agents",))
    assert (len(reply.dead), reply.claims) == (6, ())


def test_attack_22_the_agent_judges_by_signed_selectors(agent: Agent, desk: Desk) -> None:
    """A job whose hints hide its tag is claimed, but the claim brings the cutoff that hits its signed selectors."""
    job = desk.enqueue(sel="all")
    desk.cut("tag:team=acme")
    claim = agent.claim()
    hit = agent.store.cutoff_for(job, claim.seq, ("all", "tag:team=acme"))
    assert hit is not None
    assert hit.command == b'{"id":"c2"}'
    assert agent.store.cutoff_for(job, claim.seq + 1, ("tag:team=acme",)) is hit  # above the counter counts as 0
    assert agent.store.cutoff_for(job, claim.seq, ("tag:team=other",)) is None


def test_attack_23_tenants_cut_only_their_own(agent: Agent, desk: Desk) -> None:
    """A cutoff in a tenant's table hits that tenant's jobs, whatever selector its field names."""
    mine, theirs = desk.enqueue(tenant="acme"), desk.enqueue(tenant="other")
    for field in ("all", "tenant:other", "queue:agents"):
        desk.cut(field, tenants=("acme",))
    reply = agent.turn(free=(0,), lanes=("agents",))
    assert [dead.claim.job for dead in reply.dead] == [mine]
    assert [claim.job for claim in reply.claims] == [theirs]
    assert agent.store.cutoff_for(theirs, 1, ("all", "tenant:other")) is None


@pytest.mark.parametrize("value", ["9007199254740991 k.s {}", "1e300 k.s {}", "-1 k.s {}", "nonsense", ""])
def test_attack_23_a_cutoff_above_the_counter_is_void(agent: Agent, desk: Desk, value: str) -> None:
    """A forged cutoff beyond the newest job, or a malformed one, kills nothing."""
    desk.enqueue()
    desk.redis.hset("rf:cut", mapping={"all": value, "#": "1"})
    desk.redis.expire("rf:cut", 60)
    claim = agent.claim()
    assert agent.store.cutoff_for(claim.job, claim.seq, ("all",)) is None


def test_a_node_cutoff_spares_waiting_jobs(agents: Callable[..., Agent], desk: Desk) -> None:
    """kill --node hits what the node holds, also when that comes back for a retry, and not what it may claim later."""
    agent = agents()
    agent.register()
    held, waiting = desk.enqueue(), desk.enqueue()
    claim = agent.claim()
    agent.start(claim)
    desk.cut("node:n1")
    assert agent.finish(claim, kind="retry", state=State.FAILED, started=True).result == "killed"
    assert agent.claim(slot=1).job == waiting
    assert agent.run(agent.store.read_cutoffs(()))[0].field == "node:n1"
    assert agent.store.cutoff_for(held, claim.seq, ("node:n1",)) is not None


def test_a_sweep_takes_every_hit_job_and_no_other(agents: Callable[..., Agent], desk: Desk) -> None:
    """Two agents without a free slot sweep a long lane in windows: each hit job goes to one of them, the rest stays."""
    rows = [desk.row(f"main-01m8nz26cyrcb2h2mm73g{i:05d}", sel=f"tag:n={i % 3}") for i in range(1200)]
    desk.enqueue_all(rows)
    one, two = agents("n1"), agents("n2")
    for each in (one, two):
        each.register()
    desk.cut("tag:n=0")
    found = []
    for each in (one, two, one):
        for _ in range(4 if each is two else 40):
            found += [dead.claim.job for dead in each.run(each.store.sweep(("agents",)))]
            if each.store.swept:
                break
    assert one.store.swept
    assert sorted(found) == sorted(str(row["id"]) for row in rows if row["sel"] == "tag:n=0")
    assert len(desk.waiting()) == 800


def test_commands_are_trimmed_by_age_only(agent: Agent, desk: Desk) -> None:
    """A flood of kills pushes no command out of a node's stream, and old ones go."""
    job = desk.enqueue()
    agent.claim()
    desk.redis.xadd("rf:ctl:n1", {"command": "old"}, id="1-1")
    for _ in range(300):
        desk.kill(job)
    ids_left = [entry for entry, _ in desk.redis.xrange("rf:ctl:n1")]
    assert len(ids_left) >= 300
    desk.redis.xtrim("rf:ctl:n1", minid=2, approximate=False)
    assert len(desk.redis.xrange("rf:ctl:n1")) == 300
