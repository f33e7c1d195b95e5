"""Both ends of the queue for these tests: a client's enqueue and kill, and an agent start that runs turns.

Called by the tests of this folder. Must never wait: every call is one round trip.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from redis.asyncio import Redis

from node_agent.rq_store import Store
from node_agent.turns import Claim, Dead, Finish, FinishReply, Orphan, Registration, Start, Turn, TurnReply
from runner.scripts import loader, payload
from runner.wire import ids
from runner.wire.keys import Keys
from runner.wire.states import State
from tests.support.valkey import Valkey

__all__ = ["Agent", "Desk", "end"]

T = TypeVar("T")
KEYS = Keys()
TTL_S = 604_800
LEASE_MS = 10_000
MARGIN_MS = 2_500
ENVELOPE = b'{"some":"envelope"}'


class Desk:
    """A client: enqueues and kills, and looks at keys."""

    def __init__(self, valkey: Valkey, keys: Keys = KEYS) -> None:
        self.redis: Any = valkey.client()  # its types name both of redis-py's clients
        self.keys = keys

    def __enter__(self) -> Desk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.redis.close()

    def script(self, name: str, keys: Sequence[str], document: dict[str, object], *blobs: bytes) -> list[Any]:
        """Run a script as any caller does."""
        head = {"rq": self.keys.rq, "rf": self.keys.rf, "ttl": TTL_S}
        text = json.dumps({**head, **document})
        return cast("list[Any]", self.redis.eval(loader.load(name).text, len(keys), *keys, text, *blobs))

    def enqueue(self, *, job: str | None = None, **fields: object) -> str:
        """Enqueue one job; return its id. ``fields`` replace the document's own."""
        job = job or ids.new_job_id(str(fields.get("tenant", "main")))
        self.enqueue_all([self.row(job, **fields)])
        return job

    def row(self, job: str, **fields: object) -> dict[str, object]:
        """Return one job as enqueue.lua takes it."""
        tenant = job.partition("-")[0]
        lane = str(fields.get("lane", "agents"))
        return {
            "id": job,
            "lane": lane,
            "tenant": tenant,
            "task": "app:work",
            "description": "app:work",
            "timeout": 3660,
            "sel": f"all\ntenant:{tenant}\nqueue:{lane}",
            "tags": "{}",
            "not_after": int(time.time() * 1000) + 7 * 86_400_000,
            "retries": 0,
            "once": 0,
            **fields,
        }

    def enqueue_all(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Enqueue a batch; return the sequence numbers."""
        keys = [self.keys.seq(), self.keys.lanes(), self.keys.queues()]
        for row in rows:
            keys += [self.keys.job(row["id"]), self.keys.queue(row["lane"]), self.keys.active(row["tenant"])]
        data = [payload.pack(ENVELOPE, "kid.sig") for _ in rows]
        return cast("list[int]", self.script("enqueue", keys, {"jobs": list(rows)}, *data))

    def kill(self, job: str, command: str = '{"id":"c1"}') -> list[str]:
        """Kill one job; return the script's answer."""
        keys = [self.keys.job(job), self.keys.tombstone(job), self.keys.control(), self.keys.doomed()]
        document: dict[str, object] = {"form": "job", "job": job, "ttl": 900, **_order(command)}
        return [_text(part) for part in self.script("kill", keys, document)]

    def cut(self, field: str, tenants: Sequence[str | None] = (None,)) -> tuple[int, list[str]]:
        """Kill by selector; return the cutoff and the live nodes."""
        keys = [self.keys.seq(), self.keys.leases(), self.keys.nodes(), self.keys.clock(), self.keys.control()]
        keys += [self.keys.cutoffs(tenant) for tenant in tenants]
        seq, *nodes = self.script("kill", keys, {"form": "cutoff", "field": field, **_order('{"id":"c2"}')})
        return seq, [_text(node) for node in nodes]

    def job(self, job: str) -> dict[str, str]:
        """Return a job's hash, but for its payload."""
        found = cast("dict[bytes, bytes]", self.redis.hgetall(self.keys.job(job)))
        return {key.decode(): value.decode() for key, value in found.items() if key != b"data"}

    def waiting(self, lane: str = "agents") -> list[str]:
        """Return the ids in a lane."""
        return [_text(job) for job in cast("list[bytes]", self.redis.lrange(self.keys.queue(lane), 0, -1))]

    def events(self, tenant: str = "main") -> list[tuple[str, str]]:
        """Return (type, job) of a tenant's events."""
        entries = cast("list[Any]", self.redis.xrange(self.keys.events(tenant)))
        found = [json.loads(fields[b"event"]) for _, fields in entries]
        return [(event["type"], event["job"]) for event in found]


class Agent:
    """One agent start with a loop of its own, so that tests are plain functions."""

    def __init__(self, valkey: Valkey, node: str = "n1", boot: str = "b00t01234567", **options: object) -> None:
        self._runner = asyncio.Runner()
        self._client = Redis(unix_socket_path=str(valkey.socket))
        self.node, self.boot = node, boot
        self.store = Store(self._client, node=node, boot=boot, **cast("dict[str, Any]", options))

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._client.aclose())
        self._runner.close()

    def run(self, call: Awaitable[T]) -> T:
        """Run one call to its end."""

        async def whole() -> T:
            return await call

        return self._runner.run(whole())

    def register(self, host: str = "host-1", lease_ms: int = LEASE_MS, slots: int = 2) -> Registration:
        """Register with two slots that serve lane agents."""
        return self.run(
            self.store.register(
                host_id=host,
                record=self.record,
                slots=slots,
                lanes=("agents",),
                lease_ms=lease_ms,
                margin_ms=MARGIN_MS,
                hostname="host",
                pid=4711,
            )
        )

    @property
    def record(self) -> bytes:
        """The part of a NodeView that scripts read."""
        return json.dumps({"name": self.node, "boot": self.boot}, separators=(",", ":")).encode()

    def turn(self, **parts: object) -> TurnReply:
        """Run a turn."""
        return self.run(self.store.turn(Turn(**cast("dict[str, Any]", parts))))

    def claim(self, lane: str = "agents", slot: int = 0) -> Claim:
        """Claim the next job of a lane, which must be there."""
        (claim,) = self.turn(free=(slot,), lanes=(lane,)).claims
        return claim

    def start(self, claim: Claim) -> None:
        """Mark an attempt as started."""
        (reply,) = self.turn(starts=(Start(claim),)).starts
        assert reply.result == "done"

    def finish(self, claim: Claim, **fields: object) -> FinishReply:
        """Finish an attempt."""
        (reply,) = self.turn(finishes=(end(claim, **fields),)).finishes
        return reply

    def recover(self, named: Sequence[str] = ()) -> tuple[tuple[Orphan, ...], tuple[Dead, ...]]:
        """Run one recovery pass."""
        return self.run(self.store.recover(lease_ms=LEASE_MS, margin_ms=MARGIN_MS, named=named))


def end(claim: Claim, **fields: object) -> Finish:
    """Return the finish of an attempt with an outcome and an event as an agent signs them."""
    name = "job.retried" if fields.get("kind") == "retry" else "job.ended"
    event = json.dumps({"type": name, "job": claim.job, "attempt": claim.attempt}).encode()
    given = {"outcome": b'{"o":1}', "outcome_signature": f"k.{claim.job}", "event": event, "event_signature": "k.e"}
    return Finish(claim, **cast("dict[str, Any]", {"state": State.FINISHED, **given, **fields}))


def _order(command: str) -> dict[str, object]:
    return {"command": command, "sig": "kid.c0ffee", "id": "c1", "by": "kid", "reason": "test"}


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
