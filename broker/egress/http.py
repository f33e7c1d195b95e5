"""HTTP on the job's side: CONNECT tunnels, and plain requests in absolute form, each for a granted destination.

Called by the door for every connection that is not SOCKS5. Must never pass a request on whose framing it has not
understood itself (h11 parses and writes both sides), never send a client's words to another host than the one that was
checked, and never follow a redirect.

Source: RFC 9112 sections 3.2 and 9, RFC 9110 sections 7.6.1 and 9.3.6.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import h11

from broker.egress.errors import BadRequestError, EgressError
from broker.egress.rules import Destination
from broker.egress.visit import CHUNK_BYTES, HEAD_TIMEOUT_S, Streams, Visit

__all__ = ["MAX_HEAD_BYTES", "outgoing", "serve", "target_of"]

MAX_HEAD_BYTES: Final = 32 * 1024
_HTTP_PORT: Final = 80
_SCHEME: Final = "http://"
#: For this connection only (RFC 9110 section 7.6.1); framing is h11's work and stays.
_HOP: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-authorization"}
    | {b"proxy-authenticate", b"host"}
)
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_SWITCHING: Final = 101

Headers = list[tuple[bytes, bytes]]


async def serve(visit: Visit, first: bytes) -> None:
    """Serve one client to its end; ``first`` is what was read of it already."""
    client = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    client.receive_data(first)
    try:
        while await _one(visit, client):
            client.start_next_cycle()
            if not client.trailing_data[0]:
                # Between two requests a client may rest: the idle limit is the door's.
                client.receive_data(await visit.near.reader.read(CHUNK_BYTES))
    except EgressError as error:
        await _refuse(visit, client, error.status, str(error))
    except h11.RemoteProtocolError as error:
        await _refuse(visit, client, error.error_status_hint, "this is no HTTP request that can be passed on")
    except TimeoutError:
        await _refuse(visit, client, 408, "the request's head was not whole in time")


async def _one(visit: Visit, client: h11.Connection) -> bool:
    """Serve one request; return whether another one may follow."""
    async with asyncio.timeout(HEAD_TIMEOUT_S):
        request = await _next(client, visit.near)
    if not isinstance(request, h11.Request):
        return False
    if request.method == b"CONNECT":
        await _tunnel(visit, client, request)
        return False
    host, port, path = target_of(request.target.decode("ascii", "replace"))
    wanted, far = await visit.reach(host, port)
    try:
        server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        head = h11.Request(method=request.method, target=path, headers=outgoing(list(request.headers), wanted))
        await far.send(server.send(head) or b"")
        await _exchange(visit, client, far, server)
    finally:
        visit.leave()
    return client.our_state is h11.DONE and client.their_state is h11.DONE


async def _tunnel(visit: Visit, client: h11.Connection, request: h11.Request) -> None:
    host, colon, port = request.target.decode("ascii", "replace").rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise BadRequestError("CONNECT takes HOST:PORT")
    wanted, far = await visit.reach(host, int(port[:6]))
    await visit.near.send(client.send(h11.Response(status_code=200, headers=[], reason=b"Connected")) or b"")
    while client.next_event() not in (h11.PAUSED, h11.NEED_DATA):
        pass
    try:
        await visit.tunnel(wanted, far, client.trailing_data[0])
    except EgressError:
        # The client was told in TLS; an HTTP answer would be read as garbage.
        visit.abort()


async def _exchange(visit: Visit, client: h11.Connection, far: Streams, server: h11.Connection) -> None:
    """Carry one request's body up and its response down, at once: either may come first."""
    upload = asyncio.ensure_future(_upload(visit, client, far, server))
    try:
        await _download(visit, client, far, server)
        if not upload.done() and client.their_state is h11.DONE:
            await upload
    finally:
        upload.cancel()
        with suppress(asyncio.CancelledError, OSError, h11.ProtocolError):
            await upload


async def _upload(visit: Visit, client: h11.Connection, far: Streams, server: h11.Connection) -> None:
    while True:
        event = await _next(client, visit.near)
        if isinstance(event, h11.Data):
            visit.count_sent(len(event.data))
            await far.send(server.send(h11.Data(data=event.data)) or b"")
        elif isinstance(event, h11.EndOfMessage):
            await far.send(server.send(h11.EndOfMessage()) or b"")
            return
        else:
            return


async def _download(visit: Visit, client: h11.Connection, far: Streams, server: h11.Connection) -> None:
    near = visit.near
    while True:
        try:
            event = await _next(server, far)
        except h11.RemoteProtocolError:
            return await _cut(visit, client)
        if isinstance(event, h11.InformationalResponse):
            if event.status_code != _SWITCHING:
                await near.send(client.send(event) or b"")
        elif isinstance(event, h11.Response):
            answer = h11.Response(
                status_code=event.status_code, headers=_passed(list(event.headers)), reason=event.reason
            )
            await near.send(client.send(answer) or b"")
        elif isinstance(event, h11.Data):
            visit.count_received(len(event.data))
            await near.send(client.send(h11.Data(data=event.data)) or b"")
        elif isinstance(event, h11.EndOfMessage):
            await near.send(client.send(h11.EndOfMessage()) or b"")
            return None
        else:
            return await _cut(visit, client)


async def _cut(visit: Visit, client: h11.Connection) -> None:
    """The destination broke off: say so if nothing was passed on yet, else break off too."""
    if client.our_state is h11.SEND_RESPONSE:
        await _refuse(visit, client, 502, "the destination broke off before its answer was whole")
    visit.abort()


def target_of(target: str) -> tuple[str, int, str]:
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
        host, port = authority, str(_HTTP_PORT)
    if "@" in authority or not port.isascii() or not port.isdigit():
        raise BadRequestError("the address must be http://HOST or http://HOST:PORT, without a user")
    return host, int(port[:6]), path if path.startswith("/") else f"/{path}"


def outgoing(headers: Headers, wanted: Destination) -> Headers:
    """Return the headers that a destination gets; the place where a later version puts in what a host is to be sent."""
    named = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
    host = named if wanted.port == _HTTP_PORT else f"{named}:{wanted.port}"
    return [(b"host", host.encode("ascii")), *_passed(headers), (b"connection", b"close")]


def _passed(headers: Headers) -> Headers:
    """Return headers without those that are for one connection only."""
    listed = {
        word.strip().lower() for name, value in headers if name.lower() == b"connection" for word in value.split(b",")
    }
    dropped = (_HOP | listed) - _FRAMING
    return [(name, value) for name, value in headers if name.lower() not in dropped]


async def _next(side: h11.Connection, streams: Streams) -> object:
    """Return the next event of one side, reading as needed."""
    while (event := side.next_event()) is h11.NEED_DATA:
        side.receive_data(await streams.reader.read(CHUNK_BYTES))
    return event


async def _refuse(visit: Visit, client: h11.Connection, status: int, reason: str) -> None:
    """Answer with one line, and be done with this client."""
    if client.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    body = f"ringfence: {reason}\n".encode("ascii", "backslashreplace")
    headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
    with suppress(h11.LocalProtocolError):
        head = client.send(h11.Response(status_code=status, headers=headers, reason=b"Ringfence")) or b""
        await visit.near.send(
            head + (client.send(h11.Data(data=body)) or b"") + (client.send(h11.EndOfMessage()) or b"")
        )
