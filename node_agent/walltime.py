"""The wall-time limit of one attempt: a clock that stands still while the job is paused.

Made by the supervisor, paused by pausing. Must never let a pause outlast the time until which the job was signed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["WallTime"]


class WallTime:
    """Calls ``on_limit`` once ``limit_s`` seconds have passed that were not paused."""

    def __init__(self, limit_s: float, on_limit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._left_s = limit_s
        self._on_limit = on_limit
        self._since_s = self._loop.time()
        self._timer = self._loop.call_later(limit_s, on_limit)
        self._paused = False

    def pause(self, longest_s: float, on_late: Callable[[], None]) -> None:
        """Stop the clock; ``on_late`` is called if nobody starts it again within ``longest_s``. Idempotent."""
        if self._paused:
            return
        self._paused = True
        self._timer.cancel()
        self._left_s -= self._loop.time() - self._since_s
        self._timer = self._loop.call_later(max(0.0, longest_s), on_late)

    def resume(self) -> None:
        """Start the clock again where it stood. Idempotent."""
        if not self._paused:
            return
        self._paused = False
        self._timer.cancel()
        self._since_s = self._loop.time()
        self._timer = self._loop.call_later(max(0.0, self._left_s), self._on_limit)

    def cancel(self) -> None:
        """The attempt is over."""
        self._timer.cancel()
