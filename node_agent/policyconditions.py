"""Conditions of a policy rule: what must be true of a job and its call, as total functions.

Called by policycalls. Pure. Must never raise on what a job sent, and never take a missing attribute or a value of
another type for an answer: that is Unknown, and an unknown condition denies.

    when = [                                                        # all of them (AND)
        { attribute = "tags.team", op = "eq", value = "acme" },
        { any = [                                                   # one of them (OR); `all` = AND inside of it
            { attribute = "args.env", op = "in", value = ["dev", "test"] },
            { attribute = "args.count", op = "lte", value = 10 },
        ] },
    ]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from node_agent.errors import PolicyError

__all__ = ["AllOf", "AnyOf", "Compare", "Condition", "Unknown", "holds", "parse_all"]

Value = str | int | float | bool
Op = Literal["eq", "ne", "gt", "lt", "gte", "lte", "in", "not_in", "contains"]

#: What a condition may look at. ``args``: the call's own fields, such as a tool's arguments.
ROOTS: Final = frozenset(
    {"tenant", "queue", "task", "command", "key", "node", "group", "priority", "attempt", "action", "resource"}
)
TABLES: Final = frozenset({"tags", "labels", "args"})
_OPS: Final = frozenset({"eq", "ne", "gt", "lt", "gte", "lte", "in", "not_in", "contains"})
_MAX_TESTS: Final = 64
_MAX_DEPTH: Final = 8
_MAX_STEPS: Final = 8
#: A longer list is not looked through: nothing takes long on the agent's loop (attack 41).
_MAX_ITEMS: Final = 1000
_KEYS: Final = {"attribute", "op", "value"}


@dataclass(frozen=True, slots=True)
class Compare:
    """One comparison of an attribute, such as ``tags.team``, with the policy's own value."""

    attribute: str
    op: Op
    value: Value | tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every one must hold. None of them: holds."""

    parts: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of them must hold."""

    parts: tuple[Condition, ...]


Condition = Compare | AllOf | AnyOf


@dataclass(frozen=True, slots=True)
class Unknown:
    """Neither true nor false: ``why`` names the attribute, never its value."""

    why: str


def holds(condition: Condition, facts: Mapping[str, object]) -> bool | Unknown:
    """Return whether a condition holds, or why that can't be said. Never raises, whatever ``facts`` are.

    What decides alone decides: an Unknown beside a false part of AllOf, or a true part of AnyOf, changes nothing, in
    whichever order they stand (Source: Kleene's strong logic of three values).
    """
    if isinstance(condition, Compare):
        return _tested(condition, facts)
    decisive = isinstance(condition, AnyOf)
    unknown: Unknown | None = None
    for part in condition.parts:
        found = holds(part, facts)
        if isinstance(found, Unknown):
            unknown = unknown or found
        elif found is decisive:
            return decisive
    return unknown if unknown is not None else not decisive


def parse_all(where: str, entries: object) -> AllOf:
    """Return the conditions of a list of tables. Raises PolicyError for anything not understood."""
    return AllOf(_parsed_list(where, entries, 0, [0]))


def _parsed_list(where: str, entries: object, depth: int, count: list[int]) -> tuple[Condition, ...]:
    if not isinstance(entries, list) or depth > _MAX_DEPTH:
        raise PolicyError(f"{where} is a list of tables, nested at most {_MAX_DEPTH} deep")
    return tuple(_parsed(where, entry, depth, count) for entry in entries)


def _parsed(where: str, entry: object, depth: int, count: list[int]) -> Condition:
    count[0] += 1
    if count[0] > _MAX_TESTS:
        raise PolicyError(f"{where} has at most {_MAX_TESTS} conditions")
    if isinstance(entry, dict) and len(entry) == 1 and next(iter(entry)) in ("any", "all"):
        name, inner = next(iter(entry.items()))
        parts = _parsed_list(f"{where}.{name}", inner, depth + 1, count)
        if not parts:
            raise PolicyError(f"{where}.{name} must hold a condition")
        return AnyOf(parts) if name == "any" else AllOf(parts)
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise PolicyError(f"{where}: a condition is {{attribute, op, value}}, {{any = […]}} or {{all = […]}}")
    return _parsed_compare(where, entry["attribute"], entry["op"], entry["value"])


