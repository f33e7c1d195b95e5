"""HTTP on the job's side: CONNECT tunnels, and plain requests in absolute form, each for a granted destination.

Called by the door for every connection that is not SOCKS5. Must never pass a request on whose framing it has not
understood itself (h11 parses and writes both sides), never send a client's words to another host than the one that was
checked, and never follow a redirect.

Source: RFC 9112 sections 3.2 and 9, RFC 9110 sections 7.6.1 and 9.3.6.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

import h11

from broker.egress import keyed
from broker.egress.errors import BadRequestError, EgressError, LongHeadError
from broker.egress.exchange import Headers, carry, follow, length_of, passed, refuse, renewed
from broker.egress.meter import Tally, models_path
from broker.egress.routes import Goal, goal_of, path_of
from broker.egress.rules import Destination, canonical
from broker.egress.tls import Tls
from broker.egress.visit import CHUNK_BYTES, MAX_HEAD_BYTES, Visit

__all__ = ["MAX_HEAD_BYTES", "ended_here", "outgoing", "serve"]

_HTTP_PORT: Final = 80
_ENCODINGS: Final = b"accept-encoding"


async def serve(visit: Visit, first: bytes) -> None:
    """Serve one client to its end; ``first`` is what was read of it already."""
    client = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    client.receive_data(first)
    try:
        while await _one(visit, client):
            if client.our_state is h11.DONE:
                client.start_next_cycle()
            else:
                client = renewed(client)
            if not client.trailing_data[0]:
                # Between two requests a client may rest: the idle limit is the door's.
                client.receive_data(await visit.side.read(CHUNK_BYTES))
    except EgressError as error:
        await refuse(visit, client, error.status, str(error))
    except h11.RemoteProtocolError as error:
        await refuse(visit, client, error.error_status_hint, "this is no HTTP request that can be passed on")
    except TimeoutError:
        await refuse(visit, client, 408, "the request's head was not whole in time")


async def _one(visit: Visit, client: h11.Connection) -> bool:
    """Serve one request; return whether another one may follow."""
    request: object = client.next_event()
    if request is h11.NEED_DATA:
        # Most heads come whole; a clock for each of those would cost more than reading it.
        async with asyncio.timeout(visit.head_s):
            request = await follow(client, visit.side)
    if not isinstance(request, h11.Request):
        return False
    if _size(request) > MAX_HEAD_BYTES:
        # One that comes in one piece is whole at once, and was never too long to wait for its end.
        raise LongHeadError(f"a request's head has {MAX_HEAD_BYTES} bytes at most")
    if request.method == b"CONNECT":
        await _tunnel(visit, client, request)
        return False
    with visit.gate.passed():
        past = await _carried(visit, client, request)
    return past or _goes_on(client)


async def _carried(visit: Visit, client: h11.Connection, request: h11.Request) -> bool:
    target = request.target.decode("ascii", "replace")
    if visit.inside is None:
        goal = goal_of(target, visit.rules, visit.own)
    else:
        host = visit.inside[1]
        goal = Goal(host, path_of(target, host), secure=True)
    if goal.secure:
        return await keyed.one(visit, client, request, goal.to, goal.path)
    visit.gate.sized(length_of(request))
    wanted, far = await visit.reach(goal.to.host, goal.to.port)
    try:
        server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        head = h11.Request(method=request.method, target=goal.path, headers=_outgoing_to(request, goal, wanted))
        await far.send(server.send(head) or b"")
        return await carry(visit, client, far, server, Tally(visit.meter, request.method, goal.path))
    finally:
        visit.leave()


def _size(request: h11.Request) -> int:
    return (
        len(request.method)
        + len(request.target)
        + sum([len(name) + len(value) + 4 for name, value in request.headers.raw_items()])
    )


def _goes_on(client: h11.Connection) -> bool:
    return client.our_state is h11.DONE and client.their_state is h11.DONE


async def _tunnel(visit: Visit, client: h11.Connection, request: h11.Request) -> None:
    if visit.inside is not None:
        raise BadRequestError("there is no way on from inside this connection")
    host, colon, port = request.target.decode("ascii", "replace").rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise BadRequestError("CONNECT takes HOST:PORT")
    wanted = canonical(host, int(port[:6]))
    secret = wanted in visit.rules.keyed
    if not secret:
        wanted, far = await visit.reach(host, int(port[:6]))
    await visit.near.send(client.send(h11.Response(status_code=200, headers=[], reason=b"Connected")) or b"")
    while client.next_event() not in (h11.PAUSED, h11.NEED_DATA):
        pass
    if secret:
        await ended_here(visit, wanted, client.trailing_data[0])
        return
    try:
        await visit.tunnel(wanted, far, client.trailing_data[0])
    except EgressError:
        # The client was told in TLS; an HTTP answer would be read as garbage.
        visit.abort()


async def ended_here(visit: Visit, host: Destination, early: bytes = b"") -> None:
    """Be the host of a proxied secret to a TLS client of the job, and serve its requests; ``early`` was read of it.

    A client that does not trust the attempt's authority, or speaks no TLS, is left.
    """
    access = visit.access
    if access is None or access.keys.closed:
        return
    session = Tls(visit.near, access.shown(host.host))
    try:
        async with asyncio.timeout(visit.head_s):
            await session.greet(early)
            first = await session.read(CHUNK_BYTES)
    except ssl.SSLError:
        return
    visit.inside = (session, host)
    await serve(visit, first)
    await session.leave()


def _outgoing_to(request: h11.Request, goal: Goal, wanted: Destination) -> Headers:
    headers = outgoing(list(request.headers), wanted)
    if not models_path(goal.path):
        return headers
    # A packed answer can't be read, and says nothing by its size.
    return [*(pair for pair in headers if pair[0].lower() != _ENCODINGS), (_ENCODINGS, b"identity")]


def outgoing(headers: Headers, wanted: Destination) -> Headers:
    """Return the headers that a destination gets."""
    return [(b"host", wanted.host_header(_HTTP_PORT).encode("ascii")), *passed(headers), (b"connection", b"close")]
