"""From a name to a connection: looked up once, every address checked, and in TLS only the granted name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import pytest

from broker.egress.addresses import Address
from broker.egress.dial import Dial, is_own
from broker.egress.dns import Resolver
from broker.egress.errors import RefusedError, UnreachableError
from broker.egress.gate import Gate
from broker.egress.meter import Meter, Usage
from broker.egress.rules import Destination, Rules
from broker.egress.streams import Streams
from broker.egress.visit import Visit
from tests.broker.test_dns import record, reply, with_server
from tests.broker.test_hello import greeting, with_extension

NAME = Destination("api.example.com", 443)


class Wire:
    """Stands in for the network behind the check: keeps each address that was connected to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.far: list[socket.socket] = []

    async def connect(self, address: Address, port: int) -> socket.socket:
        """Return one end of a pair."""
        self.asked.append(f"{address}:{port}")
        near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        self.far.append(far)
        return near


def dialled(answers: Sequence[Sequence[str]], rules: Rules, tmp_path: Path, times: int = 1) -> list[str]:
    """Connect ``times`` to NAME, whose name server gives these answers in turn; return the addresses connected to."""
    wire = Wire()
    asked = iter(answers)

    def answer(query: bytes, name: str, kind: int) -> list[bytes]:
        if kind != 1:
            return [reply(query)]
        return [reply(query, *(record(name, 1, ip_address(text).packed) for text in next(asked)))]

    async def scenario(server: tuple[str, int]) -> None:
        dial = Dial(Resolver([server], hosts=tmp_path / "none"), own=lambda _: False, connect=wire.connect)
        for _ in range(times):
            (await dial.connect(NAME, rules)).close()

    try:
        with_server(answer, scenario)
    finally:
        for end in wire.far:
            end.close()
    return wire.asked


def test_attack_13_rebinding_never_reaches_the_second_answer(tmp_path: Path) -> None:
    """A name that is public at the check and loopback a moment later is connected to where it was checked."""
    rules = Rules(frozenset({NAME}), named=frozenset({NAME}))
    assert dialled([["8.8.8.8"], ["127.0.0.1"]], rules, tmp_path) == ["8.8.8.8:443"]
    with pytest.raises(RefusedError, match="loopback"):
        dialled([["8.8.8.8"], ["127.0.0.1"]], rules, tmp_path, times=2)


def test_attack_13_of_a_mixed_answer_only_the_fit_addresses_are_used(tmp_path: Path) -> None:
    """Metadata, loopback and private addresses beside a public one are never connected to, whatever their order."""
    rules = Rules(frozenset({NAME}))
    mixed = ["169.254.169.254", "127.0.0.1", "10.0.0.1", "8.8.8.8", "0.0.0.1"]
    assert dialled([mixed], rules, tmp_path) == ["8.8.8.8:443"]
    for bad in mixed[:3]:
        with pytest.raises(RefusedError):
            dialled([[bad]], rules, tmp_path)


def test_attack_12_the_store_is_never_reached_under_another_name(tmp_path: Path) -> None:
    """A name that leads to the store's address is refused at the store's port, though policy names the address."""
    store = Destination("10.0.0.5", 443)
    named = frozenset({NAME, store})
    assert dialled([["10.0.0.5"]], Rules(frozenset({NAME}), named), tmp_path) == ["10.0.0.5:443"]
    with pytest.raises(RefusedError, match="Ringfence itself"):
        dialled([["10.0.0.5"]], Rules(frozenset({NAME}), named, frozenset({store})), tmp_path)


def test_attack_12_a_store_that_can_t_be_looked_up_closes_its_port(tmp_path: Path) -> None:
    """If the store's own name has no address now, nothing is reached at its port: it could be the store."""

    async def scenario(server: tuple[str, int]) -> None:
        dial = Dial(Resolver([server], hosts=tmp_path / "none"), own=lambda _: False, connect=Wire().connect)
        never = frozenset({Destination("store.example.com", 443)})
        with pytest.raises(RefusedError, match="try again"):
            await dial.connect(NAME, Rules(frozenset({NAME}), never=never))

    def answer(query: bytes, name: str, kind: int) -> list[bytes]:
        good = [record(name, 1, b"\x08\x08\x08\x08")] if name == NAME.host and kind == 1 else []
        return [reply(query, *good, flags=0x8180 if good else 0x8183)]

    with_server(answer, scenario)


