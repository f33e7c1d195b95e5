"""A token bucket: how often something may happen.

Called by channels and by the job's own stream of events. Must never wait: who finds it empty is told for how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Bucket"]


class Bucket:
    """``burst`` at once, ``per_s`` in the long run; ``clock`` gives seconds."""

    __slots__ = ("_burst", "_clock", "_left", "_per_s", "_seen_s")

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left, self._seen_s = burst, clock()

    def take(self, count: float = 1.0) -> bool:
        """Take so many, if there are as many."""
        now_s = self._clock()
        self._left = min(self._burst, self._left + max(0.0, now_s - self._seen_s) * self._per_s)
        self._seen_s = now_s
        if self._left < count:
            return False
        self._left -= count
        return True

    def has(self, count: float) -> bool:
        """Return whether there are so many."""
        return self.take(0.0) and self._left >= count

    def charge(self, count: float) -> None:
        """Take more, whether it is there or not: what something has cost is known only afterwards."""
        self._left -= count

    def wait_s(self, count: float = 20.0) -> float:
        """Return in how many seconds there will be ``count`` (at most the burst)."""
        return max(0.0, min(count, self._burst) - self._left) / self._per_s
