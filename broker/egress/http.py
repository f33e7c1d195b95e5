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
from broker.egress.errors import BadRequestError, EgressError
from broker.egress.exchange import Headers, carry, follow, passed, refuse
from broker.egress.rules import Destination, canonical
from broker.egress.tls import Tls
from broker.egress.visit import CHUNK_BYTES, HEAD_TIMEOUT_S, MAX_HEAD_BYTES, Visit

__all__ = ["MAX_HEAD_BYTES", "ended_here", "outgoing", "path_of", "serve", "target_of"]

_HTTP_PORT: Final = 80
_HTTPS_PORT: Final = 443
_SCHEME: Final = "http://"


async def serve(visit: Visit, first: bytes) -> None:
    """Serve one client to its end; ``first`` is what was read of it already."""
    client = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    client.receive_data(first)
    try:
        while await _one(visit, client):
            client.start_next_cycle()
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
    async with asyncio.timeout(HEAD_TIMEOUT_S):
        request = await follow(client, visit.side)
    if not isinstance(request, h11.Request):
        return False
    if request.method == b"CONNECT":
        await _tunnel(visit, client, request)
        return False
    target = request.target.decode("ascii", "replace")
    if visit.inside is not None:
        await keyed.one(visit, client, request, visit.inside[1], path_of(target, visit.inside[1]))
        return _goes_on(client)
    host, port, path = target_of(target)
    secret = visit.rules.keyed_at(canonical(host, port))
    if secret is not None:
        await keyed.one(visit, client, request, secret, path)
        return _goes_on(client)
    wanted, far = await visit.reach(host, port)
    try:
        server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        head = h11.Request(method=request.method, target=path, headers=outgoing(list(request.headers), wanted))
        await far.send(server.send(head) or b"")
        await carry(visit, client, far, server)
    finally:
        visit.leave()
    return _goes_on(client)


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
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            await session.greet(early)
            first = await session.read(CHUNK_BYTES)
    except ssl.SSLError:
        return
    visit.inside = (session, host)
    await serve(visit, first)
    await session.leave()


def path_of(target: str, host: Destination) -> str:
    """Return the path of a request inside a TLS session with ``host``. Raises BadRequestError."""
    if target.startswith("/") or target == "*":
        return target
    if target.lower().startswith("https://"):
        name, port, path = target_of(f"{_SCHEME}{target[len('https://') :]}", _HTTPS_PORT)
        if canonical(name, port) == host:
            return path
    raise BadRequestError(f"this connection is for requests to {host}")


def target_of(target: str, default_port: int = _HTTP_PORT) -> tuple[str, int, str]:
    """Return host, port and path of an absolute-form target. Raises BadRequestError."""
    if target.lower().startswith("https://"):
        raise BadRequestError("https goes through CONNECT")
    if not target.lower().startswith(_SCHEME):
        raise BadRequestError("this is a proxy: send CONNECT HOST:PORT, or a request for http://HOST/")
    rest = target[len(_SCHEME) :]
    cut = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    authority, path = rest[:cut], rest[cut:].partition("#")[0]
    host, colon, port = authority.rpartition(":")
    if not colon or (authority.startswith("[") and authority.endswith("]")):
        host, port = authority, str(default_port)
    if "@" in authority or not port.isascii() or not port.isdigit():
        raise BadRequestError("the address must be http://HOST or http://HOST:PORT, without a user")
    return host, int(port[:6]), path if path.startswith("/") else f"/{path}"


def outgoing(headers: Headers, wanted: Destination) -> Headers:
    """Return the headers that a destination gets."""
    return [(b"host", wanted.host_header(_HTTP_PORT).encode("ascii")), *passed(headers), (b"connection", b"close")]
