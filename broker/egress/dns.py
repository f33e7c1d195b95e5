"""Names to addresses: /etc/hosts, then the host's own name servers, on the one loop.

Called by the dial with granted names only; a job can't ask it anything else. Must never take a record that does not
belong to the question, and never block: the C library's resolver would need a thread for each name.

Names with a dot are looked up as they are; only single words go through resolv.conf's search list.
Source: RFC 1035 section 4, RFC 5452 (what makes an answer the answer), resolv.conf(5), hosts(5).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from broker.egress.addresses import Address, literal, plain
from broker.egress.errors import UnreachableError
from broker.egress.rules import LOCAL_NAMES

__all__ = ["HOSTS", "RESOLV_CONF", "Resolver", "answers", "question"]

RESOLV_CONF: Final = Path("/etc/resolv.conf")
HOSTS: Final = Path("/etc/hosts")
_PORT: Final = 53
_TIMEOUT_S: Final = 3.0
_ROUNDS: Final = 2
_MAX_SERVERS: Final = 3
_MAX_ADDRESSES: Final = 16
_MAX_CHAIN: Final = 16
_MAX_FILE_BYTES: Final = 1 << 20
_A: Final = 1
_CNAME: Final = 5
_AAAA: Final = 28
_INTERNET: Final = 1
_RECURSE: Final = 0x0100
_RESPONSE: Final = 0x8000
_CUT: Final = 0x0200
_CODE: Final = 0x000F
_NO_SUCH_NAME: Final = 3


class _BadAnswer(Exception):
    """Not an answer to our question."""


@dataclass(frozen=True, slots=True)
class _Config:
    servers: tuple[tuple[str, int], ...]
    search: tuple[str, ...]


class Resolver:
    """Looks names up. ``servers`` (address, port) replace those of resolv.conf."""

    def __init__(self, servers: Sequence[tuple[str, int]] = (), conf: Path = RESOLV_CONF, hosts: Path = HOSTS) -> None:
        self._servers = tuple(servers)
        self._conf = conf
        self._hosts = hosts
        self._kept: dict[Path, str] = {}

    async def resolve(self, name: str) -> tuple[Address, ...]:
        """Return every address of a name, IPv4 first. Raises UnreachableError if there is none."""
        known = self.known(name)
        if known:
            return known
        config = self._config()
        for candidate in (name,) if "." in name else (*(f"{name}.{suffix}" for suffix in config.search), name):
            found = await self._ask(candidate, config)
            if found:
                return found
        raise UnreachableError(f"{name} has no address")

    def known(self, name: str) -> tuple[Address, ...]:
        """Return the addresses of a name that this host itself knows."""
        if name in LOCAL_NAMES or name.endswith(".localhost"):
            return IPv4Address("127.0.0.1"), IPv6Address("::1")
        found = []
        for line in self._read(self._hosts).splitlines():
            words = line.partition("#")[0].split()
            if len(words) > 1 and name in (word.lower() for word in words[1:]):
                address = literal(words[0])
                found += [address] if address is not None else []
        return tuple(found[:_MAX_ADDRESSES])

    def _config(self) -> _Config:
        servers: list[tuple[str, int]] = []
        search: tuple[str, ...] = ()
        for line in self._read(self._conf).splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == "nameserver" and literal(words[1].partition("%")[0]) is not None:
                servers.append((words[1], _PORT))
            elif len(words) > 1 and words[0] in ("search", "domain"):
                search = tuple(word.lower().rstrip(".") for word in words[1:7])
        return _Config(self._servers or tuple(servers[:_MAX_SERVERS]) or (("127.0.0.1", _PORT),), search)

    def _read(self, path: Path) -> str:
        """Return a file's text; the one read last if it can't be read now (confined to the file as it was)."""
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._kept[path] = os.read(fd, _MAX_FILE_BYTES).decode("utf-8", "replace")
            finally:
                os.close(fd)
        return self._kept.get(path, "")

    async def _ask(self, name: str, config: _Config) -> tuple[Address, ...]:
        found = await asyncio.gather(self._records(name, _A, config), self._records(name, _AAAA, config))
        return tuple(plain(address) for part in found for address in part)[:_MAX_ADDRESSES]

    async def _records(self, name: str, kind: int, config: _Config) -> list[Address]:
        number = secrets.randbelow(1 << 16)
        asked = question(number, name, kind)
        for _ in range(_ROUNDS):
            for server in config.servers:
                with suppress(OSError, TimeoutError, _BadAnswer):
                    async with asyncio.timeout(_TIMEOUT_S):
                        return await _exchange(server, asked, number, name, kind)
        return []


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.waiting: asyncio.Queue[bytes | OSError] = asyncio.Queue(8)

    def datagram_received(self, data: bytes, addr: object) -> None:
        """Keep what came; a flood is dropped."""
        with suppress(asyncio.QueueFull):
            self.waiting.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        """Pass a refusal of the network on."""
        with suppress(asyncio.QueueFull):
            self.waiting.put_nowait(exc if isinstance(exc, OSError) else OSError(str(exc)))


async def _exchange(server: tuple[str, int], asked: bytes, number: int, name: str, kind: int) -> list[Address]:
    """Ask one server. A datagram that is no answer to this question is ignored, as a forged one would be."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(_Datagrams, remote_addr=server)
    try:
        transport.sendto(asked)
        while True:
            data = await protocol.waiting.get()
            if isinstance(data, OSError):
                raise data
            with suppress(_BadAnswer):
                found = answers(data, number, name, kind)
                return found if found is not None else await _by_stream(server, asked, number, name, kind)
    finally:
        transport.close()


