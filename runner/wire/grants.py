"""Grants: exactly what a job may touch, in the form that is signed.

Called by the client (builds them), admission (compares them with policy) and the containment (enforces them). Must
never hold a default that permits something: an empty ``Grants`` permits nothing beyond the bare sandbox.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Final, Literal

from runner.wire.errors import GrammarError
from runner.wire.letters import check_box

__all__ = [
    "Grants",
    "MailGrant",
    "NetGrant",
    "PathGrant",
    "SecretGrant",
    "check_watch",
    "format_bytes",
    "parse_bytes",
    "parse_mail",
    "parse_net",
]

_SIZE: Final = re.compile(r"([0-9]{1,19})([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
_FACTOR: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:.]{2,45}\]")
_MAX_PORT: Final = 65535
_HTTPS_PORT: Final = 443
_MAX_BYTES: Final = 2**63 - 1
_WATCHED: Final = frozenset({"tag", "queue", "group", "task", "node", "job"})
_MAX_VALUE: Final = 512


@dataclass(frozen=True, slots=True)
class PathGrant:
    """One granted path. ``mode`` read or write; ``all`` lifts the protection of code that is run later."""

    path: str
    mode: Literal["read", "write"]
    all: bool = False

    def __post_init__(self) -> None:
        plain = self.path.startswith("/") and not self.path.startswith("//") and "\0" not in self.path
        if not plain or posixpath.normpath(self.path) != self.path:
            raise GrammarError("a granted path is absolute and normalised, without .. and trailing slash")


@dataclass(frozen=True, slots=True)
class NetGrant:
    """One reachable destination: host name or literal address, and port."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host) or not 1 <= self.port <= _MAX_PORT:
            raise GrammarError("a net grant is HOST:PORT")


@dataclass(frozen=True, slots=True)
class SecretGrant:
    """One secret by name. ``target``: the variable for env, the host for proxy, nothing for file and get."""

    name: str
    mode: Literal["proxy", "get", "file", "env"] = "proxy"
    target: str | None = None

    @property
    def destination(self) -> NetGrant:
        """Where a proxied one is sent. Raises GrammarError: the target is no HOST or HOST:PORT."""
        text = (self.target or "").lower()
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            host, port = text, str(_HTTPS_PORT)
        if not port.isascii() or not port.isdigit():
            raise GrammarError(f"the host of a proxied secret is HOST or HOST:PORT, not {self.target!r}")
        return NetGrant(host, int(port[:6]))


@dataclass(frozen=True, slots=True)
class MailGrant:
    """One mailbox or topic of the job's tenant by name. ``mode``: what the job may do with it."""

    name: str
    mode: Literal["send", "receive", "both"] = "both"

    def __post_init__(self) -> None:
        check_box(self.name)


@dataclass(frozen=True, slots=True)
class Grants:
    """Every permission one job asks for. None in a total means: not asked, the node's default limit applies.

    ``no_exec`` gives something up: no file that the job can write, and none of a path grant, can be executed.
    ``service``: its tools reach the broker's service on the job's own loopback, which gives no value. ``unix``:
    it may make Unix sockets beside host paths that others can put a socket into. ``tools``:
    node-side tools by name. ``agent``: the name whose ``/mem`` it uses. ``state_bytes``: most bytes of its ``/state``.
    ``watch``: selectors of the jobs of its tenant that it may watch and signal (a service job). ``spawn``: most jobs
    that it may start.
    """

    paths: tuple[PathGrant, ...] = ()
    net: tuple[NetGrant, ...] = ()
    secrets: tuple[SecretGrant, ...] = ()
    tools: tuple[str, ...] = ()
    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    no_exec: bool = False
    service: bool = False
    unix: bool = False
    mail: tuple[MailGrant, ...] = ()
    agent: str | None = None
    state_bytes: int | None = None
    watch: tuple[str, ...] = ()
    spawn: int | None = None

    @property
    def keyed(self) -> tuple[NetGrant, ...]:
        """The hosts of the proxied secrets: a grant of one is a grant to reach them. Raises GrammarError."""
        return tuple(dict.fromkeys(one.destination for one in self.secrets if one.mode == "proxy"))

    @property
    def reach(self) -> tuple[NetGrant, ...]:
        """Every destination that the job can reach in one way or another. Raises GrammarError."""
        return (*self.net, *(one for one in self.keyed if one not in self.net))


def parse_bytes(text: str) -> int:
    """Return the bytes of ``512M``, ``1G``, ``65536``; powers of 1024. Raises GrammarError."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _FACTOR[match[2].upper()] if match is not None else 0
    if not 0 < size <= _MAX_BYTES:
        raise GrammarError("a size is a positive number with K, M, G or T, such as 512M")
    return size


def parse_mail(text: str) -> MailGrant:
    """Return the grant of ``NAME``, ``NAME:send`` or ``NAME:receive``. Raises GrammarError."""
    name, _, mode = text.partition(":")
    if mode not in ("", "send", "receive"):
        raise GrammarError("a mailbox is NAME or topic/NAME, with :send or :receive if it is only that")
    return MailGrant(name, mode or "both")  # type: ignore[arg-type]  # one of the literals


def check_watch(selector: str) -> str:
    """Return a selector of jobs that a service job may watch and signal. Raises GrammarError."""
    kind, _, value = selector.partition(":")
    good = selector == "all" or (kind in _WATCHED and 0 < len(value) <= _MAX_VALUE and value.isprintable())
    if not good or (kind == "tag" and "=" not in value):
        raise GrammarError("a selector is all, tag:K=V, queue:Q, group:G, task:MODULE:NAME, node:N or job:ID")
    return selector


def format_bytes(count: int) -> str:
    """Return the shortest exact form that parse_bytes reads back."""
    for unit in ("T", "G", "M", "K"):
        if count and count % _FACTOR[unit] == 0:
            return f"{count // _FACTOR[unit]}{unit}"
    return str(count)


def parse_net(text: str) -> tuple[NetGrant, ...]:
    """Return no grant for ``none`` and one for ``HOST:PORT``. Raises GrammarError."""
    if text == "none":
        return ()
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise GrammarError("--net takes none or HOST:PORT")
    return (NetGrant(host.lower(), int(port)),)
