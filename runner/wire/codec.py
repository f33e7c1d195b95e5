"""Canonical JSON out, strict JSON in: the only text form that ever crosses a process border.

Called by every encoder and decoder of the project. Must never re-encode received bytes to verify them (a signature
covers the bytes as they arrived), and never accept a document that two parsers could read differently.

Source: RFC 8259; the rules answer attack 26 (duplicate keys, big numbers, depth).
"""

from __future__ import annotations

import json
import json.encoder
import re
from collections.abc import Callable
from json.scanner import make_scanner
from typing import Final, TypeAlias

from runner.wire.errors import CodecError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Json", "dump", "load"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

#: Deepest nesting of arrays and objects that is read or written.
MAX_DEPTH: Final = 32
#: Largest document that is read unless the caller names a limit, in bytes (8 MiB).
MAX_BYTES: Final = 8 * 1024 * 1024
#: Integers beyond 64 bits have no portable JSON form.
_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_MAX_INT_DIGITS: Final = 20

#: Strings: whole, in linear time even if unterminated.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
#: What is left of a document to count its nesting: brackets, all of one kind. The parser tells the kinds apart.
_OTHERS: Final = bytes(sorted(set(range(256)) - set(b"[]{}")))
_ALIKE: Final = bytes.maketrans(b"{}", b"[]")


def dump(value: object) -> bytes:
    """Return the canonical form: UTF-8, sorted keys, no spaces, no NaN, no lone surrogate.

    Raises:
        CodecError: the value is not plain JSON, is nested deeper than MAX_DEPTH or holds a lone surrogate.
    """
    try:
        data = _ENCODE(value).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"not plain JSON ({type(error).__name__})") from None
    _check_depth(data)
    return data


def load(data: bytes, *, limit_bytes: int = MAX_BYTES) -> Json:
    """Parse one document; refuse what is ambiguous or too large.

    Raises:
        CodecError: more than ``limit_bytes``, nested deeper than MAX_DEPTH, duplicate keys, NaN or Infinity, integers
            beyond 64 bits, invalid UTF-8 or lone surrogates, anything after the document.
    """
    if len(data) > limit_bytes:
        raise CodecError(f"{len(data)} bytes, the limit is {limit_bytes}")
    _check_depth(data)
    try:
        text = data.decode("utf-8")
        value = _parsed(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except CodecError:
        raise
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not strict JSON ({type(error).__name__})") from None
    return value


def _parsed(text: str) -> Json:
    """Parse a whole document. Without spaces around it, as we write all of ours, one call into the scanner does it."""
    try:
        value, end = _SCAN(text, 0)
    except StopIteration:
        end = -1
    found: Json = value if end == len(text) else _DECODER.decode(text)
    return found


def _check_depth(data: bytes) -> None:
    """Bound the nesting before any recursive parser sees the bytes."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    rest = _STRING.sub(b"", data).translate(_ALIKE, _OTHERS)
    for _ in range(MAX_DEPTH):
        if not rest:
            return
        # One call removes one level. A step for each bracket would let a hostile document cost its reader 15 ms.
        rest = rest.replace(b"[]", b"")
    if b"[" in rest:
        raise CodecError(f"nested deeper than {MAX_DEPTH}, or never closed")


def _unique_pairs(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CodecError("an object has the same key twice")
    return found


def _no_constant(name: str) -> Json:
    raise CodecError(f"{name} is not JSON")


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS:
        raise CodecError("an integer has more than 64 bits")
    number = int(text)
    if not _INT_MIN <= number <= _INT_MAX:
        raise CodecError("an integer has more than 64 bits")
    return number


def _finite_float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise CodecError("a number is too large for a double")
    return number


# Made once: making them costs more than a small document does.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_pairs,
    parse_constant=_no_constant,
    parse_int=_bounded_int,
    parse_float=_finite_float,
)
_SCAN: Final = make_scanner(_DECODER)  # type: ignore[arg-type]  # typeshed has the scanner where the decoder belongs


def _fast_encoder() -> Callable[[object], str]:
    """Return ``_ENCODER.encode`` without its set-up at each call, where this interpreter has the means."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _ENCODER.encode
    text = json.encoder.encode_basestring
    # Without a list of what is open, a value that contains itself ends as a RecursionError.
    encode = make(None, _ENCODER.default, text, None, ":", ",", True, False, False)
    return lambda value: "".join(encode(value, 0))


_ENCODE: Final = _fast_encoder()
