"""Leases, names, recovery, and clocks that jump."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from node_agent import session
from node_agent.heartbeat import Heartbeat, Heir, LeaseStore
from node_agent.lease import Lease
from node_agent.rq_store import SHOWN
from node_agent.turns import Start
from runner.wire.states import State
from tests.store.desk import LEASE_MS, MARGIN_MS, Agent, Desk

WAIT_S = (LEASE_MS + MARGIN_MS) / 1000
ONE = "n1/b00t01234567"


class Clock:
    """A host's clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


@pytest.fixture
def pair(agents: Callable[..., Agent]) -> tuple[Agent, Agent, Clock]:
    """A start that will die, a watcher, and the watcher's clock."""
    clock = Clock()
    dying, watcher = agents("n1"), agents("n2", clock=clock)
    dying.register()
    watcher.register()
    return dying, watcher, clock


def lapse(desk: Desk, member: str = ONE) -> None:
    """Let Redis TIME be past a lease and its margin."""
    desk.redis.zadd("rf:leases", {member: 1000})


def test_a_renewal_prolongs_and_grows(agent: Agent, desk: Desk) -> None:
    """Each renewal moves the lease on, even in the same millisecond, keeps the workers and updates the record."""
    scores = []
    for _ in range(20):
        assert agent.run(agent.store.renew(agent.record, LEASE_MS))
        scores.append(desk.redis.zscore("rf:leases", ONE))
    assert sorted(set(scores)) == scores
    assert desk.redis.hget("rf:nodes", "n1") == agent.record
    assert int(str(desk.redis.ttl("rq:worker:n1.b00t01.1"))) > 470


def test_new_lanes_are_shown(agent: Agent, desk: Desk) -> None:
    """A change of lanes reaches the worker hashes and RQ's sets of workers by queue."""
    agent.run(agent.store.renew(agent.record, LEASE_MS, ("agents@gpu=yes", "misc")))
    assert desk.redis.hget("rq:worker:n1.b00t01.0", "queues") == b"agents@gpu=yes,misc"
    assert desk.redis.scard("rq:workers:misc") == 2
    assert desk.redis.exists("rq:workers:agents") == 0


def test_very_many_lanes_are_not_all_shown(agent: Agent, desk: Desk) -> None:
    """Each is written for each slot while the whole store waits, and any client may make more of them."""
    many = tuple(f"q{number:05}" for number in range(3 * SHOWN))
    agent.run(agent.store.renew(agent.record, LEASE_MS, many))
    assert len(desk.redis.keys("rq:workers:*")) == SHOWN
    assert desk.redis.scard(f"rq:workers:{many[SHOWN - 1]}") == 2
    agent.run(agent.store.renew(agent.record, LEASE_MS, ("agents",)))
    assert desk.redis.keys("rq:workers:*") == [b"rq:workers:agents"]


def test_lapsed_workers_come_back_whole(agent: Agent, desk: Desk) -> None:
    """Worker hashes that expired during a long outage are written again with all fields and a TTL."""
    before = desk.redis.hkeys("rq:worker:n1.b00t01.0")
    desk.redis.delete("rq:worker:n1.b00t01.0", "rq:worker:n1.b00t01.1")
    agent.run(agent.store.renew(agent.record, LEASE_MS))
    assert sorted(desk.redis.hkeys("rq:worker:n1.b00t01.0")) == sorted(before)
    assert int(str(desk.redis.ttl("rq:worker:n1.b00t01.0"))) > 470


def test_a_taken_lease_never_comes_back(pair: tuple[Agent, Agent, Clock]) -> None:
    """After a recovery the old start can neither renew nor claim."""
    dying, watcher, _ = pair
    watcher.recover(named=(ONE,))
    assert not dying.run(dying.store.renew(dying.record, LEASE_MS))
    assert dying.turn(free=(0,), lanes=("agents",)).lost


def test_unstarted_jobs_return_uncounted_and_started_ones_are_handed_over(
    pair: tuple[Agent, Agent, Clock], desk: Desk
) -> None:
    """Recovery puts a claimed job back to the head of its lane as if never claimed, and hands over a running one."""
    dying, watcher, _ = pair
    running, claimed = desk.enqueue(retries=3, once=1), desk.enqueue()
    claim = dying.claim()
    dying.start(claim)
    dying.claim(slot=1)
    orphans, dead = watcher.recover(named=(ONE,))
    assert dead == ()
    (orphan,) = orphans
    assert (orphan.claim.job, orphan.claim.attempt, orphan.claim.slot) == (running, 1, None)
    assert (orphan.node, orphan.boot, orphan.once, orphan.retries) == ("n1", "b00t01234567", True, 3)
    again = watcher.claim()
    assert (again.job, again.attempt) == (claimed, 1)
    assert desk.redis.exists(f"rf:claims:{ONE}") == 0
    assert not any(key.startswith(b"rq:worker:n1") for key in desk.redis.keys("*"))
    assert desk.redis.smembers("rq:workers") == {b"rq:worker:n2.b00t01.0", b"rq:worker:n2.b00t01.1"}
    assert watcher.finish(orphan.claim, state=State.LOST, started=True).result == "done"
    assert desk.redis.zcard("rq:wip:agents") == 1


