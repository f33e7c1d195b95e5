"""What agent and egress process say to each other: records on a socket that keeps their bounds.

Called by both sides. Must never carry a name of a job's own making but the attempt's.

    agent → egress   {"op": "hello"} · {"op": "check", "id", …rules} · {"op": "open", "id", "attempt", …rules} +
                     listener, mould's pidfd · the same with "seed" (hex), "made_at" + one end of a line to the broker,
                     for an attempt with proxied secrets · {"op": "close", "id", "attempt"}
    egress → agent   {"op": "hello", …state} · {"id", "refused"} · {"id", "usage"} ·
                     {"op": "denied", "attempt", "host", "port", "why"} · {"op": "metered", "attempt", "model",
                     "requests", "tokens_in", "tokens_out", "unknown", "unknown_bytes", "same", "unknown_sent_bytes"},
                     since the last such record
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from broker.egress.certs import SEED_BYTES, Authority
from broker.egress.errors import BadRequestError
from broker.egress.rules import Destination, Route, Rules, canonical
from runner.wire.codec import Json

__all__ = ["MAX_RECORD_BYTES", "MAX_RULES", "dump_authority", "dump_rules", "load_authority", "load_rules"]

MAX_RECORD_BYTES: Final = 64 * 1024
#: Most destinations in one list.
MAX_RULES: Final = 256
_ROUTE: Final = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,270}")
_LISTS: Final = ("granted", "named", "never", "keyed")


def dump_rules(rules: Rules) -> dict[str, Json]:
    """Return the rules of one attempt as part of a record."""
    routes: list[Json] = [[one.name, one.to.host, one.to.port, one.secure] for one in rules.routes]
    return {**{name: _pairs(getattr(rules, name)) for name in _LISTS}, "routes": routes}


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
    routes = record.get("routes")
    if not isinstance(routes, list) or len(routes) > MAX_RULES:
        raise BadRequestError("no routes")
    return Rules(**found, routes=tuple(map(_route, routes)))


def dump_authority(authority: Authority) -> dict[str, Json]:
    """Return what one attempt's job trusts, as part of a record."""
    return {"seed": authority.seed.hex(), "made_at": authority.made_at}


def load_authority(record: dict[str, Json]) -> Authority:
    """Return the authority in a record. Raises BadRequestError."""
    seed, made_at = record.get("seed"), record.get("made_at")
    if not isinstance(seed, str) or not isinstance(made_at, int) or len(seed) != 2 * SEED_BYTES:
        raise BadRequestError("no seed")
    try:
        return Authority(bytes.fromhex(seed), made_at)
    except ValueError:
        raise BadRequestError("no seed") from None


def _pairs(destinations: Iterable[Destination]) -> list[Json]:
    return [[each.host, each.port] for each in sorted(destinations, key=lambda each: (each.host, each.port))]


def _route(entry: Json) -> Route:
    if not isinstance(entry, list) or len(entry) != 4:
        raise BadRequestError("no route")
    name, *pair, secure = entry
    if not isinstance(name, str) or not _ROUTE.fullmatch(name) or not isinstance(secure, bool):
        raise BadRequestError("no route")
    return Route(name, _destination(pair), secure)


def _destination(pair: Json) -> Destination:
    if not isinstance(pair, list) or len(pair) != 2:
        raise BadRequestError("no destination")
    host, port = pair
    if not isinstance(host, str) or type(port) is not int:
        raise BadRequestError("no destination")
    return canonical(host, port)
