"""What our scripts write is what RQ's own classes write: one life of a job through each, every key compared."""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, cast

import pytest
import redis
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.serializers import JSONSerializer

from runner.wire.states import State
from tests.store.desk import ENVELOPE, TTL_S, Agent, Desk

JOB = "main-01m8nz26cyrcb2h2mm73g5wppq"
WORKER = "n1.b00t01.0"
VALUE = {"answer": 42}
TEXT = "Traceback: it broke"
TOLERANCE_S = 3

# Where we differ on purpose: (key pattern, what of it): reason. Everything else must be equal.
DIFFERENCES = {
    ("rq:queue:agents:intermediate", "all"): "pop and claim are one step, so nothing lies between",
    ("rq:wip:agents", "score"): "far in the future: a read-only `rq info` fails jobs whose score has lapsed",
    (f"rq:executions:{JOB}", "score"): "the same",
    (f"rq:executions:{JOB}", "ttl"): "the same: nobody renews it job by job",
    (f"rq:execution:{JOB}:EXECUTION", "ttl"): "the same",
    (f"rq:worker:{WORKER}", "ttl"): "always 480 s: the lease's renewal keeps it alive, not each job",
    (f"rq:worker:{WORKER}:executions", "ttl"): "the same",
}
CANCELED = {
    (f"rq:results:{JOB}", "all"): "RQ writes no result for a canceled job; clients of ours wait on that stream",
    (f"rq:job:{JOB}", "ttl"): "RQ keeps canceled jobs for ever",
    (f"rq:job:{JOB}", "ended_at"): "RQ does not say when it was canceled",
    (f"rq:job:{JOB}", "last_heartbeat"): "the same",
}
OUR_FIELDS = re.compile(r"rf_[a-z_]+")
Dump = dict[str, dict[str, object]]


class Stock:
    """RQ's own life of a job, step by step, in one process."""

    def __init__(self, client: redis.Redis) -> None:
        self.queue = Queue("agents", connection=client, serializer=JSONSerializer)
        worker = SimpleWorker([self.queue], name=WORKER, connection=client, serializer=JSONSerializer)
        self.worker = cast("Any", worker)
        self.worker.hostname, self.worker.pid, self.worker.ip_address = "host", 4711, "unknown"
        self.worker.procline = print
        self.job: Job | None = None
        self.execution: Any = None

    def register(self) -> None:
        self.worker.register_birth()
        self.worker.set_state("idle")

    def enqueue(self) -> None:
        self.job = self.queue.enqueue_call(
            "runner.jobs.run",
            kwargs={"envelope": ENVELOPE.decode(), "sig": "kid.sig"},
            job_id=JOB,
            description="app:work",
            timeout=3660,
            result_ttl=TTL_S,
            failure_ttl=TTL_S,
        )

    def claim(self) -> None:
        found = self.queue.dequeue_any([self.queue], None, connection=self.queue.connection, serializer=JSONSerializer)
        assert found is not None
        self.job, _ = found
        self.execution = self.worker.prepare_execution(self.job)

    def start(self) -> None:
        assert self.job is not None
        self.worker.prepare_job_execution(self.job, remove_from_intermediate_queue=True)

    def finish(self) -> None:
        assert self.job is not None
        self.worker._finalize_success(self.job, self.queue, self.execution, VALUE)
        self.worker.set_state("idle")

    def fail(self, *, stopped: bool) -> None:
        assert self.job is not None
        if stopped:
            self.worker._stopped_job_id = JOB
        self.worker.handle_execution_ended(self.job, self.queue, 60)
        self.worker.handle_job_failure(self.job, self.queue, exc_string=TEXT, execution=self.execution)
        self.worker.set_state("idle")

    def cancel(self) -> None:
        assert self.job is not None
        self.job.cancel()


def dump(client: redis.Redis) -> Dump:
    """Return every key of RQ's with type, TTL and content; what differs from run to run is replaced by words."""
    found: Dump = {}
    now = time.time()
    for raw in cast("list[bytes]", client.keys("rq:*")):
        key, kind, ttl = raw.decode(), cast("bytes", client.type(raw)).decode(), client.ttl(raw)
        found[_plain(key)] = {"type": kind, "ttl": ttl, **_content(client, key, kind, now)}
    return found


def _content(client: redis.Redis, key: str, kind: str, now: float) -> dict[str, object]:
    read: Any = client
    match kind:
        case "hash":
            pairs = {k.decode(): _value(k, v) for k, v in read.hgetall(key).items()}
            # RQ reads an empty field as one that is not there.
            return {name: value for name, value in pairs.items() if value != "" and not OUR_FIELDS.fullmatch(name)}
        case "zset":
            pairs = read.zrange(key, 0, -1, withscores=True)
            return {"members": [_plain(m.decode()) for m, _ in pairs], "score": [score - now for _, score in pairs]}
        case "list":
            return {"items": [_plain(item.decode()) for item in read.lrange(key, 0, -1)]}
        case "set":
            return {"items": sorted(_plain(item.decode()) for item in read.smembers(key))}
        case _:
            return {"entries": [{k.decode(): _value(k, v) for k, v in e.items()} for _, e in read.xrange(key)]}


