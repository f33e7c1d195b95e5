"""A rate by waiting: so many turns at once, then so many a second.

Called by approvals and quotas, with one for each attempt. Must never be waited for by what another job needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    """``per_s`` turns a second, after ``burst`` at once."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] | None = None) -> None:
        self._step_s, self._ahead_s = 1 / per_s, burst / per_s
        self._clock = clock or asyncio.get_running_loop().time
        self._next_s = 0.0

    async def turn(self) -> None:
        """Return when it is this caller's turn."""
        now_s = self._clock()
        self._next_s = max(self._next_s, now_s - self._ahead_s) + self._step_s
        if self._next_s > now_s:
            await asyncio.sleep(self._next_s - now_s)
