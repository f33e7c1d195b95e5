"""The payload of a job hash: RQ's ``[function, instance, args, kwargs]``, holding one signed envelope and nothing else.

Called by the client (packs), the node agent and every other reader (parse). Standard library only. Must never hand a
byte to a decoder that follows names, and never unpack more than the cap (attack 25).
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from json import encoder
from json.decoder import scanstring  # type: ignore[attr-defined]  # public in CPython, not in its stubs
from typing import Final, cast

from runner.wire import codec
from runner.wire.errors import CodecError, RecordError
from runner.wire.spec import MAX_DEPTH, MAX_ENVELOPE_BYTES

__all__ = [
    "FUNCTION",
    "MAX_DATA_BYTES",
    "MAX_PAYLOAD_BYTES",
    "JobData",
    "Link",
    "TooLargeError",
    "decompress",
    "pack",
    "parse",
]

#: A text as RQ's JSON has it, in ASCII.
_quoted: Final = encoder.encode_basestring_ascii
#: The one function that a job of ours names.
FUNCTION: Final = "runner.jobs.run"
_STEP_BYTES: Final = 256 * 1024
#: Below this a payload is stored in one block, unpacked: its tables would cost more than they save.
_SMALL_BYTES: Final = 1000
#: Method and window, "packed for speed", "the last block, stored", its length and the length's complement.
_STORED: Final = struct.Struct("<BBBHH")
#: What stands around the two texts of a payload.
_BEFORE: Final = b'["runner.jobs.run", null, [], {"envelope": "'
_BETWEEN: Final = ', "sig": "'
_AFTER: Final = b'"}]'
_OPTIONAL: Final = ("occurrence", "children")
#: 48 bits: what a job id can hold.
MAX_DUE_MS: Final = 2**48 - 1
#: Largest payload after unpacking, in bytes: an envelope in which every third byte needs a six-byte escape.
MAX_PAYLOAD_BYTES: Final = 3 * MAX_ENVELOPE_BYTES + 4096
#: Largest packed payload that a script hands out, in bytes (zlib adds at most a few bytes to what it can't shrink).
MAX_DATA_BYTES: Final = MAX_PAYLOAD_BYTES + 4096


class TooLargeError(CodecError):
    """The bytes unpack to more than the limit."""

    code = "too_large"


@dataclass(frozen=True, slots=True)
class Link:
    """One step down from a job to a child of it: the record of what was asked, the signature of its node, its card."""

    child: bytes
    signature: str
    card: bytes


@dataclass(frozen=True, slots=True)
class JobData:
    """One job's signed bytes and their signature text, as received; nothing is verified yet.

    ``occurrence``: the bytes are those of a schedule, and the job is the one of this due time (Unix ms). ``links``: the
    bytes are those of the job above all others, and the job is the child that the last of them leads to.
    """

    envelope: bytes
    signature: str
    occurrence: int | None = None
    links: tuple[Link, ...] = ()

    @property
    def sha256(self) -> str:
        """The hash of what makes the job: of its envelope, and of the records that lead from there to a child."""
        first = hashlib.sha256(self.envelope).hexdigest()
        if not self.links:
            return first
        parts = [first, *(hashlib.sha256(link.child).hexdigest() for link in self.links)]
        return hashlib.sha256("\n".join(parts).encode("ascii")).hexdigest()


def decompress(data: bytes, limit_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """Unpack one complete zlib stream of at most ``limit_bytes``; never allocates more than that.

    Raises:
        CodecError: no zlib stream, a cut one, or bytes after it. TooLargeError (one of them): more than the limit.
    """
    unpacker = zlib.decompressobj()
    parts: list[bytes] = []
    left, rest = limit_bytes, data
    try:
        # In steps that stay in the processor's cache: a bomb costs a quarter less than in one piece.
        while left >= 0 and (part := unpacker.decompress(rest, min(left + 1, _STEP_BYTES))):
            parts.append(part)
            left -= len(part)
            rest = unpacker.unconsumed_tail
    except zlib.error:
        raise CodecError("not a zlib stream") from None
    if left < 0:
        raise TooLargeError(f"unpacks to more than {limit_bytes} bytes")
    found = b"".join(parts)
    if not unpacker.eof or unpacker.unused_data:
        raise CodecError("a cut zlib stream, or bytes after it")
    return found


def pack(envelope: bytes, signature: str, occurrence: int | None = None, links: Sequence[Link] = ()) -> bytes:
    """Return the ``data`` field of a job hash: a zlib stream of the bytes that RQ's JSONSerializer writes."""
    head = f'["{FUNCTION}", null, [], {{"envelope": {_quoted(envelope.decode("utf-8"))}, "sig": {_quoted(signature)}'
    due = "" if occurrence is None else f', "occurrence": {json.dumps(occurrence)}'
    below = f', "children": {json.dumps([_texts(link) for link in links])}' if links else ""
    return _compress(f"{head}{due}{below}}}]".encode())


