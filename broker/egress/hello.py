"""Reads the name that a TLS client asks for, from its first bytes. Pure.

Called by the door for port 443, before anything of the client's is passed on. Must never guess: what is not a whole,
well-formed ClientHello is refused (attack 14).

Source: RFC 8446 sections 4.1.2 and 5.1, RFC 6066 section 3 (server_name), RFC 9849 (encrypted_client_hello).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from broker.egress.errors import RefusedError

__all__ = ["MAX_HELLO_BYTES", "REFUSED_NAME", "Guard", "Hello", "parse"]

#: A fatal alert: unrecognized_name.
REFUSED_NAME: Final = bytes((21, 3, 1, 0, 2, 2, 112))
MAX_HELLO_BYTES: Final = 32 * 1024
_HEADER_BYTES: Final = 5
_CHANGE_CIPHER: Final = 20
_HANDSHAKE: Final = 22
_DATA: Final = 23
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_EARLY_DATA: Final = 42
_ECH: Final = 0xFE0D
_HOST_NAME: Final = 0
_MAX_RECORD: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Hello:
    """What a ClientHello asks for. ``ech``: it carries another, encrypted one. ``early``: data follows at once."""

    name: str | None
    ech: bool
    early: bool = False


class _Reader:
    """Takes vectors from bytes; anything short is refused."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        part = self._data[self._at : self._at + count]
        if len(part) < count:
            raise RefusedError("the TLS greeting is malformed")
        self._at += count
        return part

    def number(self, size: int) -> int:
        """Return the next ``size`` bytes as a number."""
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> bytes:
        """Return a vector whose length takes ``size`` bytes."""
        return self.take(self.number(size))

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return self._at == len(self._data)


class Guard:
    """Judges what a client sends at the TLS port: its greeting, and a second one that a server may ask for.

    After a HelloRetryRequest the client greets again, in the clear; a server may believe that greeting's name.
    """

    def __init__(self, check: Callable[[Hello], None]) -> None:
        """``check`` raises RefusedError for a greeting that must not be passed on."""
        self._check = check
        self._held = b""
        self._skip = 0
        self._early = False
        self._open = False
        #: Whether the first greeting was whole and passed.
        self.greeted = False

    def feed(self, data: bytes) -> bytes:
        """Take what came; return what may be passed on by now. Raises RefusedError."""
        self._held += data
        out = b""
        while self._held and not self._open and (size := self._judged()):
            out, self._held = out + self._held[:size], self._held[size:]
        if self._open:
            out, self._held = out + self._held, b""
        return out

    def _judged(self) -> int:
        """Return how many of the held bytes may go; 0 if more must come first, or all may."""
        if self._skip:
            size = min(self._skip, len(self._held))
            self._skip -= size
            return size
        if not self.greeted:
            return self._greeting()
        if len(self._held) < _HEADER_BYTES + 1:
            return 0
        kind, length = self._held[0], int.from_bytes(self._held[3:5], "big")
        if kind == _HANDSHAKE and _looks_like_greeting(self._held[_HEADER_BYTES : _HEADER_BYTES + length], length):
            return self._greeting()
        if kind == _CHANGE_CIPHER or (kind == _DATA and self._early):
            self._skip = _HEADER_BYTES + length
            return self._judged()
        self._open = True
        return 0

    def _greeting(self) -> int:
        found = _whole(self._held)
        if found is None:
            return 0
        greeting, size = found
        self._check(greeting)
        # There are two at most: from here on everything is encrypted.
        self._open = self.greeted
        self._early = greeting.early
        self.greeted = True
        return size


def parse(data: bytes) -> Hello | None:
    """Return what the client asks for; None while the greeting is not whole.

    Raises:
        RefusedError: no TLS, malformed, or over MAX_HELLO_BYTES.
    """
    found = _whole(data)
    return None if found is None else found[0]


def _whole(data: bytes) -> tuple[Hello, int] | None:
    """Return the greeting, and how many bytes its records take."""
    message = b""
    at = 0
    while True:
        if data[at : at + 1] not in (b"", bytes((_HANDSHAKE,))):
            raise RefusedError("port 443 is for TLS, and this is none")
        if len(data) < at + _HEADER_BYTES:
            _check_length(data)
            return None
        size = int.from_bytes(data[at + 3 : at + _HEADER_BYTES], "big")
        if data[at + 1] != 3 or not 0 < size <= _MAX_RECORD:
            raise RefusedError("the TLS greeting is malformed")
        at += _HEADER_BYTES
        message += data[at : at + size]
        if message[0:1] not in (b"", bytes((_CLIENT_HELLO,))):
            raise RefusedError("the TLS client does not begin with a greeting")
        end = 4 + int.from_bytes(message[1:4], "big")
        if len(message) >= 4 and len(message) >= end:
            if len(message) > end or len(data) < at + size:
                # A record that goes on behind the greeting: no client sends one, and a server may read it otherwise.
                raise RefusedError("the TLS greeting is malformed")
            return _hello(message[4:end]), at + size
        if len(data) < at + size:
            _check_length(data)
            return None
        at += size


def _looks_like_greeting(content: bytes, length: int) -> bool:
    """Return whether a later handshake record can begin a greeting in the clear.

    An encrypted Finished is told apart by its version bytes; a record too short to have them is not encrypted.
    """
    if content[0] != _CLIENT_HELLO:
        return False
    long_enough = len(content) >= 4 and int.from_bytes(content[1:4], "big") > MAX_HELLO_BYTES
    return not long_enough and (length < 6 or len(content) < 6 or content[4] == 3)


def _check_length(data: bytes) -> None:
    if len(data) >= MAX_HELLO_BYTES:
        raise RefusedError("the TLS greeting is too long")


def _hello(body: bytes) -> Hello:
    reader = _Reader(body)
    reader.take(2 + 32)
    reader.vector(1)
    reader.vector(2)
    reader.vector(1)
    if reader.done:
        return Hello(None, ech=False)
    extensions = _Reader(reader.vector(2))
    names: list[str | None] = []
    ech = early = False
    while not extensions.done:
        kind = extensions.number(2)
        value = extensions.vector(2)
        ech = ech or kind == _ECH
        early = early or kind == _EARLY_DATA
        if kind == _SERVER_NAME:
            names.append(_server_name(value))
    if len(names) > 1:
        raise RefusedError("the TLS greeting names several hosts")
    return Hello(names[0] if names else None, ech, early)


def _server_name(value: bytes) -> str:
    """Return the one name of the list: a second entry is how a parser is made to see another name than the server."""
    outer = _Reader(value)
    entries = _Reader(outer.vector(2))
    kind = entries.number(1)
    name = entries.vector(2)
    if kind != _HOST_NAME or not entries.done or not outer.done or not name.isascii():
        raise RefusedError("the TLS greeting is malformed")
    return name.decode("ascii").lower().removesuffix(".")
