"""The last things that an attempt did: its calls with what came of them, kept in memory, told when it fails.

Called by the witness (adds each call, tells them at the end). Must never grow over MOST calls, nor hold arguments.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from runner.wire.times import iso

__all__ = ["MOST", "SHOWN", "Ring"]

#: Calls of one attempt that are kept, and those that its end takes along to the store.
MOST: Final = 200
SHOWN: Final = 20
_LONGEST: Final = 120


class Ring:
    """The newest calls of one attempt, the oldest first. ``clock``: Unix nanoseconds."""

    __slots__ = ("_calls", "_clock", "told")

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._calls: deque[tuple[int, str, str, str, float]] = deque(maxlen=MOST)
        self._clock = clock
        #: Whether the record holds them.
        self.told = False

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, op: str, resource: str, outcome: str, ms: float) -> None:
        """Note a call that was answered. ``outcome``: ``ok`` or the error's code; ``ms``: how long it took."""
        self._calls.append((self._clock() // 1_000_000, op, resource[:_LONGEST], outcome, ms))

    def last(self, most: int = SHOWN) -> tuple[str, ...]:
        """Return the newest calls, a line each."""
        chosen = list(self._calls)[-most:]
        return tuple(_line(*call) for call in chosen)


def _line(at_ms: int, op: str, resource: str, outcome: str, ms: float) -> str:
    return f"{iso(at_ms)} {op} {resource or '-'} {outcome} {ms:.1f} ms"
