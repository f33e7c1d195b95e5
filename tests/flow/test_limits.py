"""Unique names, rates and concurrency limits, against the scripts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from node_agent.turns import Claim
from runner.wire import ids
from runner.wire import spec as specs
from runner.wire.flow import Concurrency, Rate, Unique
from runner.wire.states import State
from tests.agent.build import job as build_job
from tests.store.desk import Agent, Desk, end
from tests.support.wait import wait_until

LANE = ("agents",)
FAR_MS = int(time.time() * 1000) + 86_400_000


def due(desk: Desk) -> int:
    """Move every job whose time has come; return how many."""
    keys = [f"rf:{name}" for name in ("due", "ticks", "leader", "clock")]
    return int(desk.script("due", keys, {"member": "n/b", "lease": 0, "limit": 100})[0])


def all_due(desk: Desk) -> int:
    """Let the time of every scheduled job have come."""
    for place, job in enumerate(desk.redis.zrange("rf:due", 0, -1)):
        desk.redis.zadd("rf:due", {job: place})
    return due(desk)


def claims(agent: Agent, slots: int = 2) -> list[Claim]:
    """Claim for every slot."""
    return list(agent.turn(free=tuple(range(slots)), lanes=LANE, budget=200).claims)


def unique(until: str = "end", ttl_ms: int = 0, key: str = "k") -> str:
    """The hint of a unique name."""
    return f"u {until} {ttl_ms} {key}"


def ended_by_kill(agent: Agent, desk: Desk, job: str) -> None:
    """Kill a waiting job and sign its end."""
    desk.kill(job)
    (dead,) = agent.run(agent.store.sweep(jobs=(job,)))
    agent.finish(dead.claim, state=State.KILLED)


def taken(desk: Desk, flow: str) -> str | None:
    """Who holds the name that a new job would take; None: the new job has it now."""
    try:
        desk.enqueue(flow=flow)
    except ResponseError as error:
        word, _, holder = str(error).split(" ")
        assert word == "TAKEN"
        return holder
    return None


def test_a_unique_name_holds_until_the_end(agent: Agent, desk: Desk) -> None:
    """While the job waits and runs, a second one is told who holds the name; after its end the next one has it."""
    job = desk.enqueue(flow=unique())
    assert taken(desk, unique()) == job
    claim = agent.claim()
    agent.start(claim)
    assert taken(desk, unique()) == job
    agent.finish(claim, started=True)
    assert not desk.redis.exists("rf:uniq:main:k")
    assert taken(desk, unique()) is None


def test_a_unique_name_until_start_is_free_from_the_start_on(agent: Agent, desk: Desk) -> None:
    """until=start frees the name with the start mark, not with the claim."""
    job = desk.enqueue(flow=unique("start"))
    claim = agent.claim()
    assert taken(desk, unique("start")) == job
    agent.start(claim)
    assert taken(desk, unique("start")) is None
    agent.finish(claim, started=True)
    assert desk.redis.exists("rf:uniq:main:k"), "the end of the first job frees the second one's hold"


def test_a_unique_name_for_a_time_outlives_the_end(agent: Agent, desk: Desk) -> None:
    """until=ttl holds for the time whatever happens to the job, and no longer."""
    job = desk.enqueue(flow=unique("ttl", 60_000))
    agent.finish(agent.claim(), started=True)
    assert taken(desk, unique("ttl", 60_000)) == job
    assert 0 < int(desk.redis.pttl("rf:uniq:main:k")) <= 60_000


@pytest.mark.parametrize("how", ["killed", "killed_running", "time_limit", "worker_died", "expired", "refused", "lost"])
def test_a_l08_a_name_is_never_left_behind(agents: Callable[..., Agent], desk: Desk, how: str) -> None:
    """However the job ends, the script that ends it frees its name (scenario A-L08)."""
    agent, other = agents("n1"), agents("n2")
    agent.register()
    job = desk.enqueue(flow=unique(), not_after=1 if how == "expired" else FAR_MS)
    if how == "killed":
        desk.kill(job)
        assert not desk.redis.exists("rf:uniq:main:k"), "a removed job still holds its name"
        (dead,) = agent.run(agent.store.sweep(jobs=(job,)))
        agent.finish(dead.claim, state=State.KILLED)
    elif how == "expired":
        agent.finish(agent.turn(free=(0,), lanes=LANE).expired[0], state=State.EXPIRED)
    elif how == "refused":
        agent.finish(agent.claim(), state=State.REFUSED, reason="policy")
    else:
        claim = agent.claim()
        agent.start(claim)
        if how == "lost":
            other.register()
            ((orphan,), _) = other.recover(named=("n1/b00t01234567",))
            other.finish(orphan.claim, state=State.LOST, reason="node_lost")
        else:
            state = State.KILLED if how == "killed_running" else State.FAILED
            agent.finish(claim, state=state, reason=how, started=True)
    assert taken(desk, unique()) is None


def test_a_l08_a_deleted_job_holds_no_name(desk: Desk) -> None:
    """A holder whose record was deleted, or that a store writer made end, is no holder."""
    job = desk.enqueue(flow=unique())
    desk.redis.delete(f"rq:job:{job}")
    assert taken(desk, unique()) is None


def test_a_name_is_held_while_the_job_waits_for_its_retry(agent: Agent, desk: Desk) -> None:
    """A retry is no end: nobody else gets the name in between."""
    job = desk.enqueue(flow=unique())
    claim = agent.claim()
    agent.start(claim)
    agent.finish(claim, kind="retry", state=State.FAILED, started=True, delay_ms=60_000)
    assert taken(desk, unique()) == job


def test_a_batch_takes_its_names_whole_or_not_at_all(desk: Desk) -> None:
    """Two jobs of one batch with one name, or one whose name is taken: nothing is written."""
    rows = [desk.row(ids.new_job_id(), flow=unique()) for _ in range(2)]
    with pytest.raises(ResponseError, match=f"TAKEN {rows[1]['id']} {rows[0]['id']}"):
        desk.enqueue_all(rows)
    assert desk.redis.keys("*") == []


def test_every_name_has_a_bound(agent: Agent, desk: Desk) -> None:
    """Without a time of its own a name ends with the job's not_after, and while it runs with its longest run."""
    desk.enqueue(flow=unique(), not_after=int(time.time() * 1000) + 100_000, timeout=500)
    assert 90_000 < int(desk.redis.pttl("rf:uniq:main:k")) <= 100_000
    agent.claim()
    assert 590_000 < int(desk.redis.pttl("rf:uniq:main:k")) <= 600_000