def test_exactly_one_agent_recovers(agents: Callable[..., Agent], desk: Desk) -> None:
    """Of several recoverers one gets each job."""
    dying, others = agents("n1"), [agents("n2"), agents("n3")]
    for each in (dying, *others):
        each.register()
    desk.enqueue()
    dying.start(dying.claim())
    found = [orphan for each in others for orphan in each.recover(named=(ONE,))[0]]
    assert len(found) == 1


def test_a_dying_recoverer_loses_nothing(agents: Callable[..., Agent], desk: Desk) -> None:
    """An orphan whose recoverer dies in turn is handed over again, as started, also while it is being killed."""
    starts = [agents(name) for name in ("n1", "n2", "n3")]
    for each in starts:
        each.register()
    job = desk.enqueue()
    claim = starts[0].claim()
    starts[0].start(claim)
    starts[0].turn(starts=(Start(claim, State.KILLING),))
    starts[1].recover(named=(ONE,))
    ((orphan,), dead) = starts[2].recover(named=("n2/b00t01234567",))
    assert (orphan.claim.job, orphan.claim.attempt, dead) == (job, 1, ())


def test_killed_claims_of_a_dead_start_are_buried(pair: tuple[Agent, Agent, Clock], desk: Desk) -> None:
    """A claim that a kill hit before its start, and a dead job nobody signed, come to the recoverer as not started."""
    dying, watcher, _ = pair
    claimed, dead_before = desk.enqueue(), desk.enqueue(sel="tag:x=y")
    dying.claim()
    desk.cut("tag:x=y")
    assert len(dying.turn(free=(1,), lanes=("agents",)).dead) == 1
    desk.kill(claimed)
    orphans, dead = watcher.recover(named=(ONE,))
    assert orphans == ()
    assert sorted(found.claim.job for found in dead) == sorted((claimed, dead_before))
    assert all(found.claim.attempt == 0 for found in dead)


def test_a_killed_orphan_carries_its_kill(pair: tuple[Agent, Agent, Clock], desk: Desk) -> None:
    """A started attempt that a kill hits is handed over with the command."""
    dying, watcher, _ = pair
    job = desk.enqueue()
    dying.start(dying.claim())
    assert desk.kill(job) == ["sent", "n1"]
    ((orphan,), _) = watcher.recover(named=(ONE,))
    assert orphan.word is not None
    assert orphan.word.command == b'{"id":"c1"}'


def test_a_lease_counts_as_lapsed_only_after_it_stood_still(pair: tuple[Agent, Agent, Clock], desk: Desk) -> None:
    """A jump of Redis TIME makes no two owners: the watcher itself sees the lease unchanged for lease + margin."""
    dying, watcher, clock = pair
    desk.enqueue()
    dying.start(dying.claim())
    watcher.recover()
    lapse(desk)
    clock.now_s += WAIT_S
    assert watcher.recover() == ((), ())  # the score has changed just now
    clock.now_s += WAIT_S - 0.1
    assert watcher.recover() == ((), ())
    clock.now_s += 0.2
    assert len(watcher.recover()[0]) == 1


def test_a_renewal_in_time_keeps_everything(pair: tuple[Agent, Agent, Clock], desk: Desk) -> None:
    """A lease that was renewed between the watcher's look and its grasp is not taken."""
    dying, watcher, clock = pair
    desk.enqueue()
    dying.claim()
    lapse(desk)
    watcher.recover()
    clock.now_s += WAIT_S + 1
    assert dying.run(dying.store.renew(dying.record, LEASE_MS))
    assert watcher.recover() == ((), ())
    assert dying.run(dying.store.renew(dying.record, LEASE_MS))


def test_redis_time_that_goes_back_revives_no_lease(pair: tuple[Agent, Agent, Clock], desk: Desk) -> None:
    """With the fleet's clock ahead of Redis TIME a lapsed start stays lapsed, and in the end it is recovered."""
    dying, watcher, clock = pair
    job = desk.enqueue()
    dying.start(dying.claim())
    future = int(desk.redis.time()[0]) * 1000 + 86_400_000
    desk.redis.set("rf:clock", future)
    desk.enqueue()
    assert dying.turn(free=(1,), lanes=("agents",)).lost
    assert watcher.run(watcher.store.renew(watcher.record, LEASE_MS))
    watcher.recover()
    clock.now_s += 3 * WAIT_S
    ((orphan,), _) = watcher.recover()
    assert orphan.claim.job == job


