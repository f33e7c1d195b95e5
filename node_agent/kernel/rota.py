"""Whose call is handled next: one at a time per attempt, all of them within a small share of the loop's time.

Called by channels (which have something to read) on the agent's one loop. Must never let an attempt's flood hold up
another attempt's call by more than one call of each, the loop by more than SLICE_S and one call, nor all of them
together a kill: after a slice the loop belongs to others for as long as the slice and the calls that went on meanwhile
took (attack 41).
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
#: Longest time between two slices, in seconds.
MOST_REST_S: Final = 0.1


class Turn(Protocol):
    """Somebody who takes turns."""

    @property
    def light(self) -> bool:
        """Whether it has taken little of late: then it need not wait while the costly ones rest."""

    def step(self) -> bool:
        """Handle one thing; return whether there may be more."""


class Rota:
    """Takes turns among its members; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._line: deque[Turn] = deque()
        self._in: set[Turn] = set()
        self._window_s = self._spent_s = 0.0
        #: When the next slice may begin, and whether it is planned.
        self._rested_s = 0.0
        self._due = False

    def join(self, turn: Turn) -> None:
        """Let ``turn`` have its step: at once while there is little to do, else in its place in the line."""
        if turn in self._in:
            return
        if not self._quiet() or not (turn.light or self._idle()):
            self._in.add(turn)
            self._line.append(turn)
            self._serve_soon()
            return
        began_s = self._clock()
        # If there is more, the poll tells so again.
        self._stepped(turn)
        took_s = self._clock() - began_s
        self._spent_s += took_s
        if took_s > SLICE_S:
            self._rest(took_s)

    def worked(self, took_s: float) -> None:
        """A call that waited went on, outside of any slice."""
        self._spent_s += took_s
        self._rest(took_s)

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

    def _idle(self) -> bool:
        return not self._line and self._rested_s - self._clock() < SLICE_S

    def _rest(self, took_s: float) -> None:
        """The loop belongs to others for as long, when there is so much of it that a timer can tell."""
        now_s = self._clock()
        self._rested_s = min(max(self._rested_s, now_s) + took_s, now_s + MOST_REST_S)

    def _serve_soon(self) -> None:
        if self._due:
            return
        self._due = True
        loop, rest_s = asyncio.get_running_loop(), self._rested_s - self._clock()
        if rest_s > SLICE_S / 2:
            loop.call_later(rest_s, self._serve)
        else:
            loop.call_soon(self._serve)

    def _serve(self) -> None:
        self._due = False
        began_s = self._clock()
        until_s = began_s + SLICE_S
        line = self._line
        while line:
            turn = line.popleft()
            self._in.discard(turn)
            if self._stepped(turn) and turn not in self._in:
                self._in.add(turn)
                line.append(turn)
            if self._clock() >= until_s:
                break
        self._rest(self._clock() - began_s)
        if line:
            self._serve_soon()