def test_at_most_n_start_in_any_period(agent: Agent, desk: Desk) -> None:
    """The third job of a rate of two moves aside until a period after the first start; others pass it."""
    flow = "r 2 60000 k"
    jobs = [desk.enqueue(flow=flow) for _ in range(5)]
    free = desk.enqueue()
    found = claims(agent, 3)
    assert [claim.job for claim in found] == [*jobs[:2], free]
    assert [claim.flow for claim in found] == [flow, flow, ""]
    assert desk.job(jobs[2])["rf_state"] == desk.job(jobs[2])["status"] == "scheduled"
    now_ms = time.time() * 1000
    waits = [float(desk.job(job)["rf_due"]) - now_ms for job in jobs[2:]]
    assert [round(wait / 60_000, 1) for wait in waits] == [1, 1, 2], "two start in each period, in order"
    assert all_due(desk) == 3
    assert claims(agent, 3) == [], "due is not yet allowed: what counts is what started"
    desk.redis.zadd("rf:rate:main:k", dict.fromkeys(desk.redis.zrange("rf:rate:main:k", 0, -1), 1))
    all_due(desk)
    assert {claim.job for claim in claims(agent, 3)} == set(jobs[2:4])


def test_a_rate_really_lets_go_on(agent: Agent, desk: Desk) -> None:
    """By the store's clock: never three starts within a period, and all start in the end."""
    count, period_ms = 2, 60
    jobs = [desk.enqueue(flow=f"r {count} {period_ms} k") for _ in range(8)]
    started: list[tuple[float, str]] = []

    def step() -> bool:
        due(desk)
        for claim in claims(agent, 4):
            started.append((time.monotonic(), claim.job))
            agent.finish(claim, started=True)
        return len(started) == len(jobs)

    wait_until(step, "all jobs to have started", 10)
    # Those that may start in the same millisecond have no order.
    assert [{job for _, job in started[n : n + count]} for n in range(0, 8, count)] == [
        set(jobs[n : n + count]) for n in range(0, 8, count)
    ]
    gaps = [later - first for (first, _), (later, _) in zip(started, started[count:], strict=False)]
    assert min(gaps) > 0.9 * period_ms / 1000, gaps


