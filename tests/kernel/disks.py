"""Files parts with clocks that tests turn, and one call of a job about files. Called by the tests of files."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.vfs.files import Files
from runner.wire import ids
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.keys import Keys
from tests.agent import build
from tests.kernel import rig
from tests.support.valkey import Valkey

__all__ = ["Answer", "Disk", "disk", "job", "memory"]

Answer = dict[str, Json]


class Disk:
    """The files part of one node. ``now_s`` is its clock."""

    def __init__(self, redis: Redis) -> None:
        self.now_s = 0.0
        self.files = Files(
            redis,
            Keys(),
            tools=lambda caller: {tool: {"name": tool} for tool in caller.spec.grants.tools},
            clock=lambda: self.now_s,
        )

    async def ask(self, who: Caller, op: str, **fields: object) -> Answer:
        """Call ``file.OP``."""
        if isinstance(fields.get("data"), bytes):
            fields["data"] = base64.b64encode(cast("bytes", fields["data"])).decode()
        return cast("Answer", await rig.ask(self.files.entries(), who, f"file.{op}", **fields))

    async def refused(self, who: Caller, op: str, **fields: object) -> ErrorCode:
        """Call ``file.OP``, which must be refused; return why."""
        if isinstance(fields.get("data"), bytes):
            fields["data"] = base64.b64encode(cast("bytes", fields["data"])).decode()
        return await rig.refused(self.files.entries(), who, f"file.{op}", **fields)

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


def job(attempt: int = 1, *, like: Caller | None = None, tenant: str = "main", **grants: object) -> Caller:
    """A session of a new job; ``like``: of another attempt of that one's job."""
    if like is not None:
        return rig.caller(like.spec, attempt=attempt)
    spec = build.job(id=ids.new_job_id(tenant), tenant=tenant)
    return rig.caller(spec, attempt=attempt, **grants)
