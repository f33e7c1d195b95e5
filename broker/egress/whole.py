"""An answer in its plainest form that has come whole: read with one pattern, where a parser would take longer. Pure.

Called by exchange.py with the first bytes of an answer. Must never take an answer that the parser (h11) would read
otherwise: what is not plain in every way is none of these, and goes through the parser.

Source: RFC 9112 sections 4, 5 and 6 (status line, fields, length of a body), RFC 9110 section 5.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Whole", "whole"]

#: HTTP/1.1, a status whose body is as long as it is said to be, and fields of printable ASCII, each on its line.
_HEAD: Final = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9]{2}) ([\x20-\x7e]*+)\r\n((?:[A-Za-z0-9!#$%&'*+.^_`|~-]++:[\t\x20-\x7e]*+\r\n)++)\r\n"
)
_NO_BODY: Final = frozenset({b"204", b"304"})
#: Their answers have no body, or are no answers.
_OTHERWISE: Final = frozenset({b"HEAD", b"CONNECT"})
_LENGTH: Final = b"content-length"
#: They change what an answer is, or what becomes of its connection.
_FRAMING: Final = frozenset({b"transfer-encoding", b"connection", b"upgrade", b"trailer", b"keep-alive"})
_STAYS: Final = b"keep-alive"
_MAX_DIGITS: Final = 9


@dataclass(slots=True)
class Whole:
    """``headers``: names in lower case. ``length``: what they say of the body."""

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


def whole(data: bytes, method: bytes) -> Whole | None:
    """Return the answer that ``data`` is from first to last byte; None: it may be one, for who parses it."""
    head = _HEAD.match(data)
    if head is None or head[1] in _NO_BODY or method in _OTHERWISE:
        return None
    headers, length = [], b""
    for line in head[3].splitlines():
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if name == _LENGTH:
            if length or not value.isdigit() or len(value) > _MAX_DIGITS:
                return None
            length = value
        elif name in _FRAMING and not (name == b"connection" and value.lower() == _STAYS):
            return None
        headers.append((name, value))
    end = head.end()
    if not length or int(length) != len(data) - end:
        return None
    return Whole(int(head[1]), head[2], headers, data[end:])
