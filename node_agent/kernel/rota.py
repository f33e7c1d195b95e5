"""Whose call is handled next: one at a time per attempt, all of them within a small share of the loop's time.

Called by channels (which have something to read) on the agent's one loop. Must never let an attempt's flood hold up
another attempt's call by more than one call of each, nor the loop by more than SLICE_S and one call (attack 41).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["SLICE_S", "Rota", "Turn"]

log = logging.getLogger(__name__)

#: Most of each turn of the loop that calls may take, in seconds.
SLICE_S: Final = 0.001


class Turn(Protocol):
    """Somebody who takes turns."""

    def step(self) -> bool:
        """Handle one thing; return whether there may be more."""


class Rota:
    """Takes turns among its members; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._line: deque[Turn] = deque()
        self._in: set[Turn] = set()
        self._window_s = self._spent_s = 0.0

    def join(self, turn: Turn) -> None:
        """Let ``turn`` have its step: at once while there is little to do, else in its place in the line."""
        if turn in self._in:
            return
        if self._line or not self._quiet():
            self._in.add(turn)
            self._line.append(turn)
            if len(self._line) == 1:
                asyncio.get_running_loop().call_soon(self._serve)
            return
        began_s = self._clock()
        # If there is more, the poll tells so again.
        self._stepped(turn)
        self._spent_s += self._clock() - began_s

    def leave(self, turn: Turn) -> None:
        """Take the place away; who has none is no error."""
        if turn in self._in:
            self._in.discard(turn)
            self._line.remove(turn)

    def _stepped(self, turn: Turn) -> bool:
        """One member's fault must not keep the others from their turns."""
        try:
            return turn.step()
        except Exception:
            log.exception("a call could not be handled")
            return False

    def _quiet(self) -> bool:
        """Whether less than half of the last moments went into calls."""
        now_s = self._clock()
        if now_s - self._window_s > 2 * SLICE_S:
            self._window_s, self._spent_s = now_s, 0.0
        return self._spent_s < SLICE_S

    def _serve(self) -> None:
        until_s = self._clock() + SLICE_S
        line = self._line
        while line:
            turn = line.popleft()
            self._in.discard(turn)
            if self._stepped(turn) and turn not in self._in:
                self._in.add(turn)
                line.append(turn)
            if self._clock() >= until_s:
                break
        if line:
            asyncio.get_running_loop().call_soon(self._serve)
