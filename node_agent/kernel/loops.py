"""Loop detection: a job that does the same again and again is told, frozen or killed (signal LOOP).

Called by tool calls (K2's toolrun) and the egress line, each with what a call looks like. Must never keep more of a job
than digests, nor take work that changes a little each time for a loop: only equal things count.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from node_agent.policyloop import LoopRule
from node_agent.run import Run
from runner.wire import ids

__all__ = ["Loops"]

#: Calls of an attempt that are remembered for the window.
_MOST: Final = 1024
#: Attempts that are remembered; who is over is forgotten first.
_MOST_ATTEMPTS: Final = 4096


@dataclass(slots=True)
class _Trail:
    """What one attempt did lately. ``recent``: (when, digest of what)."""

    last: bytes = b""
    row: int = 0
    #: Of the row that somebody else counts: where it was acted on.
    acted: int = 0
    recent: deque[tuple[float, bytes]] = field(default_factory=lambda: deque(maxlen=_MOST))


class Loops:
    """Loops of one boot's jobs. ``found`` carries out what the rule says; ``clock`` gives seconds."""

    def __init__(
        self,
        rule: LoopRule,
        found: Callable[[Run, str], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rule, self._found, self._clock = rule, found, clock
        self._trails: dict[str, _Trail] = {}

    async def seen(self, run: Run, what: str, shape: bytes) -> None:
        """An attempt is about to do something; returns once a loop was acted on. ``what``: its name, for people."""
        rule, now_s = self._rule, self._clock()
        trail = self._trail(run)
        digest = hashlib.sha256(what.encode() + b"\0" + shape).digest()
        trail.row = trail.row + 1 if digest == trail.last else 1
        trail.last = digest
        trail.recent.append((now_s, digest))
        while trail.recent and trail.recent[0][0] <= now_s - rule.window_s:
            trail.recent.popleft()
        why = self._why(trail, what, digest)
        if why:
            # Counted anew: whoever lets the job go on lets it have as much rope again.
            trail.row = 0
            trail.recent.clear()
            await self._found(run, why)

    def counted(self, run: Run, what: str, count: int) -> Awaitable[None] | None:
        """Somebody else counts equal things in a row, ``count`` by now (0: the last one was not as the one before).

        Return what is to be awaited, if that is a loop.
        """
        if not count:
            # It may be of another request, between equal ones: a row that ends is seen by the next one's count.
            return None
        trail = self._trail(run)
        if count < trail.acted:
            trail.acted = 0
        if not self._rule.in_row or count - trail.acted < self._rule.in_row:
            return None
        trail.acted = count
        return self._found(run, f"{count} equal {what} in a row")

    def ended(self, attempt: str) -> None:
        """An attempt is over."""
        self._trails.pop(attempt, None)

    def _why(self, trail: _Trail, what: str, digest: bytes) -> str:
        rule = self._rule
        if rule.in_row and trail.row >= rule.in_row:
            return f"{trail.row} equal calls of {what} in a row"
        if rule.in_window:
            count = sum(one == digest for _, one in trail.recent)
            if count >= rule.in_window:
                return f"{count} equal calls of {what} in {rule.window_s:g} s"
        return ""

    def _trail(self, run: Run) -> _Trail:
        attempt = ids.attempt_name(run.job_id, run.attempt)
        trail = self._trails.get(attempt)
        if trail is None:
            while len(self._trails) >= _MOST_ATTEMPTS:
                del self._trails[next(iter(self._trails))]
            trail = self._trails[attempt] = _Trail()
        return trail