def _texts(link: Link) -> tuple[str, str, str]:
    return link.child.decode("utf-8"), link.signature, link.card.decode("utf-8")


def _compress(data: bytes) -> bytes:
    """Return a zlib stream of the bytes. Source: RFC 1950 and RFC 1951 section 3.2.4, one block that is stored."""
    if len(data) >= _SMALL_BYTES:
        return zlib.compress(data)
    return _STORED.pack(0x78, 0x01, 1, len(data), len(data) ^ 0xFFFF) + data + zlib.adler32(data).to_bytes(4, "big")


def parse(data: bytes) -> JobData:
    """Return the signed bytes of a ``data`` field.

    Raises:
        CodecError: not one bounded, strict JSON document. RecordError: it is not a job of ours (another function,
            an instance, positional or other arguments).
    """
    text = decompress(data)
    if (usual := _usual(text)) is not None:
        return usual
    document = codec.load(text, limit_bytes=MAX_PAYLOAD_BYTES)
    if not isinstance(document, list) or document[:3] != [FUNCTION, None, []]:
        raise RecordError(f"the payload names something else than {FUNCTION}", path="data")
    kwargs = document[3] if len(document) == 4 else None
    if not isinstance(kwargs, dict) or {*kwargs, *_OPTIONAL} != {"envelope", "sig", *_OPTIONAL}:
        raise RecordError("the payload has other arguments than envelope, sig, occurrence and children", path="data")
    envelope, signature, due_ms = kwargs["envelope"], kwargs["sig"], kwargs.get("occurrence")
    if not isinstance(envelope, str) or not isinstance(signature, str):
        raise RecordError("envelope and sig are texts", path="data")
    if "occurrence" in kwargs and (type(due_ms) is not int or not 0 <= due_ms <= MAX_DUE_MS):
        raise RecordError("occurrence is a Unix time in milliseconds", path="data")
    links = _links(kwargs["children"]) if "children" in kwargs else ()
    return JobData(envelope.encode("utf-8"), signature, cast("int | None", due_ms), links)


def _links(value: object) -> tuple[Link, ...]:
    """Return the steps from a signed job down to a child of it, 1 to MAX_DEPTH of them."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_DEPTH:
        raise RecordError(f"children are 1 to {MAX_DEPTH} records", path="data")
    found = []
    for item in value:
        if not isinstance(item, list) or len(item) != 3 or not all(isinstance(part, str) for part in item):
            raise RecordError("a child is a record, a signature and a card", path="data")
        child, signature, card = cast("list[str]", item)
        found.append(Link(child.encode("utf-8"), signature, card.encode("utf-8")))
    return tuple(found)


def _usual(data: bytes) -> JobData | None:
    """Read the one form that `pack` writes, if there is no escaped character in it; None: ask the strict parser."""
    if not data.startswith(_BEFORE) or not data.endswith(_AFTER) or b"\\u" in data:
        return None
    try:
        text = data.decode("utf-8")
        envelope, end = scanstring(text, len(_BEFORE))
        if not text.startswith(_BETWEEN, end):
            return None
        signature, end = scanstring(text, end + len(_BETWEEN))
    except ValueError:
        return None
    return JobData(envelope.encode("utf-8"), signature) if end == len(text) - len(_AFTER) + 1 else None
