"""SOCKS5 on the job's side: the greeting, one CONNECT, its answer.

Called by the door when a connection's first byte is 5. Must never look up a name itself or offer BIND or UDP.

Source: RFC 1928.
"""

from __future__ import annotations

import asyncio
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from broker.egress.errors import BadRequestError, EgressError
from broker.egress.http import ended_here
from broker.egress.rules import canonical
from broker.egress.visit import Visit

__all__ = ["VERSION", "serve"]

VERSION: Final = 5
_NO_PASSWORD: Final = 0
_NONE_FITS: Final = 0xFF
_CONNECT: Final = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
_DONE: Final = 0


async def serve(visit: Visit) -> None:
    """Serve one client, whose first byte is read already, to its end."""
    near = visit.near
    try:
        async with asyncio.timeout(visit.head_s):
            host, port = await _asked(visit)
        wanted = canonical(host, port)
        if wanted in visit.rules.keyed:
            await near.send(_reply(_DONE))
            await ended_here(visit, wanted)
            return
        wanted, far = await visit.reach(host, port)
    except EgressError as error:
        await near.send(_reply(error.socks))
        return
    await near.send(_reply(_DONE))
    await visit.tunnel(wanted, far, b"")


async def _asked(visit: Visit) -> tuple[str, int]:
    near = visit.near
    read = near.exactly
    methods = await read((await read(1))[0])
    if _NO_PASSWORD not in methods:
        await near.send(bytes((VERSION, _NONE_FITS)))
        raise ConnectionAbortedError("no method fits")  # this was the whole answer
    await near.send(bytes((VERSION, _NO_PASSWORD)))
    version, command, _, kind = await read(4)
    if version != VERSION or command != _CONNECT:
        raise BadRequestError("only CONNECT is spoken here")
    if kind == _IPV4:
        host = str(IPv4Address(await read(4)))
    elif kind == _IPV6:
        host = str(IPv6Address(await read(16)))
    elif kind == _NAME:
        host = (await read((await read(1))[0])).decode("latin-1")
    else:
        raise BadRequestError("no such kind of address")
    return host, int.from_bytes(await read(2), "big")


def _reply(code: int) -> bytes:
    """Return an answer; the bound address is nobody's business."""
    return bytes((VERSION, code, 0, _IPV4, 0, 0, 0, 0, 0, 0))
