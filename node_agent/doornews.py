"""What the egress process says of an attempt's door on its own account. Values, and how a record becomes one.

Made by egress.py, taken by the session and by budgets. Must never hold more than names, numbers and short texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from runner.wire.codec import Json

__all__ = ["Denied", "Metered", "denied_of", "metered_of"]

_MAX_HOST: Final = 253
_MAX_WHY: Final = 200
_MAX_MODEL: Final = 128
_COUNTS: Final = ("requests", "tokens_in", "tokens_out", "unknown", "unknown_bytes", "same", "unknown_sent_bytes")


@dataclass(frozen=True, slots=True)
class Denied:
    """A destination that a job asked for and did not get."""

    attempt: str
    host: str
    port: int
    why: str


@dataclass(frozen=True, slots=True)
class Metered:
    """What an attempt used since it was told last, with one model ("": none was named).

    ``unknown``: answers of models that did not say their tokens, ``unknown_bytes`` in all; ``unknown_sent_bytes``: what
    went into those that did not even say that. ``same``: so many equal requests to models came in a row. It comes with
    the end of an answer, at most ten times a second for each attempt and, after the attempt's end, once more.
    """

    attempt: str
    model: str
    requests: int
    tokens_in: int
    tokens_out: int
    unknown: int
    unknown_bytes: int
    same: int = 0
    unknown_sent_bytes: int = 0


def denied_of(record: Mapping[str, Json]) -> Denied | None:
    """Return the refusal in a record, if it is one."""
    port = record.get("port")
    if record.get("op") != "denied" or not isinstance(port, int):
        return None
    host, why = str(record.get("host"))[:_MAX_HOST], str(record.get("why"))[:_MAX_WHY]
    return Denied(str(record.get("attempt")), host, port, why)


def metered_of(record: Mapping[str, Json]) -> Metered | None:
    """Return the counts in a record, if it is one of them."""
    if record.get("op") != "metered":
        return None
    counts = {name: value for name in _COUNTS if type(value := record.get(name)) is int and value >= 0}
    if len(counts) != len(_COUNTS):
        return None
    return Metered(str(record.get("attempt")), str(record.get("model"))[:_MAX_MODEL], **counts)
