"""The service on a job's loopback: no other protocol reaches it, no value leaves it, and it ends with its lease."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.client import BrokerClient, LeaseRefused, SecretAsk
from broker.vault.leases import MAX_BAD
from broker.vault.serving import MAX_LINES
from runner.wire import service
from runner.wire.errors import CodecError
from tests.support.wait import wait_until
from tests.vault.conftest import LEVELS
from tests.vault.stand import Job, Stand, get_of

#: What clients of other protocols can be made to send first, by a URL or a host name.
OTHERS = {
    "http": b"GET /get?name=KEY HTTP/1.1\r\nHost: 127.0.0.1:3129\r\n\r\n",
    "http body": b"POST / HTTP/1.1\r\nContent-Length: 38\r\n\r\n" + service.opening() + service.pack({"op": "list"}),
    "http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(32),
    "gopher": b"ringfence-service/1\r\n",
    "redis": b'*2\r\n$3\r\nGET\r\n$3\r\nKEY\r\n{"op":"list"}',
    "json": b'{"op":"list"}\n',
    "socks": b"\x05\x01\x00",
    "bare frame": service.pack({"op": "list"}),
    "long frame": (service.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
}


class Tool:
    """A program in the job that speaks the service's own protocol."""

    def __init__(self, port: int, *, opening: bytes = service.opening()) -> None:
        self.line = socket.create_connection(("127.0.0.1", port), 5)
        self.line.sendall(opening)
        self._data = bytearray()

    def ask(self, **order: object) -> dict[str, Any]:
        """Return the answer to one order; {} if the line was cut."""
        self.line.sendall(service.pack(order))
        while (body := service.take(self._data)) is None:
            data = self.line.recv(4096)
            if not data:
                return {}
            self._data += data
        found: dict[str, Any] = json.loads(body)
        return found


def cut(port: int, first: bytes) -> bytes:
    """Send something on a new connection; returns all that ever comes back, also if it is reset."""
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        line.sendall(first)
        got = b""
        try:
            while data := line.recv(4096):
                got += data
        except ConnectionResetError:
            pass
        return got


@asynccontextmanager
async def serving(stand: Stand, *asks: SecretAsk) -> AsyncIterator[tuple[BrokerClient, Job, int]]:
    """A live lease with a service; the listener stands for one in the job's own net namespace."""
    job, client = Job("main-1.1", LEVELS[0]), stand.client()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            client.start()
            await client.open(job.ask(*asks), job.fds)
            await client.service(job.name, listener.fileno())
            yield client, job, listener.getsockname()[1]
        finally:
            await client.close(job.name)
            await client.stop()
            job.end()


def scene(work: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run one test's coroutine."""
    asyncio.run(work())


async def beside(act: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - whatever it returns
    """Do what waits for the broker beside the loop."""
    return await asyncio.to_thread(act, *args)


@pytest.mark.parametrize("name", OTHERS)
def test_attack_52_other_protocols(stand: Stand, name: str) -> None:
    """What an HTTP client, or any other that can be talked into it, sends first is cut without a byte of answer."""

    async def work() -> None:
        async with serving(stand, get_of("KEY")) as (_, _, port):
            assert await beside(cut, port, OTHERS[name]) == b""
            # The counter-check: the same port answers who sends the preface.
            tool = Tool(port)
            assert (await beside(lambda: tool.ask(op="list")))["names"] == ["KEY"]
            tool.line.close()

    scene(work)


def test_attack_52_no_value_ever(stand: Stand) -> None:
    """It lists, answers a ping and says how each secret stands; `get` and everything else is refused and recorded."""

    async def work() -> None:
        async with serving(stand, get_of("KEY"), get_of("OTHER")) as (_, job, port):
            tool = Tool(port)
            assert tool.ask(op="ping") == {"ok": True}
            assert tool.ask(op="list") == {"ok": True, "names": ["KEY", "OTHER"]}
            states = [{"name": name, "state": "ready"} for name in ("KEY", "OTHER")]
            assert tool.ask(op="status") == {"ok": True, "secrets": states}
            for order in ({"op": "get", "name": "KEY"}, {"op": "sealed", "place": "args/0"}, {"op": "open"}, {}):
                assert tool.ask(**order) == {"ok": False, "err": "denied"}
            assert job.get("KEY") == b"canary-one"  # the channel does have it
            tool.line.close()

    scene(work)
    assert '"event":"service.refused","attempt":"main-1.1"' in stand.record()


def test_too_much_of_it(own: Stand) -> None:
    """A job may hold few lines open, and loses the service, not its lease, after too many wrong requests."""

    async def work() -> None:
        async with serving(own, get_of("KEY")) as (client, job, port):
            tools = [Tool(port) for _ in range(MAX_LINES)]
            assert all(tool.ask(op="ping")["ok"] for tool in tools)
            assert cut(port, service.opening() + service.pack({"op": "ping"})) == b""
            for tool in tools[1:]:
                tool.line.close()
            wait_until(lambda: cut_or_answer(port) != b"", "a line is free again")
            for _ in range(MAX_BAD):
                assert tools[0].ask(op="get", name="KEY")["err"] == "denied"
            assert tools[0].ask(op="get", name="KEY") == {}
            with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel sees it
                socket.create_connection(("127.0.0.1", port), 5)
            assert job.get("KEY") == b"canary-one"
            assert await client.ping()
            tools[0].line.close()

    scene(work)
    assert own.record().count('"service.ended"') == 1


def cut_or_answer(port: int) -> bytes:
    """Return what one ping on a line of its own gets."""
    with socket.create_connection(("127.0.0.1", port), 5) as line:
        line.sendall(service.opening() + service.pack({"op": "ping"}))
        line.shutdown(socket.SHUT_WR)
        try:
            return line.recv(4096)
        except ConnectionResetError:
            return b""


def test_it_ends_with_its_lease(own: Stand) -> None:
    """A restart of the broker is survived; the end of the lease is not, although the agent still holds the listener."""

    async def work() -> None:
        async with serving(own, get_of("KEY")) as (client, job, port):
            own.stop()
            own.start()
            tool = Tool(port)
            assert (await beside(lambda: tool.ask(op="ping"))) == {"ok": True}
            await client.close(job.name)
            assert tool.ask(op="ping") == {}
            with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the kernel sees it
                socket.create_connection(("127.0.0.1", port), 5)
            tool.line.close()

    scene(work)


def test_only_a_listener(stand: Stand) -> None:
    """Anything that does not listen is no service."""

    async def work() -> None:
        job, client = Job("main-2.1", LEVELS[0]), stand.client()
        near, far = socket.socketpair()
        with near, far:
            try:
                await client.open(job.ask(get_of("KEY")), job.fds)
                with pytest.raises(LeaseRefused):
                    await client.service(job.name, near.fileno())
            finally:
                await client.close(job.name)
                await client.stop()
                job.end()

    scene(work)


def test_frames() -> None:
    """A frame comes off the front once it is whole; what begins with another byte, or is too long, is none."""
    data = bytearray(service.opening() + service.pack([1]) + b"\0\0")
    assert service.take(data) == service.PREFACE
    assert service.take(data) == b"[1]"
    assert service.take(data) is None
    assert data == b"\0\0"
    for wrong in (b"G", b"\x01\0\0\0", b"\0\xff\0\0"):
        with pytest.raises(CodecError):
            service.take(bytearray(wrong))
