"""Schedulers for tests: calls of a TimeStore from plain functions, and a signed schedule to put into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from redis.asyncio import Redis

from node_agent.scheduler_store import Look, StoredSchedule, Tick, TimeStore
from runner.signing import Signer
from runner.wire import record
from runner.wire.envelope import Domain
from runner.wire.keys import Keys
from runner.wire.schedule import Schedule
from tests.agent.build import job
from tests.store.desk import Desk
from tests.support.valkey import Valkey

__all__ = ["KEYS", "Keeper", "put", "schedule", "signed"]

T = TypeVar("T")
KEYS = Keys()
LEASE_MS = 10_000


class Keeper:
    """One scheduler's view of the store, call by call."""

    def __init__(self, valkey: Valkey, member: str, keys: Keys | None = None) -> None:
        self._runner = asyncio.Runner()
        self._client = Redis(unix_socket_path=str(valkey.socket))
        self.store = TimeStore(self._client, member, keys)

    def __enter__(self) -> Keeper:
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

    def look(self, lease_ms: int = LEASE_MS) -> Look:
        """Move what is due and ask for the leadership."""
        return self.run(self.store.look(lease_ms))

    def drive(self, work: Callable[[TimeStore], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on this keeper's store."""
        return self._runner.run(work(self.store))


def schedule(name: str = "tick", *, tenant: str = "main", **changes: object) -> Schedule:
    """A schedule of a small command, every second since 1970 unless ``changes`` say otherwise."""
    template = job(
        id=f"{tenant}-01m8nz26cyrcb2h2mm73g5wppq", tenant=tenant, schedule=name, not_before_ms=0, not_after_ms=1
    )
    given: dict[str, Any] = {"start_ms": 0, "template": template, **changes}
    if "cron" not in given:
        given.setdefault("every_ms", 1000)
    return Schedule(name=name, tenant=tenant, **given)


def signed(key: Signer, what: Schedule) -> StoredSchedule:
    """The schedule as a client signs it."""
    text = record.dumps(what)
    return StoredSchedule(text, key.sign(Domain.SCHEDULE, text))


def put(desk: Desk, key: Signer, what: Schedule, due_ms: int) -> Tick:
    """Store a schedule with its next due time; return the tick."""
    stored = signed(key, what)
    member = f"{what.tenant}/{what.name}"
    document: dict[str, object] = {"op": "put", "name": what.name, "member": member, "next": due_ms}
    document |= {"record": stored.record.decode(), "sig": stored.signature}
    keys = [KEYS.schedules(what.tenant), KEYS.ticks(), KEYS.leader()]
    desk.script("schedule", keys, document)
    return Tick(member, due_ms)
