"""HTTP that is https from here on: to the host of a proxied secret, with the header that the vault's rule names.

Called by http.py, for plain requests, for those inside a TLS session that ends here, and for routes to granted hosts.
Must never send a value before the host is connected, checked and verified, in any place but that header, or without
leave for this very request; and never follow a redirect (attack 15).

Source: RFC 9110 sections 7.6.1, 9.3.8 (TRACE gives a request's headers back), 12.5.3 and 14.2.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import h11

from broker.egress.errors import BadRequestError, LongHeadError, SecretRefusedError, UnreachableError
from broker.egress.exchange import Headers, carry, collected, length_of, passed
from broker.egress.fields import body_kind, in_body, in_target
from broker.egress.keys import NO_LEAVE, Keys, Leave
from broker.egress.mask import Mask
from broker.egress.meter import Tally, models_path
from broker.egress.rules import Destination
from broker.egress.tls import Tls
from broker.egress.visit import MAX_HEAD_BYTES, Visit

__all__ = ["Chain", "dressed", "one"]

_HTTPS_PORT: Final = 443
#: They answer with what they got.
_ECHOING: Final = frozenset({b"TRACE", b"TRACK"})
#: Answers must come as they are, and whole: what is compressed, or cut in small parts, can't be looked through. A host
#: need not hear the wish for a part, so every client takes the whole, too.
_ENCODINGS: Final = b"accept-encoding"
_PARTS: Final = frozenset({b"range", b"if-range"})
#: Some hosts take the method or the path from these; what the broker has allowed is the request's first line.
_OTHERWISE: Final = frozenset(
    {b"x-http-method-override", b"x-http-method", b"x-method-override", b"x-original-url", b"x-rewrite-url"}
    | {b"x-original-method", b"x-forwarded-method", b"x-original-uri", b"x-forwarded-uri", b"x-override-url"}
    | {b"x-original-path", b"x-forwarded-path", b"x-http-path-override"}
)
#: Many servers read an underscore as the hyphen, and some whatever is no letter and no digit.
_AS_READ: Final = bytes(code if chr(code).isalnum() and code < 128 else ord("-") for code in range(256))
#: A body that a value may go into is read whole first.
MAX_FIELD_BODY_BYTES: Final = 1 << 20
_BODY: Final = frozenset({b"content-length", b"transfer-encoding", b"expect"})
#: Method and path, without query: what is longer is no question that the broker reads, and no address that hosts take.
_MAX_ASKED: Final = 8192
#: A kept connection that rested for longer may have been closed by the host just now.
_REST_S: Final = 4.0


@dataclass(slots=True)
class Chain:
    """The connection to a host that the next request of the same visit may take, too."""

    host: Destination
    far: Tls
    server: h11.Connection
    rested_s: float


async def one(visit: Visit, client: h11.Connection, request: h11.Request, host: Destination, path: str) -> bool:
    """Carry one request and its answer; return what `carry` does.

    Raises:
        EgressError: nothing was sent. OSError: the connection broke.
    """
    secret = host in visit.rules.keyed
    keys = _keys(visit, request) if secret else None
    size = length_of(request)
    visit.gate.sized(size)
    with visit.gate.at(host):
        if keys is None:
            return await _send(visit, client, request, _Draft(await _chain(visit, host), request, path), NO_LEAVE)
        visit.gate.bounded(host, keys.at_once.get(host))
        draft = _Draft(await _chain(visit, host), request, path)
        leave = await _leave(visit, keys, draft)
        visit.gate.bounded(host, leave.at_once)
        visit.gate.sized(size, leave.body_bytes)
        visit.body_bytes = leave.body_bytes
        visit.keyed_now = True
        visit.usage.keyed += 1
        mask = Mask(leave.veil)
        try:
            return await _send(visit, client, request, draft, leave, mask)
        finally:
            visit.keyed_now, visit.body_bytes = False, None
            if mask.hits:
                visit.usage.masked += mask.hits
                keys.masked(mask.hits)


class _Draft:
    """A request's head for a host: most of it is made while the broker looks whether it may go."""

    def __init__(self, chain: Chain, request: h11.Request, path: str) -> None:
        self.chain, self.request, self.path = chain, request, path
        self._names: tuple[bytes, ...] | None = None
        self._head = b""

    def begin(self, names: tuple[bytes, ...]) -> None:
        """Make all but the headers of these names."""
        self._names, self._head = names, self._made(self.path, names, secret=True)

    def finish(self, path: str, leave: Leave, size: int | None, *, secret: bool) -> bytes:
        """Return the whole head. ``size``: of a body that was read and changed. Raises SecretRefusedError."""
        names = tuple(name for name, _ in leave.headers)
        if self._names is None:
            self._head = self._made(path, names, secret=secret, size=size)
        elif names != self._names or leave.fields:
            # Its connection has begun another request: nothing of that was sent, and nothing will be.
            raise SecretRefusedError("unavailable")
        own = b"".join(b"%b: %b\r\n" % header for header in leave.headers)
        return self._head[:-2] + own + b"\r\n"

    def _made(self, path: str, names: tuple[bytes, ...], *, secret: bool, size: int | None = None) -> bytes:
        headers = dressed(list(self.request.headers), self.chain.host, names, secret=secret)
        if size is not None:
            headers = [pair for pair in headers if pair[0].lower() not in _BODY]
            headers.append((b"content-length", b"%d" % size))
        # h11 has checked these headers as it read them.
        target = path.encode("ascii", "backslashreplace")
        head = h11.Request(method=self.request.method, target=target, headers=headers, _parsed=True)
        return self.chain.server.send(head) or b""


