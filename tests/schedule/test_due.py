"""Jobs that are put off: where they wait, when they move, and what a kill does to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from rq import Queue
from rq.job import Job, JobStatus
from rq.registry import ScheduledJobRegistry
from rq.serializers import JSONSerializer

from runner.wire import ids
from runner.wire.keys import Keys
from runner.wire.states import State
from tests.schedule.clock import KEYS, Keeper
from tests.store.desk import Agent, Desk
from tests.support.valkey import Valkey

HOUR_MS = 3_600_000
MANY = 1200


@pytest.fixture
def keeper(valkey: Valkey) -> Iterator[Keeper]:
    """One scheduler."""
    with Keeper(valkey, "n1/one") as one:
        yield one


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def put_off(desk: Desk, ahead_ms: int = HOUR_MS, **fields: int | str) -> str:
    """Enqueue a job that is due so much later."""
    return desk.enqueue(due=now_ms() + ahead_ms, **fields)  # type: ignore[arg-type]  # none of them is `job`


def comes_due(desk: Desk, *jobs: str) -> None:
    """Let the time of jobs come, as if the store's clock had reached it."""
    desk.redis.zadd(KEYS.due(), {job: now_ms() - 1 for job in jobs})


def places(desk: Desk, job: str, lane: str = "agents") -> set[str]:
    """Every place that holds a job."""
    found = {
        "lane": job in desk.waiting(lane),
        "registry": desk.redis.zscore(KEYS.registry("scheduled", lane), job) is not None,
        "due": desk.redis.zscore(KEYS.due(), job) is not None,
    }
    return {name for name, holds in found.items() if holds}


def test_a_job_that_is_put_off_waits_beside_its_lane(desk: Desk, agent: Agent, keeper: Keeper) -> None:
    """It is scheduled, with its due time, no node is given it, and looking early moves nothing."""
    job = put_off(desk)
    assert places(desk, job) == {"registry", "due"}
    assert (desk.job(job)["rf_state"], desk.job(job)["status"]) == ("scheduled", "scheduled")
    look = keeper.look()
    assert look.moved == 0
    assert look.wait_ms is not None
    assert HOUR_MS - 60_000 < look.wait_ms <= HOUR_MS
    assert agent.turn(free=(0,), lanes=("agents",)).claims == ()
    assert desk.events() == [("job.scheduled", job)]


def test_a_due_job_goes_to_its_lane_once(desk: Desk, agent: Agent, keeper: Keeper) -> None:
    """When its time has come it is queued, says so with one event, wakes the lane and is claimed as any other."""
    job, other = put_off(desk), put_off(desk, lane="other")
    desk.redis.delete(KEYS.wake("agents"))
    comes_due(desk, job)
    assert keeper.look().moved == 1
    assert keeper.look().moved == 0
    assert (places(desk, job), places(desk, other, "other")) == ({"lane"}, {"registry", "due"})
    assert desk.job(job)["enqueued_at"] != ""
    assert desk.redis.llen(KEYS.wake("agents")) == 1
    assert [kind for kind, name in desk.events() if name == job] == ["job.scheduled", "job.queued"]
    assert agent.claim().job == job


def test_jobs_move_in_the_order_of_their_times(desk: Desk, keeper: Keeper) -> None:
    """Within a millisecond's precision, whatever order they came in."""
    jobs = [put_off(desk) for _ in range(5)]
    desk.redis.zadd(KEYS.due(), {job: now_ms() - 10 - n for n, job in enumerate(jobs)})
    keeper.look()
    assert desk.waiting() == list(reversed(jobs))


def test_a_time_that_has_passed_waits_for_nothing(desk: Desk) -> None:
    """A due time in the past goes straight to the lane."""
    assert places(desk, put_off(desk, -5)) == {"lane"}


def test_a_time_counts_on_top_of_other_jobs(desk: Desk, agent: Agent, keeper: Keeper) -> None:
    """A job that waits for another one is put off when that has ended, and queued when both have come."""
    first = desk.enqueue()
    job = put_off(desk, after=[first], failed="refuse")  # type: ignore[arg-type]  # a list of ids
    assert desk.job(job)["rf_state"] == "deferred"
    assert places(desk, job) == set()
    agent.finish(agent.claim(), started=False)
    assert desk.job(job)["rf_state"] == "scheduled"
    assert places(desk, job) == {"registry", "due"}
    comes_due(desk, job)
    assert keeper.look().moved == 1
    assert places(desk, job) == {"lane"}


