"""An agent whose line to the broker broke opens its leases again: nothing of them is lost, and nothing is won."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from broker.client import SecretAsk
from tests.support import scratch
from tests.vault.conftest import LEVELS, VALUES
from tests.vault.stand import Job, Stand, get_of

RULES = """
version = 1
[[allow]]
secrets = ["KEY"]
tenants = ["*"]
tasks = ["*"]
modes = ["get"]
uses = 2
[[allow]]
secrets = ["OTHER"]
tenants = ["*"]
tasks = ["*"]
modes = ["proxy"]
hosts = ["*"]
"""


@pytest.fixture
def own() -> Iterator[Stand]:
    """A broker whose rule counts uses."""
    with scratch.folder() as home:
        made = Stand(home, VALUES, RULES)
        made.start()
        yield made
        assert made.stop() == 0


def test_a_broken_line_costs_a_job_nothing_and_gives_it_nothing(own: Stand) -> None:
    """The job's channel stays open, the egress process's line too, and a use that was spent stays spent."""

    async def work() -> None:
        job, client = Job("main-1.1", LEVELS[0]), own.client()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with near, far:
            await client.open(job.ask(get_of("KEY"), SecretAsk("OTHER", "proxy", "a.example")), job.fds)
            await client.proxy("main-1.1", near.fileno())
            assert await asyncio.to_thread(job.get, "KEY") == b"canary-one"
            client._drop()
            assert await client.ping()
            assert own.operator(op="status")["leases"] == 1
            far.settimeout(5)
            far.send(b'{"op":"use","id":1,"host":"a.example"}')
            assert b'"value":' in far.recv(1 << 16)
            for word, holds in ((b"false", False), (b"true", True)):
                # It is told again only to a door that has forgotten all that it was told.
                far.send(b'{"op":"use","id":2,"host":"a.example","empty":' + word + b"}")
                assert (b'"value":' in far.recv(1 << 16)) is holds
        assert await asyncio.to_thread(job.get, "KEY") == b"canary-one"
        assert await asyncio.to_thread(job.get, "KEY") == "used-up"
        await client.close("main-1.1")
        await client.stop()
        job.end()

    asyncio.run(work())