def test_a_clock_that_went_back_stops_no_rate(agent: Agent, desk: Desk) -> None:
    """Starts that lie in the future of Redis TIME are forgotten: else nothing would start until then."""
    desk.redis.zadd("rf:rate:main:k", {"main-x.1": (time.time() + 86_400) * 1000})
    job = desk.enqueue(flow="r 1 60000 k")
    assert [claim.job for claim in claims(agent)] == [job]


def test_places_are_never_more_than_the_limit(agents: Callable[..., Agent], desk: Desk) -> None:
    """Two places in the whole fleet; the others leave the lane, and each end calls the first in line."""
    one, two = agents("n1"), agents("n2")
    for each in (one, two):
        each.register()
    jobs = [desk.enqueue(flow="c 2 k") for _ in range(5)]
    free = desk.enqueue()
    running = claims(one, 3)
    assert [claim.job for claim in running] == [*jobs[:2], free]
    assert claims(two) == []
    assert desk.waiting() == []
    assert one.finish(running[0], started=True).result == "done"
    assert desk.waiting() == [jobs[2]]
    (third,) = claims(two)
    assert third.job == jobs[2]
    assert {desk.job(job)["rf_state"] for job in jobs[3:]} == {"scheduled"}
    two.finish(third, kind="release")
    (again,) = claims(two)
    assert (again.job, again.attempt) == (third.job, 1), "what was given back goes before those in line"
    assert desk.job(jobs[3])["rf_state"] == "scheduled"


def places(desk: Desk) -> set[str]:
    """Who has a place."""
    return {job.decode() for job in desk.redis.smembers("rf:conc:main:k")}


@pytest.mark.parametrize("how", ["end", "retry", "delayed", "release", "unmarked", "unheard", "orphan", "deleted"])
def test_no_place_leaks(agents: Callable[..., Agent], desk: Desk, how: str) -> None:
    """Every way out of a node's hands frees the place: ends, retries, releases, lost nodes, even a deleted record."""
    one, two = agents("n1"), agents("n2")
    for each in (one, two):
        each.register()
    job, waiting = desk.enqueue(flow="c 1 k"), desk.enqueue(flow="c 1 k")
    (claim,) = claims(one)
    assert places(desk) == {job}
    if how in {"end", "retry", "delayed"}:
        one.start(claim)
        one.finish(claim, kind="end" if how == "end" else "retry", started=True, delay_ms=60_000 * (how == "delayed"))
    elif how == "release":
        one.finish(claim, kind="release")
    elif how == "unmarked":
        two.recover(named=("n1/b00t01234567",))
    elif how == "unheard":
        one.turn(held=())
    elif how == "orphan":
        one.start(claim)
        ((orphan,), _) = two.recover(named=("n1/b00t01234567",))
        assert places(desk) == {job}, "nobody knows yet that nothing of it runs"
        two.finish(orphan.claim, state=State.LOST)
    else:
        desk.redis.delete(f"rq:job:{job}")
        all_due(desk)
    assert places(desk) <= {job if how == "deleted" else ""}
    found = claims(two, 1)
    assert [each.job for each in found] == [waiting] or how in {"retry", "release", "unmarked", "unheard"}
    assert len(found) == 1
    assert places(desk) == {found[0].job}


def test_every_key_of_a_limit_has_a_life(agent: Agent, desk: Desk) -> None:
    """Whatever waits, no key of a unique name, a rate or a concurrency limit stays for ever."""
    for _ in range(3):
        desk.enqueue(flow="r 1 60000 k")
        desk.enqueue(flow="c 1 k")
    desk.enqueue(flow=unique())
    claims(agent, 3)
    names = {key.decode(): int(desk.redis.ttl(key)) for key in desk.redis.keys("rf:*:main:k")}
    assert sorted(name.split(":")[1] for name in names) == ["conc", "line", "plan", "rate", "uniq"]
    assert all(0 < life <= 32 * 86_400 for life in names.values()), names


