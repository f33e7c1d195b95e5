"""Files parts with clocks that tests turn, and one call of a job about files. Called by the tests of files."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import pytest
import redis as sync_redis
from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.channel import Exchange
from node_agent.kernel.desk import Desk
from node_agent.kernel.errors import CallError
from node_agent.kernel.table import ALWAYS, table_of
from node_agent.kernel.vfs.files import Files
from node_agent.kernel.vfs.index import Store
from node_agent.pipes import Pipes
from runner.guest import calls, files
from runner.wire import ids
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.keys import Keys
from tests.agent import build
from tests.kernel import rig
from tests.kernel.line import FakeAttempt, talk
from tests.support.valkey import Valkey
from tests.support.wait import await_until

__all__ = ["Answer", "Disk", "disk", "in_job", "job", "memory", "passed"]

Answer = dict[str, Json]
T = TypeVar("T")


class Disk:
    """The files part of one node. ``now_s`` is its clock."""

    def __init__(self, redis: Redis) -> None:
        self.now_s = 0.0
        self.files = Files(
            Store(redis, Keys()),
            Keys(),
            tools=lambda caller: {tool: {"name": tool} for tool in caller.spec.grants.tools},
            clock=lambda: self.now_s,
        )

    async def ask(self, who: Caller, op: str, **fields: object) -> Answer:
        """Call ``file.OP``."""
        if isinstance(fields.get("data"), bytes):
            fields["data"] = base64.b64encode(cast("bytes", fields["data"])).decode()
        entry = next(entry for entry in self.files.entries() if entry.op == f"file.{op}")
        try:
            return cast("Answer", await rig.ask([entry], who, f"file.{op}", **fields))
        except CallError as error:
            # The table, and so the reference, names every error that a call gives.
            if error.error not in (*entry.errors, *ALWAYS):
                pytest.fail(f"{op} was answered with {error.error}, which the table does not name")
            raise

    async def refused(self, who: Caller, op: str, **fields: object) -> ErrorCode:
        """Call ``file.OP``, which must be refused; return why."""
        with pytest.raises(CallError) as caught:
            await self.ask(who, op, **fields)
        return caught.value.error

    async def open(self, who: Caller, path: str, *flags: str, **fields: object) -> int:
        """Open a file; return the descriptor."""
        return cast("int", (await self.ask(who, "open", path=path, flags=list(flags or ("read",)), **fields))["fd"])

    async def read(self, who: Caller, fd: int, **fields: object) -> bytes:
        """Read from a descriptor."""
        return base64.b64decode(cast("str", (await self.ask(who, "read", fd=fd, **fields))["data"]))

    async def get(self, who: Caller, path: str) -> bytes:
        """Read a whole file."""
        return base64.b64decode(cast("str", (await self.ask(who, "get", path=path))["data"]))

    async def put(self, who: Caller, path: str, data: bytes, **fields: object) -> Answer:
        """Write a whole file."""
        return await self.ask(who, "put", path=path, data=data, **fields)

    async def names(self, who: Caller, path: str) -> list[str]:
        """List one page of a directory."""
        answer = await self.ask(who, "list", path=path)
        return [cast("str", entry["name"]) for entry in cast("list[Answer]", answer["entries"])]

    def leave(self, who: Caller) -> None:
        """End a session."""
        for close in who.closing:
            close()


def memory() -> Disk:
    """A node whose store is never asked."""
    return Disk(Redis())


@asynccontextmanager
async def disk(valkey: Valkey) -> AsyncIterator[Disk]:
    """A node on a real store."""
    redis = Redis(unix_socket_path=str(valkey.socket))
    try:
        yield Disk(redis)
    finally:
        await redis.aclose()


async def in_job(disk: Disk, who: Caller, patch: pytest.MonkeyPatch, work: Callable[[], T], *, tidy: bool = True) -> T:
    """Do in a thread what a process of the job does, with sessions of its own on a real channel.

    ``tidy``: the process ends; else it goes on with another attempt.
    """
    desk = Desk(rig.around(Redis()))
    desk.table = table_of(disk.files.entries())
    pipes, attempt = Pipes(), FakeAttempt()
    channel = Exchange(desk, pipes).channel(who.run, who.spec, attempt)
    channel.listen()
    patch.setattr(calls, "FD_KERNEL", attempt.far.fileno())
    try:
        return await asyncio.wait_for(talk(work), 20)
    finally:
        if tidy:
            files._forget()
        channel.close()
        attempt.close()
        pipes.close()


async def passed(keeper: sync_redis.Redis, milliseconds: int) -> None:
    """Wait until so much time has passed by the store's own clock."""

    def now_ms() -> float:
        seconds, micros = keeper.time()
        return seconds * 1000 + micros / 1000

    end_ms = now_ms() + milliseconds
    await await_until(lambda: now_ms() > end_ms, "the store's clock to go on")


def job(attempt: int = 1, *, like: Caller | None = None, tenant: str = "main", **grants: object) -> Caller:
    """A session of a new job; ``like``: of another attempt of that one's job."""
    if like is not None:
        return rig.caller(like.spec, attempt=attempt)
    spec = build.job(id=ids.new_job_id(tenant), tenant=tenant)
    return rig.caller(spec, attempt=attempt, **grants)  # type: ignore[arg-type] # tests name real fields
