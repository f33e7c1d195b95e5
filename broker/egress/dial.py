"""From a granted destination to a connected socket: one look-up, every address checked, no second look-up.

Called by a visit for each connection. Must never connect to an address that was not checked, nor look a name up again
between the check and the connect: that is what DNS rebinding waits for (attack 13).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from broker.egress.addresses import Address
from broker.egress.dns import Resolver
from broker.egress.errors import EgressError, RefusedError, UnreachableError
from broker.egress.rules import Destination, Facts, Rules, refusal

__all__ = ["Dial", "is_own"]

CONNECT_TIMEOUT_S: Final = 10.0
_NEVER_TTL_S: Final = 30.0
_DISCARD: Final = 9


def _binds_anything() -> bool:
    with suppress(OSError):
        return any(
            Path(f"/proc/sys/net/{family}/ip_nonlocal_bind").read_text("ascii").strip() != "0"
            for family in ("ipv4", "ipv6")
        )
    return False


#: Read before this process is confined.
_BINDS_ANYTHING: Final = _binds_anything()


def is_own(address: Address) -> bool:
    """Return whether this host itself answers at ``address``, on any of its interfaces."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((str(address), _DISCARD))  # sends nothing: asks for the route
        if probe.getsockname()[0] == str(address):
            return True
    if _BINDS_ANYTHING:
        return False
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((str(address), 0))
        return True
    return False


class Dial:
    """Connects for all attempts. ``own`` tells this host's addresses from others, ``connect`` reaches a checked one."""

    def __init__(
        self,
        resolver: Resolver,
        own: Callable[[Address], bool] = is_own,
        connect: Callable[[Address, int], Awaitable[socket.socket]] | None = None,
    ) -> None:
        self._resolver = resolver
        self._own = own
        self._connect = _connect if connect is None else connect
        self._never: dict[str, tuple[float, tuple[Address, ...]]] = {}

    def known_refusal(self, wanted: Destination, rules: Rules) -> str:
        """Return why a destination can never be reached, as far as this host knows without asking anybody; or ""."""
        if wanted in rules.never:
            return "Ringfence itself is served there"
        address = wanted.address
        found = self._resolver.known(wanted.host) if address is None else (address,)
        reasons = [self._refusal(wanted, each, rules, self._known_never(rules, wanted.port)) for each in found]
        return "" if not reasons or "" in reasons else reasons[0]

    async def connect(self, wanted: Destination, rules: Rules) -> socket.socket:
        """Return a socket that is connected to a checked address of ``wanted``.

        Raises:
            RefusedError: no address of it may be connected to. UnreachableError: no address answers.
        """
        if wanted in rules.never:
            raise RefusedError(f"{wanted}: Ringfence itself is served there")
        address = wanted.address
        found = await self._resolver.resolve(wanted.host) if address is None else (address,)
        never = await self._never_at(rules, wanted.port)
        reasons = {each: self._refusal(wanted, each, rules, never) for each in found}
        fit = [each for each, reason in reasons.items() if not reason]
        if not fit:
            raise RefusedError(f"{wanted}: {next(iter(reasons.values()))}")
        problem = "no answer"
        for each in fit:
            try:
                return await self._connect(each, wanted.port)
            except TimeoutError:
                problem = "no answer in time"
            except OSError as error:
                problem = (error.strerror or "no connection").lower()
        raise UnreachableError(f"{wanted}: {problem}")

    def _refusal(self, wanted: Destination, address: Address, rules: Rules, never: frozenset[Address]) -> str:
        own = self._own(address)
        # A service on one address of this host may well answer on all of them.
        hit = address in never or (self._local(address, own=own) and any(self._local(each) for each in never))
        return refusal(wanted, address, rules, Facts(own=own, never=hit))

    def _local(self, address: Address, *, own: bool | None = None) -> bool:
        if address.is_loopback or address.is_unspecified:
            return True
        return self._own(address) if own is None else own

    def _known_never(self, rules: Rules, port: int) -> frozenset[Address]:
        entries = [each for each in rules.never if each.port == port]
        found = [each.address or self._resolver.known(each.host) for each in entries]
        return frozenset(one for each in found for one in (each if isinstance(each, tuple) else (each,)))

    async def _never_at(self, rules: Rules, port: int) -> frozenset[Address]:
        """Return the addresses of what no policy opens at this port. Fails closed if one can't be looked up."""
        found: set[Address] = set()
        for entry in rules.never:
            if entry.port == port:
                found.update(await self._never_addresses(entry))
        return frozenset(found)

    async def _never_addresses(self, entry: Destination) -> tuple[Address, ...]:
        address = entry.address
        if address is not None:
            return (address,)
        now = asyncio.get_running_loop().time()
        kept = self._never.get(entry.host)
        if kept is not None and kept[0] > now:
            return kept[1]
        try:
            found = await self._resolver.resolve(entry.host)
        except EgressError:
            raise RefusedError(f"port {entry.port}: it can't be told from Ringfence's own now, try again") from None
        self._never[entry.host] = (now + _NEVER_TTL_S, found)
        return found


async def _connect(address: Address, port: int) -> socket.socket:
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    end = socket.socket(family, socket.SOCK_STREAM)
    try:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(end, (str(address), port))
    except BaseException:
        end.close()
        raise
    return end
