"""One line of a flight record, made of whatever its caller passes: plain JSON, never too long, never a fault.

Called by the recorder. Pure. Must never raise for a value, and never let a field take the place of one of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Final

from runner.wire import flight

__all__ = ["Field", "body", "veiled"]

Field = str | int | float | bool | None
#: Longest text of a field; where a line gets too long for all that, of each.
_LONGEST: Final = 512
_SHORTEST: Final = 60
_MOST_INT: Final = 2**63
_OWN: Final = frozenset({"n", "at_ms", "kind", "attempt"})
_quote = json.encoder.encode_basestring_ascii


def veiled(text: str) -> str:
    """Return what tells whether two texts are the same, and how long they are."""
    return f"sha256 {hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}, {len(text)} characters"


def body(number: int, at_ms: int, kind: str, attempt: str, fields: Mapping[str, Field]) -> bytes:
    """Return a line's JSON; total: whatever is no plain value becomes one, whatever is too long is cut."""
    made = _encoded(number, at_ms, kind, attempt, fields, _LONGEST)
    if len(made) > flight.MAX_LINE_BYTES - 64:
        made = _encoded(number, at_ms, kind, attempt, {name: fields[name] for name in [*fields][:24]}, _SHORTEST)
    return made


def _encoded(number: int, at_ms: int, kind: str, attempt: str, fields: Mapping[str, Field], longest: int) -> bytes:
    parts = [f'{{"n":{number},"at_ms":{at_ms},"kind":{_quote(kind)},"attempt":{_quote(attempt)}']
    plain = longest == _LONGEST
    for name, value in fields.items():
        # The usual values first: a node writes two lines a job.
        if plain and type(value) is str and len(value) <= _SHORTEST:
            text = _quote(value)
        elif type(value) is int and -_MOST_INT < value < _MOST_INT:
            text = str(value)
        else:
            text = _value(value, longest)
        parts.append(f",{_quote(f'{name}_' if name in _OWN else name)}:{text}")
    parts.append("}")
    return "".join(parts).encode("ascii")


def _value(value: object, longest: int) -> str:
    if isinstance(value, str):
        if len(value) > longest:
            value = f"{value[:longest]}…"
        if longest == _SHORTEST and not (value.isascii() and value.isprintable()):
            value = "".join(sign if " " <= sign <= "~" else "?" for sign in value)
        return _quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value) if -_MOST_INT < value < _MOST_INT else '"a number out of range"'
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "null"
    return _quote(f"<{type(value).__name__}>")
