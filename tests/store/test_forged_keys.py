"""Keys that whoever writes the store has spoilt: of another type, or streams that take no entry any more.

None of them may stop what is not its own: an agent's turn, its lease, a recovery, a kill, another tenant's schedule.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from node_agent.cancelling import end_all
from node_agent.mail import Mail
from node_agent.records import Signed
from node_agent.rq_store import Store
from node_agent.scheduler import Scheduler
from node_agent.scheduler_store import TimeStore
from runner.wire import schedule as schedules
from tests.agent.build import signer
from tests.schedule.clock import KEYS, Keeper, put, schedule
from tests.store.desk import LEASE_MS, Agent, Desk, end
from tests.support.valkey import Valkey
from tests.support.wait import await_until

#: The largest id of a stream: after it there is no other.
LAST = f"{2**64 - 1}-{2**64 - 1}"
LANE = ("agents",)


def spoil(desk: Desk, key: str, *, full: bool = False) -> None:
    """Put something into the key's place that is not what its readers expect."""
    was = desk.redis.type(key)
    desk.redis.delete(key)
    if full:
        desk.redis.xadd(key, {"a": "b"}, id=LAST)
    elif was in (b"string", b"hash"):
        desk.redis.sadd(key, "spoilt")
    else:
        desk.redis.set(key, "spoilt")
    desk.redis.expire(key, 60)


def of_a_job(job: str) -> Iterator[tuple[str, bool]]:
    """Yield every key beside the hash of one job, its tenant, its lane's registries and its worker: (key, full)."""
    for key in (KEYS.results(job), KEYS.log(job), KEYS.events("main")):
        yield from ((key, False), (key, True))
    for key in (KEYS.then(job), KEYS.open(job), KEYS.active("main"), KEYS.wake("agents")):
        yield key, False
    for kind in ("wip", "finished", "failed", "scheduled", "deferred", "canceled"):
        yield KEYS.registry(kind, "agents"), False
    yield f"rq:executions:{job}", False
    yield "rq:worker:n1.b00t01.0", False
    yield "rq:worker:n1.b00t01.0:executions", False
    yield KEYS.claims("n1", "b00t01234567"), False


@pytest.mark.parametrize("when", ["queued", "claimed", "started"])
def test_attack_20_a_spoilt_key_stops_no_turn(agent: Agent, desk: Desk, when: str) -> None:
    """Whenever it is spoilt, the job that was popped is handed out or comes again, and its end is written."""
    for key, full in of_a_job("JOB"):
        spoilt = desk.enqueue()
        waiter = desk.enqueue(after=[spoilt], failed="run")
        key = key.replace("JOB", spoilt)
        if when == "queued":
            spoil(desk, key, full=full)
        claim = agent.claim()
        if when == "claimed":
            spoil(desk, key, full=full)
        agent.start(claim)
        if when == "started":
            spoil(desk, key, full=full)
        assert agent.finish(claim, started=True, return_value=b"1").result == "done", key
        assert desk.job(spoilt)["rf_state"] == "finished", key
        if KEYS.then(spoilt) != key:
            assert agent.claim().job == waiter, key
        desk.redis.flushall()
        agent.register()


def test_attack_20_a_spoilt_worker_costs_no_lease(agent: Agent, desk: Desk) -> None:
    """A renewal makes the worker anew, and the lease goes on; so do those of the lanes and of the nodes' records."""
    for key in ("rq:worker:n1.b00t01.0", "rq:workers:agents", "rq:workers:misc", KEYS.nodes(), KEYS.workers()):
        spoil(desk, key)
        assert agent.run(agent.store.renew(agent.record, LEASE_MS, ("agents", "misc"))), key
        assert agent.run(agent.store.renew(agent.record, LEASE_MS, ("agents",))), key
        assert desk.redis.hget("rq:worker:n1.b00t01.0", "queues") == b"agents", key
        desk.redis.delete(KEYS.workers())
    assert desk.redis.hget(KEYS.nodes(), "n1") == agent.record