def test_who_is_in_line_is_not_overtaken(agent: Agent, desk: Desk) -> None:
    """A free place is the called one's, also while a newcomer lies in a lane that is served first."""
    jobs = [desk.enqueue(flow="c 1 k") for _ in range(2)]
    (claim,) = claims(agent)
    newcomer = desk.enqueue(flow="c 1 k", lane="other")
    agent.finish(claim, started=True)
    found = agent.turn(free=(0,), lanes=("other", "agents"), budget=200).claims
    assert [each.job for each in found] == [jobs[1]]
    assert desk.job(newcomer)["rf_state"] == "scheduled"


@pytest.mark.parametrize("gone", ["killed", "untaken"])
def test_a_called_one_that_does_not_come_holds_up_nobody(agent: Agent, desk: Desk, gone: str) -> None:
    """Who was called and then killed, or lies in a lane that no node serves, keeps no place free for itself."""
    holder, called, third = (desk.enqueue(flow="c 1 k", lane=lane) for lane in ("agents", "unserved", "agents"))
    found = agent.turn(free=(0, 1), lanes=("agents", "unserved"), budget=200).claims
    assert [each.job for each in found] == [holder]
    agent.finish(found[0], started=True)
    assert (desk.waiting("unserved"), desk.waiting()) == ([called], [])
    if gone == "killed":
        ended_by_kill(agent, desk, called)
    else:
        desk.redis.hset(f"rq:job:{called}", "rf_due", 1)
    newcomer = desk.enqueue(flow="c 1 k")
    again = [*claims(agent, 1), *claims(agent, 1)]
    assert [each.job for each in again] == [third], "the newcomer has it called, and waits behind it"
    assert desk.job(newcomer)["rf_state"] == "scheduled"


def test_many_places_freed_at_once_are_all_taken(agent: Agent, desk: Desk) -> None:
    """However many wait, and however many places are free: no place stays empty while somebody waits for one."""
    jobs = [desk.enqueue(flow="c 70 k") for _ in range(140)]
    rounds = []
    for _ in range(2):
        running = agent.turn(free=tuple(range(80)), lanes=LANE, budget=500).claims
        agent.turn(finishes=tuple(end(claim, started=True) for claim in running))
        rounds.append([claim.job for claim in running])
    assert [sorted(found) for found in rounds] == [sorted(jobs[:70]), sorted(jobs[70:])]


def test_who_got_a_place_is_in_line_no_more(agent: Agent, desk: Desk) -> None:
    """Nothing is left of a line when the last of it has come back by itself and has its place."""
    desk.enqueue(flow="c 1 k")
    waiting = desk.enqueue(flow="c 1 k")
    claims(agent)
    desk.redis.delete("rf:conc:main:k")
    all_due(desk)
    assert [claim.job for claim in claims(agent)] == [waiting]
    assert not desk.redis.exists("rf:line:main:k")


def test_one_in_line_that_was_killed_is_not_called(agent: Agent, desk: Desk) -> None:
    """The line skips who is not there any more, and a kill ends a job in line."""
    jobs = [desk.enqueue(flow="c 1 k") for _ in range(3)]
    (claim,) = claims(agent)
    ended_by_kill(agent, desk, jobs[1])
    assert desk.job(jobs[1])["rf_state"] == "killed"
    agent.finish(claim, started=True)
    assert desk.waiting() == [jobs[2]]


def test_attack_56_tenants_never_meet_in_a_name(agent: Agent, desk: Desk) -> None:
    """Equal unique, rate and concurrency keys of two tenants are two names each."""
    flow = "u end 0 k\nr 1 60000 k\nc 1 k"
    jobs = [desk.enqueue(job=ids.new_job_id(tenant), flow=flow) for tenant in ("acme", "main")]
    assert [claim.job for claim in claims(agent)] == jobs
    for kind in ("uniq", "rate", "conc"):
        assert sorted(desk.redis.keys(f"rf:{kind}:*")) == [f"rf:{kind}:{name}:k".encode() for name in ("acme", "main")]