def _value(name: bytes, value: bytes) -> object:
    return zlib.decompress(value) if name == b"data" else _plain(value.decode())


def _plain(text: str) -> str:
    text = re.sub(r"\b[0-9a-f]{32}\b", "EXECUTION", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", "TIME", text)
    text = re.sub(r"^\d{10}\.\d+$", "STAMP", text)
    return re.sub(r"^\d\.\d+(e-\d+)?$", "SECONDS", text)


def differences(stock: Dump, ours: Dump, allowed: dict[tuple[str, str], str]) -> list[str]:
    """Return where the dumps differ, but for what is allowed."""
    found = []
    for key in sorted(stock.keys() | ours.keys()):
        if (key, "all") in allowed:
            continue
        theirs, mine = stock.get(key), ours.get(key)
        if theirs is None or mine is None:
            found.append(f"{key}: only {'ours' if theirs is None else 'RQ has it'}")
            continue
        for part in sorted(theirs.keys() | mine.keys()):
            if (key, part) not in allowed and not _same(part, theirs.get(part), mine.get(part)):
                found.append(f"{key} {part}: RQ {theirs.get(part)!r}, ours {mine.get(part)!r}")
    return found


def _same(part: str, theirs: object, mine: object) -> bool:
    if part == "ttl":
        return abs(cast("int", theirs) - cast("int", mine)) <= TOLERANCE_S
    if part == "score":
        pairs = zip(cast("list[float]", theirs), cast("list[float]", mine), strict=True)
        return all(abs(a - b) <= TOLERANCE_S for a, b in pairs)
    return theirs == mine


@pytest.fixture
def stock(desk: Desk) -> Callable[[str], Dump]:
    """Runs RQ's own life of a job up to a step; returns the dump and empties the store."""

    def live(last: str) -> Dump:
        life = Stock(desk.redis)
        for step in ("register", "enqueue", "claim", "start"):
            if last == "cancel" and step == "claim":
                break
            getattr(life, step)()
            if step == last:
                break
        if last in {"fail", "stop"}:
            life.fail(stopped=last == "stop")
        if last in {"finish", "cancel"}:
            getattr(life, last)()
        found = dump(desk.redis)
        desk.redis.flushall()
        return found

    return live


def ours(desk: Desk, agent: Agent, last: str) -> Dump:
    """Run our life of a job up to a step; return the dump."""
    agent.register(slots=1)
    if last == "register":
        return dump(desk.redis)
    desk.enqueue(job=JOB)
    if last == "cancel":
        desk.kill(JOB)
        (dead,) = agent.run(agent.store.sweep(jobs=(JOB,)))
        agent.finish(dead.claim, state=State.KILLED, failure=TEXT)
    if last in {"enqueue", "cancel"}:
        return dump(desk.redis)
    claim = agent.claim()
    if last != "claim":
        agent.start(claim)
    match last:
        case "finish":
            agent.finish(claim, started=True, return_value=b'{"answer": 42}', wall_s=0.001)
        case "fail":
            agent.finish(claim, state=State.FAILED, reason="exit", started=True, failure=TEXT, wall_s=0.001)
        case "stop":
            agent.finish(claim, state=State.KILLED, started=True, failure=TEXT, wall_s=0.001)
    return dump(desk.redis)


@pytest.mark.parametrize("last", ["register", "enqueue", "claim", "start", "finish", "fail", "stop", "cancel"])
def test_a_life_leaves_the_same_keys(
    stock: Callable[[str], Dump], desk: Desk, agents: Callable[..., Agent], last: str
) -> None:
    """After each step our keys, fields, values, scores and TTLs are those of RQ, but for the listed differences."""
    theirs = stock(last)
    allowed = DIFFERENCES | (CANCELED if last == "cancel" else {})
    assert differences(theirs, ours(desk, agents(), last), allowed) == []


def test_the_comparison_can_fail() -> None:
    """A missing key, another value and another TTL are each found."""
    stock: Dump = {"a": {"type": "hash", "ttl": 100, "x": "1"}, "b": {"type": "list", "ttl": -1}}
    other: Dump = {"a": {"type": "hash", "ttl": 90, "x": "2"}, "c": {"type": "list", "ttl": -1}}
    assert len(differences(stock, other, {})) == 4


def test_workers_are_registered_with_the_versions_in_use(agent: Agent, desk: Desk) -> None:
    """RQ's tools show the rq whose form we write and the Python of the agent."""
    found = desk.redis.hgetall(f"rq:worker:{WORKER}")
    assert cast("dict[bytes, bytes]", found)[b"version"].decode() == version("rq")
    assert cast("dict[bytes, bytes]", found)[b"python_version"].decode() == sys.version