def test_the_next_address_is_tried(tmp_path: Path) -> None:
    """An address that does not answer is followed by the next one that was checked."""
    tried = []

    async def connect(address: Address, port: int) -> socket.socket:
        tried.append(str(address))
        raise OSError(111, "Connection refused")

    async def scenario(server: tuple[str, int]) -> None:
        dial = Dial(Resolver([server], hosts=tmp_path / "none"), own=lambda _: False, connect=connect)
        with pytest.raises(UnreachableError, match="connection refused"):
            await dial.connect(NAME, Rules(frozenset({NAME})))

    def answer(query: bytes, name: str, kind: int) -> list[bytes]:
        return [reply(query, *([record(name, 1, bytes((8, 8, 8, n))) for n in (1, 2)] if kind == 1 else []))]

    with_server(answer, scenario)
    assert tried == ["8.8.8.1", "8.8.8.2"]


def test_this_host_s_own_addresses_are_known() -> None:
    """Every address that a socket of this host can have is its own; others are not."""
    assert is_own(ip_address("127.0.0.1"))
    assert is_own(ip_address("127.8.9.1"))
    assert not is_own(ip_address("192.0.2.77"))
    assert not is_own(ip_address("2606:4700::77"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))
        except OSError:
            pytest.skip("this host has no address but loopback")
        assert is_own(ip_address(probe.getsockname()[0]))


def tunnelled(data: bytes, wanted: Destination = NAME) -> tuple[bytes, bytes, list[str]]:
    """Send ``data`` into a tunnel to ``wanted``; return what the server and the client saw, and the refusals."""

    async def main() -> tuple[bytes, bytes, list[str]]:
        client, door = socket.socketpair()
        far, server = socket.socketpair()
        for end in (client, door, far, server):
            end.setblocking(False)
        loop = asyncio.get_running_loop()
        refused: list[str] = []
        near, there = await Streams.over(door), await Streams.over(far)
        rules = Rules(frozenset({wanted}))
        usage = Usage()
        meter = Meter(usage, lambda _model, _counts: True)
        visit = Visit(
            near,
            rules,
            Dial(Resolver()),
            usage,
            meter,
            Gate(1, 1),
            lambda host, port, why: refused.append(why),
            lambda: None,
        )

        async def tunnel() -> None:
            try:
                await visit.tunnel(wanted, there, b"")
            except RefusedError:
                there.abort()
                near.end()

        work = asyncio.ensure_future(tunnel())
        await loop.sock_sendall(client, data)
        client.shutdown(socket.SHUT_WR)
        seen = b""
        try:
            while more := await loop.sock_recv(server, 1 << 16):
                seen += more
        except ConnectionError:
            pass
        server.close()
        told = await loop.sock_recv(client, 100)
        await work
        visit.abort()
        there.abort()
        await asyncio.sleep(0)
        client.close()
        return seen, told, refused

    return asyncio.run(main())


def test_attack_14_the_tls_name_is_the_granted_one() -> None:
    """A greeting for the granted name goes on unchanged, also in another case."""
    for name in ("api.example.com", "API.example.COM"):
        data = greeting(name) + b"\x17\x03\x03\x00\x05abcde"
        seen, told, refused = tunnelled(data)
        assert seen == data
        assert refused == []
        assert told == b""


@pytest.mark.parametrize(
    "data",
    [
        greeting("evil.example.com"),
        greeting("api.example.com.evil.io"),
        greeting(None),
        with_extension(greeting("api.example.com"), 0xFE0D, b"\0" * 32),
        b"GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        greeting("api.example.com")[:-1] + b"?" + greeting("evil.example.com"),
    ],
    ids=["other", "longer", "none", "ech", "http", "ssh", "second"],
)
def test_attack_14_another_tls_name_gets_an_alert(data: bytes) -> None:
    """Fronting with another name, none, an encrypted or a second one, or with no TLS: the server sees none of it."""
    seen, told, refused = tunnelled(data)
    assert b"evil" not in seen
    assert seen in (b"", data[: len(seen)])
    assert told == bytes((21, 3, 1, 0, 2, 2, 112))
    assert len(refused) == 1


def test_attack_14_a_granted_address_takes_no_name() -> None:
    """Who was granted an address asks for no name: the address's other names were not granted."""
    address = Destination("192.0.2.77", 443)
    assert tunnelled(greeting(None), address)[2] == []
    assert len(tunnelled(greeting("evil.example.com"), address)[2]) == 1
