"""Mail under the store's users: a node can do all that its part does, and nobody else reads or writes a letter."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError

from node_agent.kernel.signalpost import Sent
from runner.wire import access
from runner.wire.keys import Keys
from runner.wire.signals import SignalName
from tests.kernel import rig
from tests.kernel.post import fleet
from tests.kernel.test_mail import ask, job, one
from tests.kernel.test_signals import start
from tests.support.valkey import Valkey

PASSWORD = "not-a-secret"
DIGEST = hashlib.sha256(PASSWORD.encode()).hexdigest()


@pytest.fixture
def users(valkey: Valkey) -> Iterator[Valkey]:
    """A store with the users of two nodes and two clients."""
    roles = (access.agent("n1", ("main",)), access.agent("n2", ("main",)), access.client(), access.tenant("main"))
    with valkey.client() as client:
        for role in roles:
            head, *selectors = role.line(password_sha256=DIGEST).removeprefix("user ").split(" (")
            words = ("ACL", "SETUSER", *head.split(), *(f"({selector}" for selector in selectors))
            client.execute_command(*words)
        client.acl_log_reset()
        yield valkey
        client.acl_deluser(*(role.user for role in roles))


def test_nodes_can_do_all_of_it_as_their_own_users(users: Valkey) -> None:
    """Letters, topics, answers, signals and bells work, and the store's log of refusals stays empty."""

    async def main() -> None:
        async with fleet(users, "n1", "n2", hold_ms=20, password=PASSWORD) as nodes:
            here, there, ann, bob = nodes["n1"], nodes["n2"], job(), job()
            await ask(here, ann, "send", box="desk", body=1)
            await one(there, bob)
            letter = await one(here, ann, wait_s=5)
            await ask(here, ann, "keep", box="desk", id=letter["id"])
            await ask(here, ann, "back", box="desk", id=letter["id"])
            await ask(there, bob, "ack", box="desk", id=(await one(there, bob))["id"])
            asking = asyncio.create_task(ask(here, ann, "ask", box="desk", body="?", wait_s=5))
            question = await one(there, bob, wait_s=5)
            await ask(there, bob, "reply", box="desk", id=question["id"], body="!")
            assert (await asyncio.wait_for(asking, 2))["body"] == "!"
            await here.bell.ring("n2", "answer", b"", "")
            who, _ = start(here)
            await here.signals.carry_out(who.run, Sent(SignalName.USR1, "operator ann", 1))
            await rig.ask(here.mail.entries(), ann, "mail.boxes")

    asyncio.run(main())
    with users.client() as client:
        told = cast("list[dict[str, Any]]", client.acl_log())
    assert [one for one in told if one["object"] != "client|setinfo"] == []


def test_clients_neither_read_nor_write_letters(users: Valkey) -> None:
    """Only nodes have a key for a letter; a client's user, of whatever tenant, is refused."""
    keys = Keys()
    for user in ("client", "tenant-main"):
        with redis.Redis(unix_socket_path=str(users.socket), username=user, password=PASSWORD) as client:
            for key in (keys.mail("main", "desk"), keys.dead("main", "desk"), keys.bell("n1")):
                with pytest.raises(NoPermissionError):
                    client.xrange(key)
                with pytest.raises(NoPermissionError):
                    client.xadd(key, {"letter": "x"})
            with pytest.raises(NoPermissionError):
                client.hset(keys.box("main", "desk"), "bytes", 1)
    with redis.Redis(unix_socket_path=str(users.socket), username="agent-n1", password=PASSWORD) as node:
        with pytest.raises(NoPermissionError):
            node.xadd(keys.mail("other", "desk"), {"letter": "x"})
        with pytest.raises(NoPermissionError):
            node.xread({keys.mail("other", "desk"): "0"})