async def _by_stream(server: tuple[str, int], asked: bytes, number: int, name: str, kind: int) -> list[Address]:
    reader, writer = await asyncio.open_connection(*server)
    try:
        writer.write(struct.pack("!H", len(asked)) + asked)
        size = int.from_bytes(await reader.readexactly(2), "big")
        return answers(await reader.readexactly(size), number, name, kind) or []
    except asyncio.IncompleteReadError as error:
        raise _BadAnswer("cut short") from error
    finally:
        writer.close()


def question(number: int, name: str, kind: int) -> bytes:
    """Return one query."""
    labels = b"".join(bytes((len(label),)) + label.encode("ascii") for label in name.split("."))
    return struct.pack("!6H", number, _RECURSE, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!2H", kind, _INTERNET)


def answers(data: bytes, number: int, name: str, kind: int) -> list[Address] | None:
    """Return the addresses that an answer gives for a name, following its aliases; None if it was cut.

    Raises:
        _BadAnswer: not an answer to this question.
    """
    try:
        got, flags, questions, count, _, _ = struct.unpack_from("!6H", data)
        asked, at = _name(data, 12)
        if got != number or not flags & _RESPONSE or questions != 1 or asked != name:
            raise _BadAnswer("another question")
        if struct.unpack_from("!2H", data, at) != (kind, _INTERNET):
            raise _BadAnswer("another question")
        if flags & _CUT:
            return None
        if flags & _CODE not in (0, _NO_SUCH_NAME):
            raise _BadAnswer("the server failed")
        return _follow(data, at + 4, count, name, kind)
    except (struct.error, IndexError, ValueError) as error:
        raise _BadAnswer("malformed") from error


def _follow(data: bytes, at: int, count: int, name: str, kind: int) -> list[Address]:
    aliases: dict[str, str] = {}
    found: dict[str, list[Address]] = {}
    for _ in range(count):
        owner, at = _name(data, at)
        record, family, _, size = struct.unpack_from("!2HIH", data, at)
        at += 10
        body = data[at : at + size]
        if family == _INTERNET and record == _CNAME:
            aliases[owner] = _name(data, at)[0]
        elif family == _INTERNET and record == kind:
            address = IPv4Address(body) if kind == _A else IPv6Address(body)
            found.setdefault(owner, []).append(address)
        at += size
    for _ in range(_MAX_CHAIN):
        if name in found or name not in aliases:
            break
        name = aliases[name]
    return found.get(name, [])[:_MAX_ADDRESSES]


def _name(data: bytes, at: int) -> tuple[str, int]:
    """Return a name, and where the data goes on. A pointer leads back only, so there is no loop."""
    labels: list[str] = []
    end = -1
    limit = at + 1
    while data[at]:
        size = data[at]
        if size >= 0xC0:
            target = struct.unpack_from("!H", data, at)[0] & 0x3FFF
            end = at + 2 if end < 0 else end
            if target >= limit - 1:
                raise ValueError("a pointer that leads nowhere")
            at, limit = target, target + 1
            continue
        if size > 63 or at + 1 + size > len(data):
            raise ValueError("no label")
        labels.append(data[at + 1 : at + 1 + size].decode("ascii").lower())
        at += 1 + size
    return ".".join(labels), (at + 1 if end < 0 else end)
