"""Looking names up: hosts first, then a name server, and only what answers the question."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.egress import dns
from broker.egress.dns import Resolver, answers, question
from broker.egress.errors import UnreachableError

T = TypeVar("T")
Answer = Callable[[bytes, str, int], list[bytes]]


def encoded(name: str) -> bytes:
    """Return a name on the wire."""
    return b"".join(bytes((len(label),)) + label.encode() for label in name.split(".")) + b"\0"


def record(name: str, kind: int, body: bytes) -> bytes:
    """Return one record."""
    return encoded(name) + struct.pack("!2HIH", kind, 1, 60, len(body)) + body


def reply(asked: bytes, *records: bytes, flags: int = 0x8180) -> bytes:
    """Return an answer to a query."""
    return asked[:2] + struct.pack("!5H", flags, 1, len(records), 0, 0) + asked[12:] + b"".join(records)


def with_server(answer: Answer, scenario: Callable[[tuple[str, int]], Awaitable[T]]) -> T:
    """Run ``scenario`` beside a name server on loopback; ``answer`` gets each query, its name and its type."""

    class Server(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.DatagramTransport", transport)

        def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
            labels, at = [], 12
            while size := data[at]:
                labels.append(data[at + 1 : at + 1 + size].decode())
                at += 1 + size
            for text in answer(data, ".".join(labels), struct.unpack("!H", data[at + 1 : at + 3])[0]):
                self.transport.sendto(text, addr)

    async def main() -> T:
        transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(Server, local_addr=("127.0.0.1", 0))
        try:
            return await scenario(transport.get_extra_info("sockname"))
        finally:
            transport.close()

    return asyncio.run(main())


def test_addresses_of_both_kinds_and_aliases(tmp_path: Path) -> None:
    """IPv4 comes first, an alias is followed, and only to its own records."""

    def answer(asked: bytes, name: str, kind: int) -> list[bytes]:
        alias = record(name, 5, encoded("edge.example.net"))
        if kind == 1:
            return [
                reply(asked, alias, record("edge.example.net", 1, bytes((192, 1, 2, 3))), record("x.y", 1, b"\x08" * 4))
            ]
        return [reply(asked, alias, record("edge.example.net", 28, IPv6Address("2606::1").packed))]

    async def scenario(server: tuple[str, int]) -> tuple[object, ...]:
        return await Resolver([server], hosts=tmp_path / "none").resolve("api.example.com")

    assert with_server(answer, scenario) == (IPv4Address("192.1.2.3"), IPv6Address("2606::1"))


def test_forged_and_broken_answers_are_ignored(tmp_path: Path) -> None:
    """Answers with another number or question, or cut in the middle, don't count; the right one after them does."""

    def answer(asked: bytes, name: str, kind: int) -> list[bytes]:
        evil = record(name, 1, bytes((6, 6, 6, 6)))
        number = bytes((asked[0] ^ 1, asked[1]))
        other = reply(asked[:12] + encoded("other.example.com") + struct.pack("!2H", kind, 1), evil)
        good = reply(asked, record(name, 1, bytes((9, 9, 9, 9)))) if kind == 1 else reply(asked)
        return [number + reply(asked, evil)[2:], other, reply(asked, evil)[:-3], b"", b"\0" * 5, good]

    async def scenario(server: tuple[str, int]) -> tuple[object, ...]:
        return await Resolver([server], hosts=tmp_path / "none").resolve("api.example.com")

    assert with_server(answer, scenario) == (IPv4Address("9.9.9.9"),)


def test_no_such_name(tmp_path: Path) -> None:
    """A name without an address is unreachable, at once."""

    async def scenario(server: tuple[str, int]) -> None:
        with pytest.raises(UnreachableError):
            await Resolver([server], hosts=tmp_path / "none").resolve("nowhere.example.com")

    with_server(lambda asked, name, kind: [reply(asked, flags=0x8183)], scenario)


def test_hosts_come_first_and_localhost_is_never_asked_for(tmp_path: Path) -> None:
    """/etc/hosts answers before any server; localhost is loopback whatever a file or a server says."""
    hosts = tmp_path / "hosts"
    hosts.write_text("# note\n10.1.2.3 Db.Internal db # comment\nfd00::5 db.internal\nbad line\n6.6.6.6 localhost\n")

    async def scenario(server: tuple[str, int]) -> None:
        resolver = Resolver([server], hosts=hosts)
        assert await resolver.resolve("db.internal") == (IPv4Address("10.1.2.3"), IPv6Address("fd00::5"))
        assert await resolver.resolve("db") == (IPv4Address("10.1.2.3"),)
        for name in ("localhost", "a.localhost"):
            assert await resolver.resolve(name) == (IPv4Address("127.0.0.1"), IPv6Address("::1"))

    def nobody(asked: bytes, name: str, kind: int) -> list[bytes]:
        raise AssertionError(f"{name} was asked for")

    with_server(nobody, scenario)


def test_only_single_words_go_through_the_search_list(tmp_path: Path) -> None:
    """A name with a dot is never completed: somebody could own api.example.com.corp.example."""
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\nsearch corp.example\noptions ndots:5\n")
    asked_for: list[str] = []

    def answer(asked: bytes, name: str, kind: int) -> list[bytes]:
        asked_for.append(name)
        known = name == "db.corp.example" and kind == 1
        return [reply(asked, record(name, 1, bytes((10, 0, 0, 7))))] if known else [reply(asked, flags=0x8183)]

    async def scenario(server: tuple[str, int]) -> None:
        resolver = Resolver([server], conf=conf, hosts=tmp_path / "none")
        assert await resolver.resolve("db") == (IPv4Address("10.0.0.7"),)
        with pytest.raises(UnreachableError):
            await resolver.resolve("api.example.com")

    with_server(answer, scenario)
    assert set(asked_for) == {"db.corp.example", "api.example.com"}


def test_files_that_can_t_be_read_any_more_are_remembered(tmp_path: Path) -> None:
    """A hosts file that is replaced behind a confined process's back keeps its last content."""
    hosts = tmp_path / "hosts"
    hosts.write_text("10.1.2.3 db\n")
    resolver = Resolver([("127.0.0.1", 1)], hosts=hosts)
    assert resolver.known("db") == (IPv4Address("10.1.2.3"),)
    hosts.unlink()
    assert resolver.known("db") == (IPv4Address("10.1.2.3"),)


@given(st.binary(max_size=120), st.integers(0, 60))
def test_no_answer_breaks_the_parser(noise: bytes, at: int) -> None:
    """Any bytes are an answer or none; a name that points to itself ends."""
    asked = question(7, "a.example.com", 1)
    real = reply(asked, record("a.example.com", 1, b"\x01\x02\x03\x04"))
    for data in (noise, real[:at] + noise + real[at:], asked[:12] + b"\xc0\x0c" + noise):
        try:
            found = answers(data, 7, "a.example.com", 1)
        except dns._BadAnswer:
            continue
        assert found is None or all(isinstance(each, IPv4Address) for each in found)
