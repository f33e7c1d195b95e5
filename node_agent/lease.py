"""How long this boot may run jobs, by the host's own clock that also counts suspension.

Called by the heartbeat (extends), the supervisor (asks before a release) and the slots (told of each deadline). Must
never be extended from anything but a renewal that the store confirmed, and never past what others wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

__all__ = ["Lease", "boottime_ns"]


#: The margin is at least this many times the worst delay of a wake-up that was seen.
LATE_FACTOR = 10
#: What is left of a delay at the next wake-up.
FADE = 0.98


class Holder(Protocol):
    """A slot's lifeline."""

    def renew(self, deadline_ns: int) -> None:
        """Take the newest deadline (CLOCK_BOOTTIME)."""


def boottime_ns() -> int:
    """Return CLOCK_BOOTTIME in nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Lease:
    """The deadline that every lifeline carries: lease minus margin after the last confirmed renewal was *sent*."""

    def __init__(
        self, holders: Iterable[Holder], lease_s: float, margin_s: float, clock: Callable[[], int] = boottime_ns
    ) -> None:
        self._holders = tuple(holders)
        self._lease_ns = int(lease_s * 1e9)
        self._least_ns = self._margin_ns = int(margin_s * 1e9)
        self._worst_s = 0.0
        self._clock = clock
        self._deadline_ns = 0
        self._gaps = 0

    def now(self) -> int:
        """Read the clock; take it before a renewal is sent."""
        return self._clock()

    def extend(self, sent_ns: int) -> None:
        """The store confirmed the renewal that was sent at ``sent_ns``."""
        if self.lapsed():
            self._gaps += 1
        self._deadline_ns = max(self._deadline_ns, sent_ns + self._lease_ns - self._margin_ns)
        for holder in self._holders:
            holder.renew(self._deadline_ns)

    def late(self, delay_s: float) -> None:
        """A wake-up came so late: a mould may see its deadline as late, so the margin grows with the worst (attack 35).

        Up to half the lease, so that one lost renewal ends no job; what lies far back counts less and less.
        """
        self._worst_s = max(delay_s, FADE * self._worst_s)
        self._margin_ns = max(self._least_ns, min(int(LATE_FACTOR * self._worst_s * 1e9), self._lease_ns // 2))

    def lapsed(self) -> bool:
        """Whether jobs must be gone by now."""
        return self._clock() >= self._deadline_ns

    def era(self) -> int:
        """Return -1 while jobs must be gone, else a number that is another one after each such gap.

        A job that sees two numbers lost its mould to the lease, even if nobody took the lease over (attack 36).
        """
        return -1 if self.lapsed() else self._gaps
