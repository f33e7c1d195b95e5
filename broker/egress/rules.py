"""Which destinations one attempt has, and whether an address may be connected to for one of them. Pure.

Called by the door (names) and the dial (addresses). Must never let a name lead to an address that the policy does not
name, unless that address is public (attack 13), and never let anything lead to the store (attack 12).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final

from broker.egress.addresses import Address, Kind, judge, literal
from broker.egress.errors import BadRequestError

__all__ = ["LOCAL_NAMES", "ROUTES", "Destination", "Facts", "Route", "Rules", "canonical", "refusal"]

_LABEL: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_MAX_NAME: Final = 253
_MAX_PORT: Final = 65535
_HTTP_PORT: Final = 80
_HTTPS_PORT: Final = 443
#: Names that mean the host itself wherever they are looked up.
LOCAL_NAMES: Final = ("localhost", "localhost.localdomain")
#: Where the paths begin that stand for granted hosts.
ROUTES: Final = "/r/"


@dataclass(frozen=True, slots=True)
class Destination:
    """A host in its one form (a lower-case name without last dot, or an address) and a port."""

    host: str
    port: int

    @property
    def address(self) -> Address | None:
        """The address, where the host is one."""
        return literal(self.host)

    def host_header(self, default_port: int) -> str:
        """Return what a Host header names it: without the port, where that is the scheme's own."""
        return str(self).removesuffix(f":{default_port}")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Route:
    """A name in the paths of the job's own proxy that stands for a host. ``secure``: over TLS from there on."""

    name: str
    to: Destination
    secure: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """What one attempt may reach.

    ``granted``: its grants. ``named``: the destinations that the policy rule which allowed the job spells out.
    ``never``: what no policy opens: the store and other parts of Ringfence. ``keyed``: the hosts of its proxied
    secrets: reached by requests that carry one, and in no other way. ``routes``: other ways to say some of these.
    """

    granted: frozenset[Destination]
    named: frozenset[Destination] = frozenset()
    never: frozenset[Destination] = frozenset()
    keyed: frozenset[Destination] = frozenset()
    routes: tuple[Route, ...] = ()

    def route(self, name: str) -> Route | None:
        """Return the route of that name, if it leads to a granted host."""
        return next((one for one in self.routes if one.name == name and self.grants(one.to)), None)

    def grants(self, wanted: Destination) -> bool:
        """Return whether exactly this destination was granted."""
        return wanted in self.granted or wanted in self.keyed

    def keyed_at(self, wanted: Destination) -> Destination | None:
        """Return the host of a proxied secret that a plain request for ``wanted`` is meant for, if there is one.

        ``http://HOST/`` is the request that the job can make; it goes on as https.
        """
        if wanted in self.keyed or wanted in self.granted or wanted.port != _HTTP_PORT:
            return wanted if wanted in self.keyed else None
        secure = Destination(wanted.host, _HTTPS_PORT)
        return secure if secure in self.keyed else None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the host says of one address. ``own``: it is one of its own. ``never``: a part of Ringfence serves there."""

    own: bool = False
    never: bool = False


@functools.lru_cache(maxsize=1024)
def canonical(host: str, port: int) -> Destination:
    """Return the one form of a destination.

    Raises:
        BadRequestError: no host name, address or port; or a number that some resolvers take for an address.
    """
    if not 1 <= port <= _MAX_PORT:
        raise BadRequestError("a port is a number from 1 to 65535")
    address = literal(host)
    if address is not None:
        return Destination(str(address), port)
    name = host.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise BadRequestError("this is no host name or address")
    if _NUMBER.fullmatch(labels[-1]):
        raise BadRequestError("write an IPv4 address as four decimal numbers")
    return Destination(name, port)


def refusal(wanted: Destination, address: Address, rules: Rules, facts: Facts) -> str:
    """Return why ``address`` may not be connected to for a granted destination; "" if it may."""
    if facts.never:
        return "Ringfence itself is served there"
    kind, what = judge(address)
    if facts.own and kind is not Kind.SPECIAL:
        kind, what = Kind.SPECIAL, "one of this host"
    if kind is Kind.PUBLIC:
        return ""
    spelt = Destination(str(address), wanted.port)
    local = wanted.host in LOCAL_NAMES and Destination(wanted.host, wanted.port) in rules.named
    if spelt not in rules.named and not (local and address.is_loopback):
        return f"its address is {what}; the node's policy must name that address and port"
    if kind is Kind.SPECIAL and wanted.host != spelt.host and not local:
        return f"its address is {what}; the job must be granted that address itself"
    return ""