KEYS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(KEYS, KEYS, KEYS, st.floats(0.0001, 31_622_400), st.integers(1, 1_000_000))
def test_what_was_signed_is_what_the_scripts_read(
    agent: Agent, desk: Desk, name: str, rate: str, place: str, seconds: float, count: int
) -> None:
    """Every rule that can be signed reaches the scripts whole, whatever characters its key has."""
    spec = build_job(
        unique=Unique(name, "ttl", seconds), rate=Rate(rate, count, seconds), concurrency=Concurrency(place, count)
    )
    desk.enqueue(flow=specs.flow_of(spec))
    (claim,) = claims(agent)
    keys = [f"rf:uniq:main:{name}", f"rf:rate:main:{rate}", f"rf:conc:main:{place}"]
    assert all(desk.redis.exists(key) or seconds < 1 for key in keys)
    agent.finish(claim, started=True)
    desk.redis.delete(*keys)


FORGED = [
    "u",
    "u end x k",
    "u end 99999999999999999999 k",
    "r 0 0 k",
    "r -1 5 k",
    "c 1e9 k",
    "c 99999999 k",
    "c 1",
    "x" * 70_000,
]


@pytest.mark.parametrize("flow", FORGED)
def test_attack_22_forged_limits_stop_no_turn(agent: Agent, desk: Desk, flow: str) -> None:
    """A hint of any other form limits nothing and is handed out as it is, for admission to refuse."""
    job = desk.enqueue()
    desk.redis.hset(f"rq:job:{job}", "rf_flow", flow)
    (claim,) = claims(agent)
    assert (claim.job, claim.flow) == (job, flow)
    assert agent.finish(claim, state=State.REFUSED).result == "done"


def test_attack_22_keys_of_a_wrong_type_stop_no_turn(agent: Agent, desk: Desk) -> None:
    """Whatever lies under the names of limits is replaced or passed over."""
    flow = "u end 0 k\nr 1 60000 k\nc 1 k"
    jobs = [desk.enqueue(flow=flow.replace("0 k", f"0 k{n}")) for n in range(3)]
    for kind, n in itertools.product(("uniq", "rate", "plan", "conc", "line"), range(3)):
        desk.redis.delete(f"rf:{kind}:main:k{n}")
        desk.redis.hset(f"rf:{kind}:main:k{n}", "a", "b")
        desk.redis.expire(f"rf:{kind}:main:k{n}", 60)
    for kind in ("rate", "plan", "conc", "line"):
        desk.redis.hset(f"rf:{kind}:main:k", "a", "b")
        desk.redis.expire(f"rf:{kind}:main:k", 60)
    (claim, *others) = claims(agent)
    assert claim.job == jobs[0]
    assert others == []
    assert agent.finish(claim, started=True).result == "done"
    assert desk.job(jobs[0])["rf_state"] == "finished"


def test_who_was_held_back_by_a_rate_is_not_overtaken(agent: Agent, desk: Desk) -> None:
    """When a start is allowed again, a newcomer in the lane does not take it from one that waits aside."""
    flow = "r 1 60000 k"
    first, second = desk.enqueue(flow=flow), desk.enqueue(flow=flow)
    assert [claim.job for claim in claims(agent)] == [first]
    desk.redis.delete("rf:rate:main:k")
    third = desk.enqueue(flow=flow)
    assert claims(agent) == []
    all_due(desk)
    assert [claim.job for claim in claims(agent)] == [second]
    assert desk.job(third)["rf_state"] == "scheduled"


@pytest.mark.parametrize("gone", ["killed", "deleted", "untaken"])
def test_nobody_waits_for_one_that_will_not_come(agent: Agent, desk: Desk, gone: str) -> None:
    """A held-back job that was killed or deleted, or that no node takes when it is due, holds up no other."""
    flow = "r 1 60000 k"
    _, second = desk.enqueue(flow=flow), desk.enqueue(flow=flow)
    claims(agent)
    if gone == "killed":
        ended_by_kill(agent, desk, second)
    elif gone == "deleted":
        desk.redis.delete(f"rq:job:{second}")
    else:
        desk.redis.hset(f"rq:job:{second}", "rf_due", int(time.time() * 1000) - 60_000)
    desk.redis.delete("rf:rate:main:k")
    third = desk.enqueue(flow=flow)
    assert [claim.job for claim in claims(agent)] == [third]
