"""The flight record's form: lines in a chain, their keys, and the head that a node signs.

Called by the node's recorder (writes), its checker and the command line (read). Must never hold a key that opens what
was written before it: a line's key is replaced by a hash of itself once the line is made.

A line is ``BODY MAC``: a JSON object ``{"n", "at_ms", "kind", "attempt", …}`` and 32 hex digits. Two chains run over
the bodies. The hash of line n is SHA-256 of the hash of line n-1 and the body, so that a head (count and hash) names
everything before it; anybody can work it out. The MAC covers that hash under the line's key, and its first key is
sealed to the fleet's key in the first line of each file: who breaks into the node later can't make lines of before,
and who has the fleet's key can tell a forged line from a true one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final

from runner.wire.errors import RecordError

__all__ = [
    "ANCHOR_S",
    "DROPPED",
    "GENESIS",
    "HEAD",
    "KEEP_ANCHORS_S",
    "MAC_BYTES",
    "MAX_LINE_BYTES",
    "OPENED",
    "SEED_BYTES",
    "FlightHead",
    "body_of",
    "evolve",
    "head_text",
    "linked",
    "mac",
    "parse_head",
    "parsed",
]

GENESIS: Final = bytes(32)
SEED_BYTES: Final = 32
MAX_LINE_BYTES: Final = 4096
#: How often a head that has changed is signed and anchored in the store, and for how long the store keeps anchors.
ANCHOR_S: Final = 30.0
KEEP_ANCHORS_S: Final = 14 * 86_400
#: Kinds of the record's own lines: the first one of a file, a signed head, a file that is given up for its age.
OPENED: Final = "record.opened"
HEAD: Final = "record.head"
DROPPED: Final = "record.dropped"
_EVOLVE: Final = b"ringfence/flight/1"
MAC_BYTES: Final = 16
_MAC: Final = re.compile(rb"[0-9a-f]{32}")
_HEAD: Final = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class FlightHead:
    """What a node signs of its record: the number of lines so far and the hash of the last. ``at_ms``: Unix time."""

    node: str
    boot: str
    count: int
    hash: str
    at_ms: int

    @property
    def text(self) -> str:
        """The head as receipts and events carry it."""
        return f"{self.count}:{self.hash}"


def linked(before: bytes, body: bytes) -> bytes:
    """Return the hash of a line, from the hash of the line before it."""
    return hashlib.sha256(before + body).digest()


def mac(key: bytes, link: bytes) -> str:
    """Return the MAC text of the line with the hash ``link``: keyed BLAKE2s (RFC 7693), a third of an HMAC's cost."""
    return hashlib.blake2s(link, key=key, digest_size=MAC_BYTES).hexdigest()


def evolve(key: bytes) -> bytes:
    """Return the next line's key."""
    return hashlib.sha256(_EVOLVE + key).digest()


def head_text(count: int, link: bytes) -> str:
    """Return ``COUNT:HASH``."""
    return f"{count}:{link.hex()}"


def parse_head(text: str) -> tuple[int, str]:
    """Return (count, hash in hex) of ``COUNT:HASH``. Raises RecordError."""
    match = _HEAD.fullmatch(text)
    if match is None:
        raise RecordError("a head is COUNT:HASH, as `ringfence audit verify` prints it")
    return int(match[1]), match[2]


def body_of(line: bytes) -> tuple[bytes, str]:
    """Return (body, MAC text) of a whole line with its newline. Raises RecordError."""
    body, _, text = line.removesuffix(b"\n").rpartition(b" ")
    if _MAC.fullmatch(text) is None or not body or not line.endswith(b"\n"):
        raise RecordError("this is no line of a flight record")
    return body, text.decode("ascii")


def parsed(body: bytes) -> dict[str, object]:
    """Return a line's fields. Raises RecordError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise RecordError("this is no line of a flight record") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("n"), int):
        raise RecordError("this is no line of a flight record")
    return fields
