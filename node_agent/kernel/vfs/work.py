"""How long the agent works on one volume: a share of its time, so that no job has its loop for itself.

Called by the volumes. Must never wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Work"]


class Work:
    """Time that the agent spends on one volume: ``share`` of each second, ``burst`` seconds at once."""

    def __init__(self, share: float, burst: float, clock: Callable[[], float]) -> None:
        self._share, self._burst, self._clock = share, burst, clock
        self._left_s, self._seen_s = burst, clock()
        self._began_s = 0.0

    def allowed(self) -> bool:
        """Whether there is time left."""
        now_s = self._clock()
        self._left_s = min(self._burst, self._left_s + (now_s - self._seen_s) * self._share)
        self._seen_s = now_s
        return self._left_s > 0

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._left_s -= time.perf_counter() - self._began_s
