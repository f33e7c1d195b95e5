"""What agent and egress process say to each other: records on a socket that keeps their bounds.

Called by both sides. Must never carry a name of a job's own making but the attempt's.

    agent → egress   {"op": "hello"} · {"op": "check", "id", …rules} · {"op": "open", "id", "attempt", …rules} +
                     listener, mould's pidfd · {"op": "close", "id", "attempt"}
    egress → agent   {"op": "hello", …state} · {"id", "refused"} · {"id", "usage"} ·
                     {"op": "denied", "attempt", "host", "port", "why"}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from broker.egress.errors import BadRequestError
from broker.egress.rules import Destination, Rules, canonical
from runner.wire.codec import Json

__all__ = ["MAX_RECORD_BYTES", "MAX_RULES", "dump_rules", "load_rules"]

MAX_RECORD_BYTES: Final = 64 * 1024
#: Most destinations in one list.
MAX_RULES: Final = 256
_LISTS: Final = ("granted", "named", "never")


def dump_rules(rules: Rules) -> dict[str, Json]:
    """Return the rules of one attempt as part of a record."""
    return {name: _pairs(getattr(rules, name)) for name in _LISTS}


def load_rules(record: dict[str, Json]) -> Rules:
    """Return the rules in a record.

    Raises:
        BadRequestError: a list is missing, too long, or holds no destination.
    """
    found = {}
    for name in _LISTS:
        pairs = record.get(name)
        if not isinstance(pairs, list) or len(pairs) > MAX_RULES:
            raise BadRequestError("no rules")
        found[name] = frozenset(_destination(pair) for pair in pairs)
    return Rules(**found)


def _pairs(destinations: Iterable[Destination]) -> list[Json]:
    return [[each.host, each.port] for each in sorted(destinations, key=lambda each: (each.host, each.port))]


def _destination(pair: Json) -> Destination:
    if not isinstance(pair, list) or len(pair) != 2:
        raise BadRequestError("no destination")
    host, port = pair
    if not isinstance(host, str) or type(port) is not int:
        raise BadRequestError("no destination")
    return canonical(host, port)