def _parsed_compare(where: str, attribute: object, op: object, value: object) -> Compare:
    if not isinstance(attribute, str) or not _is_attribute(attribute):
        known = ", ".join([*sorted(ROOTS), *(f"{name}.NAME" for name in sorted(TABLES))])
        raise PolicyError(f"{where}: no attribute {attribute!r}; there are {known}")
    if not isinstance(op, str) or op not in _OPS:
        raise PolicyError(f"{where}: no op {op!r}; there are {', '.join(sorted(_OPS))}")
    if op in ("in", "not_in"):
        if not isinstance(value, list) or not value or not all(map(_is_plain, value)):
            raise PolicyError(f"{where}: {op} takes a list of texts, numbers or booleans")
        return Compare(attribute, op, tuple(value))  # type: ignore[arg-type]  # one of _OPS
    if not _is_plain(value):
        raise PolicyError(f"{where}: {op} takes one text, number or boolean")
    if op in ("gt", "lt", "gte", "lte") and not _is_number(value):
        raise PolicyError(f"{where}: {op} compares numbers")
    return Compare(attribute, op, value)  # type: ignore[arg-type]  # as above


def _is_attribute(text: str) -> bool:
    root, *rest = text.split(".")
    if not rest:
        return root in ROOTS
    return root in TABLES and len(rest) <= _MAX_STEPS and all(rest)


def _tested(test: Compare, facts: Mapping[str, object]) -> bool | Unknown:
    value = _found(test.attribute, facts)
    if value is None:
        return Unknown(f"there is no {test.attribute}")
    found = _BY_OP[test.op](value, test.value)
    return Unknown(f"{test.attribute} is of another type than the rule compares it with") if found is None else found


def _found(attribute: str, facts: Mapping[str, object]) -> object | None:
    """Return what an attribute names. A tag's name may have dots in it: the longest name that there is counts."""
    root, _, rest = attribute.partition(".")
    value = facts.get(root)
    if not rest:
        return value
    while rest:
        if not isinstance(value, Mapping):
            return None
        found: object = value.get(rest)
        if found is not None:
            return found
        head, _, rest = rest.partition(".")
        value = value.get(head)
    return None


def _kind(value: object) -> type[object] | None:
    """The types that compare with each other: a boolean is no number, and a number without an order is none."""
    if isinstance(value, bool):
        return bool
    if _is_number(value):
        return float
    return str if isinstance(value, str) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not _is_odd(value)


def _is_odd(value: int | float) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_plain(value: object) -> bool:
    return _kind(value) is not None


def _equal(value: object, wanted: object) -> bool | None:
    kind = _kind(value)
    return None if kind is None or kind is not _kind(wanted) else value == wanted


def _among(value: object, wanted: object) -> bool | None:
    found = [_equal(value, one) for one in wanted] if isinstance(wanted, tuple) else []
    if all(one is None for one in found):
        return None
    return any(found)


def _contains(value: object, wanted: object) -> bool | None:
    if isinstance(value, str) and isinstance(wanted, str):
        return wanted in value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) > _MAX_ITEMS:
        return None
    found = [_equal(one, wanted) for one in value]
    return None if found and all(one is None for one in found) else any(found)


def _not(test: Callable[[object, object], bool | None]) -> Callable[[object, object], bool | None]:
    def tested(value: object, wanted: object) -> bool | None:
        found = test(value, wanted)
        return None if found is None else not found

    return tested


def _ordered(test: Callable[[float, float], bool]) -> Callable[[object, object], bool | None]:
    def tested(value: object, wanted: object) -> bool | None:
        if not _is_number(value) or not _is_number(wanted):
            return None
        return test(value, wanted)  # type: ignore[arg-type]  # _is_number says so

    return tested


_BY_OP: Final[Mapping[str, Callable[[object, object], bool | None]]] = {
    "eq": _equal,
    "ne": _not(_equal),
    "in": _among,
    "not_in": _not(_among),
    "contains": _contains,
    "gt": _ordered(lambda value, wanted: value > wanted),
    "lt": _ordered(lambda value, wanted: value < wanted),
    "gte": _ordered(lambda value, wanted: value >= wanted),
    "lte": _ordered(lambda value, wanted: value <= wanted),
}
