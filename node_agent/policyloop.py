"""What a node takes for a loop, as its policy file says: the `[loop]` table.

Called by policy (reads it) and the kernel's loop detection. Pure. Must never guess: an unknown key refuses to load.

    [loop]                      # a job that does the same again and again; every key is optional
    in_row = 10                 # so many equal tool calls or proxied requests, one after the other; 0: never
    in_window = 30              # so many equal tool calls within window_s, whatever lies between; 0: never
    window_s = 300.0
    action = "freeze"           # freeze: it stands still until an operator decides; kill; tell: its processes alone
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal, cast

from node_agent.errors import PolicyError

__all__ = ["LoopRule", "parse_loop"]

_ACTIONS: Final = ("freeze", "kill", "tell")
_MOST: Final = 10_000
_MOST_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class LoopRule:
    """When LOOP is sent, and what it does."""

    in_row: int = 10
    in_window: int = 30
    window_s: float = 300.0
    action: Literal["freeze", "kill", "tell"] = "freeze"


def parse_loop(entry: object) -> LoopRule:
    """Return the rule of a `[loop]` table. Raises PolicyError."""
    if not isinstance(entry, dict):
        raise PolicyError("[loop] must be a table")
    known = {field.name for field in fields(LoopRule)}
    values: dict[str, object] = {}
    for key, value in entry.items():
        if key not in known:
            raise PolicyError(f"unknown key {key!r} in [loop]")
        values[key] = _value(key, value)
    return LoopRule(**values)  # type: ignore[arg-type]  # _value checked each by its key


def _value(key: str, value: object) -> object:
    if key == "action":
        if value not in _ACTIONS:
            raise PolicyError(f"[loop]: action is one of {', '.join(_ACTIONS)}")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "window_s":
        if not number or not 0 < cast("float", value) <= _MOST_S:
            raise PolicyError(f"[loop]: window_s is more than 0 and at most {_MOST_S:g} seconds")
        return float(cast("float", value))
    if not number or not isinstance(value, int) or not (value == 0 or 2 <= value <= _MOST):
        raise PolicyError(f"[loop]: {key} is 2 to {_MOST}, or 0 for never")
    return value
