"""One HTTP request and its answer, carried both ways between two connections.

Called by http.py (plain requests) and keyed.py (requests that carry a secret). Must never pass on framing that it has
not understood itself (h11 parses and writes both sides; an answer that came whole and is plain in every way goes past
it, whole.py), or what is for one connection only.

Source: RFC 9112 sections 6 (6.3: a length beside chunks is removed) and 7, RFC 9110 section 7.6.1.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import h11

from broker.egress.errors import BadRequestError, EgressError, TooLargeError, UnreachableError
from broker.egress.mask import Mask
from broker.egress.meter import Tally
from broker.egress.streams import CHUNK_BYTES, Side
from broker.egress.visit import MAX_HEAD_BYTES, Visit
from broker.egress.whole import Whole, whole

__all__ = ["Headers", "carry", "collected", "follow", "length_of", "passed", "refuse", "renewed"]

#: For this connection only (RFC 9110 section 7.6.1); framing is h11's work and stays.
_HOP: Final = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-authorization"}
    | {b"proxy-authenticate", b"host"}
)
_LENGTH: Final = b"content-length"
_CHUNKED: Final = b"transfer-encoding"
_FRAMING: Final = frozenset({_LENGTH, _CHUNKED})
_ENCODING: Final = b"content-encoding"
_CONTINUE: Final = 100
_SWITCHING: Final = 101

Headers = list[tuple[bytes, bytes]]


async def carry(
    visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, tally: Tally, mask: Mask | None = None
) -> bool:
    """Carry one request's body up and its answer down, at once: either may come first.

    True: the answer went past both parsers (whole.py); theirs are over, the connections are as fresh.
    """
    past = False
    # A client that has gone would keep its request, and a model at work, until the connection's idle limit.
    visit.near.watch(visit.abort)
    try:
        past = await _both(visit, client, far, server, tally, mask)
    finally:
        visit.near.watch(None)
        tally.end(whole=past or server.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED))
    return past


def renewed(client: h11.Connection) -> h11.Connection:
    """Return what reads the next request of a client whose last one was answered past its parser."""
    fresh = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    data, ended = client.trailing_data
    if data:
        fresh.receive_data(data)
    if ended:
        fresh.receive_data(b"")
    return fresh


async def _both(
    visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, tally: Tally, mask: Mask | None
) -> bool:
    if client.their_state is h11.DONE:
        # Its body was read before its head went on.
        return await _answered(visit, client, far, server, tally, mask)
    first = client.next_event()
    if isinstance(first, h11.EndOfMessage):
        # Nothing follows the head: no task for it.
        rest = server.send(h11.EndOfMessage())
        if rest:
            await far.send(rest)
        return await _answered(visit, client, far, server, tally, mask)
    upload = asyncio.ensure_future(_upload(visit, client, far, server, first, tally))
    try:
        try:
            await _download(visit, client, far, server, tally, mask)
        except OSError:
            if visit.fault is not None and client.our_state is h11.SEND_RESPONSE:
                raise visit.fault from None
            raise
        if not upload.done() and client.their_state is h11.DONE:
            await upload
    finally:
        upload.cancel()
        with suppress(asyncio.CancelledError, OSError, h11.ProtocolError, EgressError):
            await upload
    return False


async def _answered(
    visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, tally: Tally, mask: Mask | None
) -> bool:
    """Pass on the answer to a request that was sent whole; True: past both parsers."""
    if client.their_state is h11.DONE and server.our_state is h11.DONE:
        data = await far.read(CHUNK_BYTES)
        found = whole(data, tally.method)
        if found is not None:
            out = _covered_whole(visit, found, tally, mask)
            # From here on nobody can answer this request once more.
            client.send_failed()
            await visit.side.send(out)
            return True
        server.receive_data(data)
    await _download(visit, client, far, server, tally, mask)
    return False


def _covered_whole(visit: Visit, found: Whole, tally: Tally, mask: Mask | None) -> bytes:
    """Return what the job gets of an answer that has come whole. Raises UnreachableError, as `_answer` does."""
    visit.count_received(len(found.body))
    tally.head(found.status, found.headers)
    tally.feed(found.body)
    headers, reason = _covered([pair for pair in found.headers if pair[0] not in _HOP], found.reason, mask)
    lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    body = found.body if mask is None else mask.cover(found.body)
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (found.status, reason, lines, body)


async def follow(side: h11.Connection, streams: Side) -> object:
    """Return the next event of one side, reading as needed."""
    while (event := side.next_event()) is h11.NEED_DATA:
        side.receive_data(await streams.read(CHUNK_BYTES))
    return event


async def collected(visit: Visit, client: h11.Connection, limit_bytes: int) -> bytes:
    """Read a request's body whole. Raises TooLargeError, BadRequestError."""
    if client.they_are_waiting_for_100_continue:
        await visit.side.send(client.send(h11.InformationalResponse(status_code=_CONTINUE, headers=[])) or b"")
    body = bytearray()
    while not isinstance(event := await follow(client, visit.side), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            raise BadRequestError("the request ended before its body did")
        visit.count_sent(len(event.data))
        body += event.data
        visit.gate.sized(len(body), limit_bytes)
        visit.gate.sized(len(body), visit.body_bytes)
    return bytes(body)


def length_of(request: h11.Request) -> int:
    """Return how long a request's body is said to be, 0 where nothing says it."""
    return next((int(value) for name, value in request.headers.raw_items() if name.lower() == _LENGTH), 0)


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


async def _upload(
    visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, event: object, tally: Tally
) -> None:
    sent = 0
    while True:
        if event is h11.NEED_DATA:
            event = await follow(client, visit.side)
        if isinstance(event, h11.Data):
            visit.count_sent(len(event.data))
            tally.sent(event.data)
            sent += len(event.data)
            try:
                visit.gate.sized(sent, visit.body_bytes)
            except TooLargeError as error:
                # Nobody said so before. The host must not take what came for the whole.
                visit.fault = error
                visit.leave()
                raise
            await far.send(server.send(h11.Data(data=event.data)) or b"")
            event = h11.NEED_DATA
        elif isinstance(event, h11.EndOfMessage):
            await far.send(server.send(h11.EndOfMessage()) or b"")
            return
        else:
            return


async def _download(
    visit: Visit, client: h11.Connection, far: Side, server: h11.Connection, tally: Tally, mask: Mask | None
) -> None:
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
        out += _passed_on(visit, client, event, tally, mask)
        if isinstance(event, h11.EndOfMessage):
            await visit.side.send(out)
            return None


def _passed_on(
    visit: Visit,
    client: h11.Connection,
    event: h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage,
    tally: Tally,
    mask: Mask | None,
) -> bytes:
    """Return what the job gets of one event of an answer."""
    if isinstance(event, h11.Data):
        visit.count_received(len(event.data))
        raw = bytes(event.data)
        tally.feed(raw)
        data = raw if mask is None else mask.feed(raw)
        return (client.send(h11.Data(data=data)) or b"") if data else b""
    if isinstance(event, h11.EndOfMessage):
        rest = b"" if mask is None else mask.finish()
        return ((client.send(h11.Data(data=rest)) or b"") if rest else b"") + (client.send(h11.EndOfMessage()) or b"")
    if isinstance(event, h11.Response):
        tally.head(event.status_code, list(event.headers))
        return client.send(_answer(event, mask)) or b""
    if event.status_code == _SWITCHING:
        return b""
    headers = list(event.headers) if mask is None else []
    return client.send(h11.InformationalResponse(status_code=event.status_code, headers=headers)) or b""


def _answer(event: h11.Response, mask: Mask | None) -> h11.Response:
    """Return the head of an answer as the client gets it. Raises UnreachableError: it can't be looked through."""
    headers, reason = _covered(passed(list(event.headers)), bytes(event.reason), mask)
    # h11 has read and checked these parts itself.
    return h11.Response(status_code=event.status_code, headers=headers, reason=reason, _parsed=True)


def _covered(headers: Headers, reason: bytes, mask: Mask | None) -> tuple[Headers, bytes]:
    if mask is None:
        return headers, reason
    if any(name == _ENCODING and value.strip().lower() not in (b"", b"identity") for name, value in headers):
        raise UnreachableError("the host compressed its answer although it was asked not to")
    if mask.shows(b"\n".join([reason, *(part for header in headers for part in header)])):
        headers = [(name, mask.cover(value)) for name, value in headers if mask.cover(name) == name]
        reason = mask.cover(reason)
    return headers, reason


async def _cut(visit: Visit, client: h11.Connection) -> None:
    """The destination broke off: say so if nothing was passed on yet, else break off too."""
    if visit.fault is not None and client.our_state is h11.SEND_RESPONSE:
        raise visit.fault
    if client.our_state is h11.SEND_RESPONSE:
        await refuse(visit, client, 502, "the destination broke off before its answer was whole")
    visit.abort()