@pytest.mark.parametrize("clock", ["1e300", "inf", "-5", "no number", str(2**60)])
def test_attack_20_a_forged_clock_ends_no_lease(agent: Agent, desk: Desk, clock: str) -> None:
    """What is no time of the store's is not believed."""
    desk.redis.set(KEYS.clock(), clock)
    for _ in range(2):
        assert agent.run(agent.store.renew(agent.record, LEASE_MS))
    job = desk.enqueue()
    assert agent.claim().job == job
    assert abs(int(desk.redis.get(KEYS.clock())) - time.time() * 1000) < 60_000


def test_attack_20_a_spoilt_start_keeps_no_other_from_its_recovery(
    agents: Callable[..., Agent], agent: Agent, desk: Desk
) -> None:
    """Claims and workers of one dead start are spoilt: its jobs are lost with them, those of the next one are not."""
    others = [agents(f"a{n}", f"b00t{n}") for n in range(3)]
    jobs = []
    for other in others:
        other.register(host="host-2")
        jobs.append(desk.enqueue())
        other.start(other.claim())
    spoil(desk, KEYS.claims("a0", "b00t0"))
    spoil(desk, "rq:worker:a1.b00t1.0")
    spoil(desk, "rq:workers:agents")
    orphans, dead = agent.recover(named=[f"{other.node}/{other.boot}" for other in others])
    assert [orphan.claim.job for orphan in orphans] == jobs[1:]
    assert dead == ()
    left = {member.decode() for member in desk.redis.zrange(KEYS.leases(), 0, -1)}
    assert left == {"n1/b00t01234567"}


@pytest.mark.parametrize("version", ["x", "1e300", str(2**63 - 1), "-1", ""])
def test_attack_20_a_forged_version_keeps_no_kill_from_anyone(agent: Agent, desk: Desk, version: str) -> None:
    """The cutoff is written whole, told to the nodes, and read by an agent that knew the forged version."""
    for table in (KEYS.cutoffs(), KEYS.cutoffs("main")):
        desk.redis.hset(table, "#", version)
    desk.enqueue()
    claim = agent.claim()
    desk.cut("all", (None, "main"))
    assert desk.redis.xlen(KEYS.control()) == 1
    assert desk.redis.ttl(KEYS.cutoffs("main")) > 0
    desk.enqueue()
    agent.turn(free=(1,), lanes=LANE)
    assert agent.store.cutoff_for(claim.job, claim.seq, ("all",)) is not None


def test_attack_20_a_spoilt_stream_of_commands_takes_the_next_kill(agent: Agent, desk: Desk) -> None:
    """The node's stream is full or no stream: the kill is sent all the same."""
    job = desk.enqueue()
    agent.start(agent.claim())
    for full in (False, True):
        spoil(desk, KEYS.control("n1"), full=full)
        assert desk.kill(job) == ["sent", "n1"]
        assert desk.redis.xlen(KEYS.control("n1")) == 1


def mend(desk: Desk, stream: str) -> int:
    """Look after a stream of commands as an agent does."""
    kept: Any = desk.script("mend", [stream], {"ahead": 1000})
    return int(kept)


@pytest.mark.parametrize("shown", [True, False])
def test_attack_20_a_stream_whose_ids_are_used_up_is_mended(desk: Desk, *, shown: bool) -> None:
    """With the far entry to be seen or trimmed away: what it held is kept, and the next command can be added."""
    stream = KEYS.control()
    desk.redis.xadd(stream, {"command": "genuine"})
    assert mend(desk, stream) == -1
    if shown:
        desk.redis.xadd(stream, {"command": "far"}, id=LAST)
    else:
        desk.redis.execute_command("XADD", stream, "MAXLEN", 1, f"{2**63}-7", "command", "far")
        desk.redis.xdel(stream, f"{2**63}-7")
    assert mend(desk, stream) == int(shown)
    desk.redis.xadd(stream, {"command": "next"})
    held = [fields[b"command"] for _, fields in desk.redis.xrange(stream)]
    assert held == [b"genuine", b"next"][-1 - shown :]
    assert mend(desk, stream) == -1