async def _send(
    visit: Visit, client: h11.Connection, request: h11.Request, draft: _Draft, leave: Leave, mask: Mask | None = None
) -> bool:
    path, body, chain = draft.path, None, draft.chain
    if leave.fields and not models_path(path):
        path = in_target(path, leave.fields)
        kind = body_kind([value for name, value in request.headers if name == b"content-type"], leave.fields)
        if kind:
            body = in_body(await collected(visit, client, MAX_FIELD_BODY_BYTES), kind, leave.fields)
            visit.gate.sized(len(body), leave.body_bytes)
    out = draft.finish(path, leave, None if body is None else len(body), secret=mask is not None)
    server = chain.server
    if body is not None:
        out += (server.send(h11.Data(data=body)) or b"") + (server.send(h11.EndOfMessage()) or b"")
    await chain.far.send(out)
    tally = Tally(visit.meter, request.method, draft.path)
    tally.sent(body or b"")
    past = await carry(visit, client, chain.far, server, tally, mask)
    if past or _reusable(chain):
        if past:
            chain.server = _parser()
        else:
            server.start_next_cycle()
        chain.rested_s = visit.now_s()
        visit.chain = chain
    else:
        visit.leave()
    return past


def dressed(headers: Headers, host: Destination, names: Sequence[bytes], *, secret: bool = True) -> Headers:
    """Return the headers that a host gets of the job's own: all but ``names``, those that secrets are put into.

    ``secret``: the request carries one, so that its answer has to come whole.
    """
    taken = {name.lower() for name in names} | {_ENCODINGS} | (_PARTS | _OTHERWISE if secret else frozenset())
    own = [(name, value) for name, value in passed(headers) if name.lower().translate(_AS_READ) not in taken]
    return [(b"host", host.host_header(_HTTPS_PORT).encode("ascii")), *own, (_ENCODINGS, b"identity")]


def _keys(visit: Visit, request: h11.Request) -> Keys:
    if request.method.upper() in _ECHOING:
        raise BadRequestError("this method has no place where a secret is sent")
    if visit.access is None or visit.access.keys.closed:
        raise SecretRefusedError("denied")
    return visit.access.keys


async def _leave(visit: Visit, keys: Keys, draft: _Draft) -> Leave:
    asked = f"{draft.request.method.decode('ascii')} {draft.path.partition('?')[0]}"
    if len(asked) > _MAX_ASKED:
        raise LongHeadError(f"method and path of a request for a secret's host have {_MAX_ASKED} characters at most")
    try:
        return await keys.use(draft.chain.host, asked, draft.begin)
    except SecretRefusedError as error:
        visit.refuse(draft.chain.host, error)
        raise


async def _chain(visit: Visit, host: Destination) -> Chain:
    """Return a verified connection to ``host``: the last one of this visit, or a new one."""
    chain, visit.chain = visit.chain, None
    if isinstance(chain, Chain):
        if chain.host == host and chain.far.idle() and visit.now_s() - chain.rested_s < _REST_S:
            return chain
        visit.leave()
    if visit.trust is None:
        raise UnreachableError("this egress process can't verify hosts")
    _, streams = await visit.reach(host.host, host.port)
    far = Tls(streams, visit.trust, host.host)
    try:
        async with asyncio.timeout(visit.head_s):
            await far.greet()
    except ssl.SSLError as error:
        visit.leave()
        raise UnreachableError(f"{host}: TLS failed: {_why(error)}") from None
    except (OSError, TimeoutError):
        visit.leave()
        raise UnreachableError(f"{host}: no answer in TLS") from None
    return Chain(host, far, _parser(), visit.now_s())


def _parser() -> h11.Connection:
    return h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)


def _reusable(chain: Chain) -> bool:
    server = chain.server
    return server.our_state is h11.DONE and server.their_state is h11.DONE and not server.trailing_data[0]


def _why(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    return (error.reason or "no TLS").lower().replace("_", " ")
