"""Priorities: which job of a queue comes next, and that a low one never starves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.lanes import Lanes
from runner.scripts import loader
from runner.wire import spec as specs
from runner.wire.errors import RecordError
from tests.agent.build import job as build_job
from tests.store.desk import Agent, Desk

LANES = Lanes("n1", ("*",), {"gpu": "yes"}, "A")


def lane(priority: int, queue: str = "agents", **more: object) -> str:
    """The lane of a job."""
    return specs.lane_of(build_job(priority=priority, queue=queue, **more))


def put(desk: Desk, where: str, waited_s: float = 0.0) -> str:
    """Enqueue a job that has waited for some time."""
    job = desk.enqueue(lane=where)
    at = datetime.now(UTC) - timedelta(seconds=waited_s)
    desk.redis.hset(f"rq:job:{job}", "enqueued_at", at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"))
    return job


def order(desk: Desk, agent: Agent) -> list[str]:
    """Take every waiting job in the order in which one slot gets them."""
    LANES.refresh(name.decode() for name in desk.redis.smembers("rf:lanes"))
    found = []
    while claims := agent.turn(free=(0,), lanes=LANES.order()).claims:
        found.append(claims[0].job)
        agent.finish(claims[0], started=True)
    return found


def test_a_f05_the_next_start_is_the_highest(agent: Agent, desk: Desk) -> None:
    """High before low, equal ones first in first out, in whatever order they came (scenario A-F05)."""
    priorities = [-1, 0, 9, 10, 50, 50, 0, -1]
    jobs = [put(desk, lane(points)) for points in priorities]
    expected = sorted(range(len(jobs)), key=lambda at: -priorities[at])
    assert order(desk, agent) == [jobs[at] for at in expected]


def test_a_f05_a_low_job_never_starves(agent: Agent, desk: Desk) -> None:
    """One point is one second of waiting: after so many seconds a low job goes before any newer high one."""
    high, low = [put(desk, lane(1000)) for _ in range(3)], put(desk, lane(-1000), waited_s=2001)
    medium = put(desk, lane(0), waited_s=900)
    assert order(desk, agent) == [low, *high, medium]


@pytest.mark.parametrize("bad", [-1001, 1001, 10**9])
def test_a_f05_a_bad_priority_is_refused(bad: int) -> None:
    """A value out of range is no high priority but an error."""
    with pytest.raises(RecordError, match="-1000 to 1000"):
        build_job(priority=bad)


def test_priorities_order_jobs_of_one_queue_with_other_needs(agent: Agent, desk: Desk) -> None:
    """Labels and pins make lanes of their own; priority counts across them, and never across queues."""
    plain, labelled = put(desk, lane(0)), put(desk, lane(5, labels={"gpu": "yes"}))
    pinned = put(desk, lane(7, node="n1"))
    other = put(desk, lane(-9, queue="other"))
    found = order(desk, agent)
    assert [job for job in found if job != other] == [pinned, labelled, plain]
    assert other in found


def test_one_turn_fills_several_slots_in_order(agent: Agent, desk: Desk) -> None:
    """Within a turn the order holds, too, and RQ sees each line in its own order."""
    jobs = {points: [put(desk, lane(points)) for _ in range(2)] for points in (0, 3)}
    assert desk.waiting(lane(3)) == jobs[3]
    LANES.refresh((lane(0), lane(3)))
    reply = agent.turn(free=(0, 1), lanes=LANES.order(), budget=3)
    assert [claim.job for claim in reply.claims] == jobs[3]
    assert reply.more


def test_attack_22_a_forged_time_or_lane_gives_no_priority(agent: Agent, desk: Desk) -> None:
    """An unreadable time counts as now, one from the future too; a lane with a false priority is not served."""
    first, last = put(desk, lane(1)), put(desk, lane(-1))
    for text in ("", "x", "9999-01-01T00:00:00.000000Z"):
        desk.redis.hset(f"rq:job:{put(desk, lane(0))}", "enqueued_at", text)
        desk.redis.rpush(f"rq:queue:{lane(2)}", "nobody")
        desk.redis.sadd("rf:lanes", lane(2))
    found = order(desk, agent)
    assert (found[0], found[-1], len(found)) == (first, last, 5)
    for forged in ("9999", "-0", "0", "05", "1e3", "", "x"):
        assert not LANES.serves(f"agents@priority={forged}")


@given(st.integers(-1000, 1000), st.dictionaries(st.sampled_from(["gpu", "zone"]), st.just("yes"), max_size=2))
def test_a_lane_carries_its_priority(points: int, labels: dict[str, str]) -> None:
    """The name tells the priority, 0 leaves no trace, and every node that meets the rest serves it."""
    name = lane(points, labels=labels)
    assert specs.priority_of(name) == points
    assert ("priority" in name) == bool(points)
    assert LANES.serves(name) == ("zone" not in labels)


def test_a_f05_a_new_lane_is_seen_before_anything_is_claimed(agent: Agent, desk: Desk) -> None:
    """The first job of a new priority goes before what waits; lanes that keep coming stop nobody."""
    low = desk.enqueue()
    agent.run(agent.store.lanes())
    high = put(desk, lane(9))
    first = agent.turn(free=(0,), lanes=("agents",))
    assert (first.claims, sorted(first.lanes), first.more) == ((), ["agents", lane(9)], True)
    put(desk, lane(8))
    LANES.refresh(first.lanes)
    second = agent.turn(free=(0,), lanes=LANES.order())
    assert ([claim.job for claim in second.claims], second.lanes) == ([high], ())
    assert agent.turn(free=(1,), lanes=("agents",)).lanes
    assert [claim.job for claim in agent.turn(free=(1,), lanes=("agents",)).claims] == [low]


def test_times_are_read_as_they_are_written(desk: Desk) -> None:
    """The script's reader of RQ's times is the calendar's, leap years and year ends included."""
    text = Path(loader.__file__).with_name("points.lua").read_text()
    loop = "local found = {} for i, at in ipairs(ARGV) do found[i] = ms_of(at) end return found"
    script = f"local NOW_MS = 0\n{text}\n{loop}"
    start = datetime(1999, 12, 30, 23, 59, 59, 999_000, tzinfo=UTC)
    times = [start + timedelta(days=n) for n in range(0, 150 * 365, 13)]
    words = [at.strftime("%Y-%m-%dT%H:%M:%S.%fZ") for at in times]
    assert desk.redis.eval(script, 0, *words) == [round(at.timestamp() * 1000) for at in times]


def test_a_queue_without_priorities_pays_nothing(agent: Agent, desk: Desk) -> None:
    """Without priorities the turn reads no head of any lane: the same commands as ever."""
    desk.enqueue()
    LANES.refresh(("agents", "other"))
    desk.redis.config_resetstat()
    agent.turn(free=(0,), lanes=LANES.order())
    assert "cmdstat_lindex" not in desk.redis.info("commandstats")
