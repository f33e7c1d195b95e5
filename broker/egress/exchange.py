"""One HTTP request and its answer, carried both ways between two connections.

Called by http.py (plain requests) and keyed.py (requests that carry a secret). Must never pass on framing that it has
not understood itself (h11 parses and writes both sides), or what is for one connection only.

Source: RFC 9112 sections 6 (6.3: a length beside chunks is removed) and 7, RFC 9110 section 7.6.1.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import h11

from broker.egress.errors import UnreachableError
from broker.egress.mask import Mask
from broker.egress.streams import CHUNK_BYTES, Side
from broker.egress.visit import Visit

__all__ = ["Headers", "carry", "follow", "passed", "refuse"]

#: For this connection only (RFC 9110 section 7.6.1); framing is h11's work and stays.
_HOP: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-authorization"}
    | {b"proxy-authenticate", b"host"}
)
_LENGTH: Final = b"content-length"
_CHUNKED: Final = b"transfer-encoding"
_FRAMING: Final = frozenset({_LENGTH, _CHUNKED})
_ENCODING: Final = b"content-encoding"
_SWITCHING: Final = 101

Headers = list[tuple[bytes, bytes]]


async def carry(
    visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, mask: Mask | None = None
) -> None:
    """Carry one request's body up and its answer down, at once: either may come first."""
    first = client.next_event()
    if isinstance(first, h11.EndOfMessage):
        # Nothing follows the head: no task for it.
        await far.send(server.send(h11.EndOfMessage()) or b"")
        await _download(visit, client, far, server, mask)
        return
    upload = asyncio.ensure_future(_upload(visit, client, far, server, first))
    try:
        await _download(visit, client, far, server, mask)
        if not upload.done() and client.their_state is h11.DONE:
            await upload
    finally:
        upload.cancel()
        with suppress(asyncio.CancelledError, OSError, h11.ProtocolError):
            await upload


async def follow(side: h11.Connection, streams: Side) -> object:
    """Return the next event of one side, reading as needed."""
    while (event := side.next_event()) is h11.NEED_DATA:
        side.receive_data(await streams.read(CHUNK_BYTES))
    return event


def passed(headers: Headers) -> Headers:
    """Return headers without those that are for one connection only."""
    listed = {
        word.strip().lower() for name, value in headers if name.lower() == b"connection" for word in value.split(b",")
    }
    dropped = (_HOP | listed) - _FRAMING
    if any(name.lower() == _CHUNKED for name, _ in headers):
        # A length beside it is what two servers in a row disagree about: where this message ends, and the next begins.
        dropped |= {_LENGTH}
    return [(name, value) for name, value in headers if name.lower() not in dropped]


async def refuse(visit: Visit, client: h11.Connection, status: int, reason: str) -> None:
    """Answer with one line, and be done with this client."""
    if client.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    body = f"ringfence: {reason}\n".encode("ascii", "backslashreplace")
    headers = [("content-type", "text/plain"), ("content-length", str(len(body))), ("connection", "close")]
    with suppress(h11.LocalProtocolError):
        head = client.send(h11.Response(status_code=status, headers=headers, reason=b"Ringfence")) or b""
        await visit.side.send(
            head + (client.send(h11.Data(data=body)) or b"") + (client.send(h11.EndOfMessage()) or b"")
        )


async def _upload(visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, event: object) -> None:
    while True:
        if event is h11.NEED_DATA:
            event = await follow(client, visit.side)
        if isinstance(event, h11.Data):
            visit.count_sent(len(event.data))
            await far.send(server.send(h11.Data(data=event.data)) or b"")
            event = h11.NEED_DATA
        elif isinstance(event, h11.EndOfMessage):
            await far.send(server.send(h11.EndOfMessage()) or b"")
            return
        else:
            return


async def _download(visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, mask: Mask | None) -> None:
    out = b""
    while True:
        try:
            event = server.next_event()
            if event is h11.NEED_DATA:
                # What came together goes on together, and nothing waits for what has not come.
                if out:
                    await visit.side.send(out)
                    out = b""
                server.receive_data(await far.read(CHUNK_BYTES))
                continue
        except h11.RemoteProtocolError:
            return await _cut(visit, client)
        if not isinstance(event, h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage):
            return await _cut(visit, client)
        out += _passed_on(visit, client, event, mask)
        if isinstance(event, h11.EndOfMessage):
            await visit.side.send(out)
            return None


def _passed_on(
    visit: Visit,
    client: h11.Connection,
    event: h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage,
    mask: Mask | None,
) -> bytes:
    """Return what the job gets of one event of an answer."""
    if isinstance(event, h11.Data):
        visit.count_received(len(event.data))
        data = bytes(event.data) if mask is None else mask.feed(bytes(event.data))
        return (client.send(h11.Data(data=data)) or b"") if data else b""
    if isinstance(event, h11.EndOfMessage):
        rest = b"" if mask is None else mask.finish()
        return ((client.send(h11.Data(data=rest)) or b"") if rest else b"") + (client.send(h11.EndOfMessage()) or b"")
    if isinstance(event, h11.Response):
        return client.send(_answer(event, mask)) or b""
    if event.status_code == _SWITCHING:
        return b""
    headers = list(event.headers) if mask is None else []
    return client.send(h11.InformationalResponse(status_code=event.status_code, headers=headers)) or b""


def _answer(event: h11.Response, mask: Mask | None) -> h11.Response:
    """Return the head of an answer as the client gets it. Raises UnreachableError: it can't be looked through."""
    headers = passed(list(event.headers))
    if mask is None:
        return h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
    if any(name == _ENCODING and value.strip().lower() not in (b"", b"identity") for name, value in headers):
        raise UnreachableError("the host compressed its answer although it was asked not to")
    clean = [(name, mask.cover(value)) for name, value in headers if mask.cover(name) == name]
    return h11.Response(status_code=event.status_code, headers=clean, reason=mask.cover(bytes(event.reason)))


async def _cut(visit: Visit, client: h11.Connection) -> None:
    """The destination broke off: say so if nothing was passed on yet, else break off too."""
    if client.our_state is h11.SEND_RESPONSE:
        await refuse(visit, client, 502, "the destination broke off before its answer was whole")
    visit.abort()