def test_attack_20_spoilt_places_lose_no_new_job(agent: Agent, desk: Desk) -> None:
    """What a new job would wait in or be listed in is spoilt: it is enqueued whole."""
    for key in (KEYS.queue("agents"), KEYS.queues(), KEYS.lanes(), KEYS.active("main"), KEYS.events("main")):
        spoil(desk, key, full=key == KEYS.events("main"))
        job = desk.enqueue()
        assert agent.claim().job == job, key
    first, second = desk.enqueue(), desk.row("main-01m8nz26cyrcb2h2mm73g5wppq", after=[], failed="refuse")
    spoil(desk, KEYS.open(str(second["id"])))
    desk.enqueue_all([{**second, "after": [first]}])
    assert desk.redis.smembers(KEYS.open(str(second["id"]))) == {first.encode()}


#: A tick that nobody's schedule has, or a time that none can have.
TICKS: list[tuple[bytes, float]] = [
    (b"noslash", 1),
    (b"\xff\xfe/x", 2),
    (b"main/" + b"x" * 200, 3),
    (b"main/../x", 4),
    (b"main/gone", float("-inf")),
    (b"main/half", 1.5),
    (b"main/junk", 1),
    (b"other/any", 1),
]


def test_attack_20_forged_ticks_hold_up_nobody(valkey: Valkey, desk: Desk) -> None:
    """More spoilt ticks, records and tenants than one look takes are due before it: a genuine schedule comes."""
    key = signer()
    now_ms = int(time.time() * 1000)
    # By the hour: another time of it comes due meanwhile in a few of ten thousand runs.
    what = schedule("tick", every_ms=3_600_000)
    due_ms = schedules.next_due(what, now_ms - 3_600_000) or 0
    put(desk, key, schedule("half", start_ms=now_ms + 3_600_000), 1)
    desk.redis.hset(KEYS.schedules("main"), "junk", '0 sig {"a":1}')
    desk.redis.set(KEYS.schedules("other"), "spoilt")
    forged = dict([*TICKS, *((b"no_tenant-%d" % n, 5.0) for n in range(60))])
    desk.redis.zadd(KEYS.ticks(), forged)
    put(desk, key, what, due_ms)

    async def serve(store: TimeStore) -> None:
        task = asyncio.ensure_future(Scheduler(store).run())
        try:
            await await_until(lambda: bool(desk.waiting()) or task.done(), "the occurrence")
            assert not task.done()
            await await_until(lambda: int(desk.redis.zcount(KEYS.ticks(), "-inf", now_ms)) == 0, "all ticks to be done")
        finally:
            await end_all((task,))

    with Keeper(valkey, "a") as keeper:
        keeper.drive(serve)
    assert desk.waiting() == [schedules.occurrence_id("main", "tick", due_ms)], "a forged time makes no job"
    left = {member.decode() for member in desk.redis.zrange(KEYS.ticks(), 0, -1)}
    assert left == {"main/tick", "main/half", "main/junk"}
    desk.redis.delete(KEYS.schedules("other"))


@pytest.mark.parametrize("full", [False, True])
def test_attack_20_a_spoilt_stream_holds_up_no_other_s_mail(valkey: Valkey, desk: Desk, *, full: bool) -> None:
    """One tenant's events and one job's log can't be written to: they are replaced, and the others' arrive."""
    desk.enqueue()

    async def send() -> None:
        client = Redis(unix_socket_path=str(valkey.socket))
        notary: Any = None  # nothing is signed here
        mail = Mail(client, KEYS, Store(client, node="n1", boot="b00t01234567"), notary)
        for tenant in ("spoilt", "other", "spoilt"):
            mail.emit(tenant, Signed(b"{}", "k.s"))
        task = asyncio.ensure_future(mail.run())
        await mail.flush(5.0)
        await end_all((task,))
        await client.aclose()

    spoil(desk, KEYS.events("spoilt"), full=full)
    asyncio.run(send())
    assert [desk.redis.xlen(KEYS.events(tenant)) for tenant in ("spoilt", "other")] == [2, 1]


def test_an_error_of_the_whole_store_replaces_nothing(agent: Agent, desk: Desk) -> None:
    """A store that is full says so: nothing is deleted to make a write fit."""
    job = desk.enqueue()
    claim = agent.claim()
    size = desk.redis.info("memory")["used_memory"]
    desk.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisError):
            desk.enqueue()
    finally:
        desk.redis.config_set("maxmemory", 0)
    assert size
    assert desk.job(job)["rf_state"] == "claimed"
    (reply,) = agent.turn(finishes=(end(claim),)).finishes
    assert reply.result == "done"