def test_rq_reads_what_is_put_off(desk: Desk) -> None:
    """RQ's own classes see the job as one that they had put off themselves, to the second."""
    due = now_ms() + HOUR_MS
    job = desk.enqueue(due=due)
    queue = Queue("agents", connection=desk.redis, serializer=JSONSerializer)
    registry: Any = cast("Any", ScheduledJobRegistry)(queue=queue)
    assert registry.get_job_ids() == [job]
    assert registry.get_scheduled_time(job) == datetime.fromtimestamp(due // 1000, UTC)
    assert Job.fetch(job, connection=desk.redis, serializer=JSONSerializer).get_status() == JobStatus.SCHEDULED
    own = queue.enqueue_at(datetime.fromtimestamp(due // 1000, UTC), "runner.jobs.run", job_id="theirs")
    ours, theirs = desk.job(job), desk.job(own.id)
    assert {name for name in ours if not name.startswith("rf_")} >= {n for n in theirs if theirs[n]} - {
        "description",
        "timeout",
    }
    assert ours["status"] == theirs["status"]
    desk.redis.flushall()


def test_many_due_jobs_move_in_bounded_steps(desk: Desk, keeper: Keeper) -> None:
    """A thousand at one instant: each look moves a part and says that there is more."""
    jobs = [ids.new_job_id() for _ in range(MANY)]
    due = now_ms() + HOUR_MS
    for start in range(0, MANY, 200):
        desk.enqueue_all([desk.row(job, due=due) for job in jobs[start : start + 200]])
    comes_due(desk, *jobs)
    looks = [keeper.look() for _ in range(3)]
    assert [look.moved for look in looks] == [500, 500, 200]
    assert [look.more for look in looks] == [True, True, False]
    assert sorted(desk.waiting()) == sorted(jobs)


def test_two_movers_move_each_job_once(valkey: Valkey, desk: Desk) -> None:
    """Whoever comes first moves it; no job is in the lane twice, none is left."""
    jobs = [put_off(desk) for _ in range(300)]
    comes_due(desk, *jobs)

    def move(name: str) -> int:
        with Keeper(valkey, name) as one:
            return sum(one.look().moved for _ in range(20))

    with ThreadPoolExecutor(3) as pool:
        moved = sum(pool.map(move, ("a", "b", "c")))
    assert moved == 300
    assert sorted(desk.waiting()) == sorted(jobs)


def test_only_what_is_due_soon_wakes_a_mover(desk: Desk) -> None:
    """Movers look about every second by themselves."""
    put_off(desk)
    assert desk.redis.llen(KEYS.wake("-due")) == 0
    put_off(desk, 500)
    assert desk.redis.llen(KEYS.wake("-due")) == 1


def test_a_kill_ends_a_job_that_is_put_off(desk: Desk, agent: Agent, keeper: Keeper) -> None:
    """It leaves the list of scheduled jobs at once, ends once as killed, and never moves again."""
    job = put_off(desk)
    assert desk.kill(job) == ["removed"]
    assert places(desk, job) == set()
    (dead,) = agent.run(agent.store.sweep(jobs=[job]))
    agent.finish(dead.claim, state=State.KILLED, started=False)
    comes_due(desk, job)
    assert keeper.look().moved == 0
    assert desk.job(job)["rf_state"] == "killed"
    assert [kind for kind, _ in desk.events()].count("job.ended") == 1
    assert desk.redis.exists(KEYS.due(), KEYS.registry("scheduled", "agents")) == 0


def test_a_selector_ends_jobs_that_are_put_off(desk: Desk, agent: Agent) -> None:
    """Those enqueued before it, in no slot and long before their time; a later one is not hit."""
    hit = [put_off(desk, sel="tag:x=1") for _ in range(3)]
    other = put_off(desk, sel="tag:x=2")
    desk.cut("tag:x=1")
    later = put_off(desk, sel="tag:x=1")
    dead = agent.run(agent.store.sweep(("agents",)))
    assert {each.claim.job for each in dead} == set(hit)
    assert all(places(desk, job) == set() for job in hit)
    assert places(desk, other) == places(desk, later) == {"registry", "due"}


def test_a_kill_by_selector_stands_as_long_as_a_job_may_start(desk: Desk) -> None:
    """No agent lives for a month: the selector still hits the job that is due then."""
    not_after = now_ms() + 40 * 86_400_000
    put_off(desk, 33 * 86_400_000, not_after=not_after)
    desk.cut("tag:x=1")
    assert desk.redis.ttl(KEYS.cutoffs()) > 40 * 86_400


def test_a_job_that_nobody_moved_in_time_expires_once(desk: Desk, agent: Agent, keeper: Keeper) -> None:
    """Its not_after passed while no scheduler ran: it ends as expired, with one event."""
    job = put_off(desk, not_after=now_ms() - 1)
    comes_due(desk, job)
    keeper.look()
    (expired,) = agent.turn(free=(0,), lanes=("agents",)).expired
    assert expired.job == job
    agent.finish(expired, state=State.EXPIRED, started=False)
    assert keeper.look().moved == 0
    assert [kind for kind, _ in desk.events()].count("job.ended") == 1


def forged_unknown(desk: Desk) -> str:
    return "main-01m8nz26cyrcb2h2mm73g5wppq"


def forged_name(desk: Desk) -> str:
    return "x" * 200


def forged_running(desk: Desk) -> str:
    job = desk.enqueue()
    desk.redis.hset(KEYS.job(job), "rf_state", "running")
    desk.redis.delete(KEYS.queue("agents"))
    return job


def forged_type(desk: Desk) -> str:
    desk.redis.set(KEYS.job("main-01m8nz26cyrcb2h2mm73g5wppq"), "no hash", ex=60)
    return "main-01m8nz26cyrcb2h2mm73g5wppq"


@pytest.mark.parametrize("forge", [forged_unknown, forged_name, forged_running, forged_type])
def test_attack_24_a_forged_due_time_moves_nothing(desk: Desk, keeper: Keeper, forge: Callable[[Desk], str]) -> None:
    """An id that is not a scheduled job's is dropped; the others behind it move."""
    genuine = put_off(desk)
    comes_due(desk, forge(desk), genuine)
    assert keeper.look().moved == 1
    assert desk.waiting() == [genuine]
    assert keeper.look().moved == 0


def test_a_key_of_another_type_stops_no_mover(desk: Desk, keeper: Keeper) -> None:
    """Lane and registry of the wrong type are replaced, the job is not lost."""
    job = put_off(desk)
    for key in (KEYS.registry("scheduled", "agents"), KEYS.queue("agents")):
        desk.redis.set(key, "no list")
    comes_due(desk, job)
    assert keeper.look().moved == 1
    assert desk.waiting() == [job]
    desk.redis.delete(KEYS.registry("scheduled", "agents"))


def dump(desk: Desk) -> dict[str, Any]:
    return {key.decode(): desk.redis.ttl(key) for key in desk.redis.keys("*")}


def test_time_s_keys_move_below_one_hash_tag(valkey: Valkey) -> None:
    """On a cluster every key that is touched carries the tag."""
    tagged = Keys.tagged("rf")
    with Desk(valkey, tagged) as desk, Keeper(valkey, "a", tagged) as keeper:
        job = desk.enqueue(due=now_ms() + 500)
        desk.redis.zadd(tagged.due(), {job: now_ms() - 1})
        assert keeper.look().moved == 1
        assert desk.waiting() == [job]
        assert [key for key in desk.redis.keys("*") if not key.startswith((b"{rf}rq:", b"{rf}rf:"))] == []
        desk.redis.flushall()


def test_nothing_is_left_of_time(desk: Desk, agent: Agent, keeper: Keeper) -> None:
    """After its end a job that was put off has left no key that lives longer than its result."""
    job = put_off(desk)
    comes_due(desk, job)
    keeper.look()
    claim = agent.claim()
    agent.start(claim)
    agent.finish(claim)
    assert [key for key in dump(desk) if job in key and dump(desk)[key] < 0] == []
    assert desk.redis.exists(KEYS.due(), KEYS.registry("scheduled", "agents"), KEYS.ticks()) == 0