def test_a_patient_watcher_does_not_need_redis_time(pair: tuple[Agent, Agent, Clock], desk: Desk) -> None:
    """A lease far in the future (TIME went back) is taken once it stood still for three times as long."""
    dying, watcher, clock = pair
    desk.enqueue()
    dying.start(dying.claim())
    desk.redis.zadd("rf:leases", {ONE: int(desk.redis.time()[0]) * 1000 + 86_400_000})
    watcher.recover()
    clock.now_s += 2 * WAIT_S
    assert watcher.recover() == ((), ())
    clock.now_s += WAIT_S
    assert len(watcher.recover()[0]) == 1


def test_a_lapsed_watcher_recovers_nothing(pair: tuple[Agent, Agent, Clock], desk: Desk) -> None:
    """Who has no lease itself takes over nobody's jobs."""
    dying, watcher, _ = pair
    desk.enqueue()
    dying.start(dying.claim())
    lapse(desk, "n2/b00t01234567")
    assert watcher.recover(named=(ONE,)) == ((), ())


def test_a_name_belongs_to_one_host(agents: Callable[..., Agent], desk: Desk) -> None:
    """A second host under a live name is refused; the same host takes over at once, another after the lapse."""
    first = agents("n1", "aaaaaaaaaaaa")
    first.register("host-1")
    assert agents("n1", "bbbbbbbbbbbb").register("host-2").refused_by == "host-1"
    again = agents("n1", "cccccccccccc").register("host-1")
    assert (again.refused_by, again.older) == (None, ("n1/aaaaaaaaaaaa",))
    for member in (b"n1/aaaaaaaaaaaa", b"n1/cccccccccccc"):
        lapse(desk, member.decode())
    assert agents("n1", "dddddddddddd").register("host-2").refused_by is None


def test_leaving_takes_everything_away(agent: Agent, desk: Desk) -> None:
    """After a clean stop no lease, record or worker is left, and RQ's view shows the death."""
    assert agent.run(agent.store.unregister()) == 0
    assert desk.redis.exists("rf:leases", "rf:nodes", "rq:workers", "rq:workers:agents") == 0
    assert desk.redis.hexists("rq:worker:n1.b00t01.0", "death")
    assert 0 < int(str(desk.redis.ttl("rq:worker:n1.b00t01.0"))) <= 60


def test_leaving_with_jobs_leaves_the_lease(agent: Agent, desk: Desk) -> None:
    """A start that stops while it holds a job keeps its lease, so that the job is recovered when it lapses."""
    desk.enqueue()
    agent.claim()
    assert agent.run(agent.store.unregister()) == 1
    assert desk.redis.zscore("rf:leases", ONE) is not None


def test_a_later_start_keeps_its_record(agents: Callable[..., Agent], desk: Desk) -> None:
    """The stop of an earlier start does not remove the record of a later one."""
    old, new = agents("n1", "aaaaaaaaaaaa"), agents("n1", "bbbbbbbbbbbb")
    old.register()
    new.register()
    old.run(old.store.unregister())
    assert desk.redis.hget("rf:nodes", "n1") == new.record


def test_many_claims_come_in_several_calls(agents: Callable[..., Agent], desk: Desk) -> None:
    """More jobs than one recovery call takes are handed over by the next ones, none twice."""
    dying, watcher = agents("n1"), agents("n2")
    dying.register()
    watcher.register()
    desk.enqueue_all([desk.row(f"main-01m8nz26cyrcb2h2mm73g{i:05d}") for i in range(300)])
    desk.cut("all")
    taken = sum(len(dying.turn(free=(0,), lanes=("agents",)).dead) for _ in range(6))
    assert taken == 300
    found = [dead.claim.job for dead in watcher.recover(named=(ONE,))[1]]
    assert not dying.run(dying.store.renew(dying.record, LEASE_MS))  # half taken over is lost already
    found += [dead.claim.job for dead in watcher.recover(named=(ONE,))[1]]
    assert len(found) == len(set(found)) == 300
    assert desk.redis.zscore("rf:leases", ONE) is None


@pytest.mark.parametrize(("others", "least", "most"), [(0, 1.0, 1.0), (2, 1.0, 1.0), (3, 1.25, 2.5), (99, 1.25, 2.5)])
def test_agents_of_a_large_fleet_look_less_often_each(others: int, least: float, most: float) -> None:
    """A lapse is still seen within three heartbeats: two of them and a half until it counts, and two looks at most."""
    store = cast("LeaseStore", SimpleNamespace(others=others))
    heartbeat = Heartbeat(
        store,
        store,
        cast("Lease", None),
        cast("Heir", None),
        heartbeat_s=5.0,
        describe=lambda: b"",
        lanes=lambda: (),
    )
    looks = [heartbeat.pause_looks() for _ in range(200)]
    assert least <= min(looks)
    assert max(looks) <= most
    assert 2.5 + 2 * session._RECOVERY_BEATS * most <= 3.0
