"""Kept files under the store's users: a node can do all that its part does for its own tenants, nobody else can."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis as sync_redis
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from runner.wire import access
from runner.wire.calls import ErrorCode
from runner.wire.keys import Keys
from tests.kernel.disks import Disk, job
from tests.support.valkey import Valkey

PASSWORD = "not-a-secret"
DIGEST = hashlib.sha256(PASSWORD.encode()).hexdigest()


@pytest.fixture
def users(valkey: Valkey) -> Iterator[Valkey]:
    """A store with the users of a node and of two clients."""
    roles = (access.agent("n1", ("main",)), access.client(), access.tenant("main"))
    with valkey.client() as client:
        for role in roles:
            head, *selectors = role.line(password_sha256=DIGEST).removeprefix("user ").split(" (")
            client.execute_command("ACL", "SETUSER", *head.split(), *(f"({selector}" for selector in selectors))
        client.acl_log_reset()
        yield valkey
        client.acl_deluser(*(role.user for role in roles))


def test_a_node_can_do_all_of_it_for_its_own_tenants(users: Valkey) -> None:
    """Every kind of change and look works as the node's user; another tenant's files are out of its reach."""

    async def main() -> None:
        redis = Redis(unix_socket_path=str(users.socket), username="agent-n1", password=PASSWORD)
        try:
            node, who, stranger = Disk(redis), job(state_bytes=1 << 20, agent="ann"), job(tenant="acme", agent="ann")
            for root in ("/state", "/mem/semantic"):
                await node.ask(who, "mkdir", path=f"{root}/d")
                await node.put(who, f"{root}/d/a", b"1", ttl_s=60)
                await node.put(who, f"{root}/d/a", b"2", append=True)
                await node.ask(who, "rename", path=f"{root}/d", to=f"{root}/e")
                assert await node.get(who, f"{root}/e/a") == b"12"
                await node.ask(who, "remove", path=f"{root}/e/a")
                await node.ask(who, "remove", path=f"{root}/e", directory=True)
            assert await node.refused(stranger, "put", path="/mem/semantic/a", data=b"") is ErrorCode.UNAVAILABLE
        finally:
            await redis.aclose()

    asyncio.run(main())
    with users.client() as client:
        told = cast("list[dict[str, Any]]", client.acl_log())
    assert {one["object"] for one in told} <= {"client|setinfo", "rf:mem:acme:ann"}


def test_clients_neither_read_nor_write_what_jobs_keep(users: Valkey) -> None:
    """Only nodes have a key for a job's files; a client's user, of whatever tenant, is refused."""
    keys, name = Keys(), "main-01h00000000000000000000000"
    kept = (keys.state(name), keys.state_data(name), keys.memory("main", "ann"), keys.memory_data("main", "ann"))
    for user in ("client", "tenant-main"):
        with sync_redis.Redis(unix_socket_path=str(users.socket), username=user, password=PASSWORD) as client:
            for key in kept:
                with pytest.raises(NoPermissionError):
                    client.hgetall(key)
                with pytest.raises(NoPermissionError):
                    client.hset(key, "/a", "x")
