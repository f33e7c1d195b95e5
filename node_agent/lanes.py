"""Which lanes this node serves, and in which order.

Called by the agent (refreshes) and the dispatcher (asks). Pure but for the rotation. Of very many lanes a
turn looks into a window, so that no number of names makes a turn dear: first the lane that just got work, then the next
window, then those that gave work last. Must never serve a lane whose requirements this node does not meet: the store's
word is checked again against the signed job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from runner.wire.spec import NEEDS_BROKER, priority_of

__all__ = ["WINDOW", "Lanes"]

#: Lanes that one turn looks into; and how many of those that gave work last it looks into besides.
WINDOW: Final = 256
RECENT: Final = 64


class Lanes:
    """Lanes by queue, labels, node and level; every call starts one lane further, so that none starves another.

    Lanes of other priorities than 0 are served together with the others of their queue (points.lua).
    """

    def __init__(self, node: str, queues: Iterable[str], labels: Mapping[str, str], level: str) -> None:
        self._node = node
        self._queues = frozenset(queues)
        self._labels = dict(labels)
        self._level = level
        self._names: frozenset[str] = frozenset()
        self._known: tuple[str, ...] = ()
        self._turn = 0
        #: With very many lanes: where in its round the next window begins, and the same for what is waited for.
        self._at = 0
        self._waits_at = 0
        self._left = 0
        self._recent: dict[str, None] = {}
        self._priorities = False
        #: The lane that got work just now, to be looked into first.
        self.woken: str | None = None
        #: The broker does not answer: jobs that need one are left to other nodes.
        self.broker_away = False
        #: Queues that an operator has suspended.
        self.suspended: frozenset[str] = frozenset()

    @property
    def known(self) -> tuple[str, ...]:
        """Every lane that is served now."""
        return self._known

    @property
    def open(self) -> tuple[str, ...]:
        """Every lane that is claimed from now."""
        return self._open(self._known)

    def _open(self, lanes: tuple[str, ...]) -> tuple[str, ...]:
        if self.suspended:
            lanes = tuple(lane for lane in lanes if lane.partition("@")[0] not in self.suspended)
        if self.broker_away:
            lanes = tuple(lane for lane in lanes if NEEDS_BROKER not in _needs(lane))
        return lanes

    def refresh(self, lanes: Iterable[str]) -> bool:
        """Take the names of all lanes; return whether the served ones changed."""
        names = frozenset(lanes)
        self._left = len(self._known)
        if names == self._names:
            return False
        self._names = names
        found = tuple(sorted(lane for lane in names if self.serves(lane)))
        changed = found != self._known
        self._priorities = any(priority_of(lane) for lane in found)
        self._known = found
        self._left = len(found)
        return changed

    @property
    def unseen(self) -> bool:
        """Whether lanes are left, of more than a window, that no turn has looked into since the last refresh."""
        return len(self._known) > WINDOW and self._left > 0

    def found(self, lanes: Iterable[str]) -> None:
        """Take the lanes that gave work: they may hold more, wherever the window is."""
        for lane in lanes:
            self._recent.pop(lane, None)
            self._recent[lane] = None
        while len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]

    def awaited(self) -> tuple[str, ...]:
        """Return the lanes whose wake-ups to wait for: those that gave work last, and another window each time.

        All others are looked into once a second.
        """
        if len(self._known) <= WINDOW:
            return self.open
        start = self._waits_at = (self._waits_at + WINDOW) % len(self._known)
        return self._with_recent((), (self._known + self._known[:WINDOW])[start : start + WINDOW])

    def order(self) -> tuple[str, ...]:
        """Return the lanes to claim from, first come first."""
        woken, self.woken = self.woken, None
        if len(self._known) > WINDOW:
            order = self._windowed(woken)
            return _by_queue(order) if self._priorities else order
        lanes = self.open
        if not lanes:
            return ()
        self._turn = (self._turn + 1) % len(lanes)
        order = lanes[self._turn :] + lanes[: self._turn]
        if woken in lanes:
            order = (woken, *(lane for lane in order if lane != woken))
        return _by_queue(order) if self._priorities else order

    def _windowed(self, woken: str | None) -> tuple[str, ...]:
        lanes, count = self._known, len(self._known)
        start = (self._turn + self._at) % count
        self._at += WINDOW
        self._left -= WINDOW
        if self._at >= count:
            # Each round begins one lane further, so that every lane is first in its window at times.
            self._at, self._turn = 0, (self._turn + 1) % count
        window = lanes[start : start + WINDOW] + lanes[: max(0, start + WINDOW - count)]
        first = (woken,) if woken is not None and self.serves(woken) else ()
        return self._with_recent(first, window)

    def _with_recent(self, first: tuple[str, ...], window: tuple[str, ...]) -> tuple[str, ...]:
        recent = (lane for lane in self._recent if self.serves(lane))
        return self._open(tuple(dict.fromkeys((*first, *window, *recent))))

    def serves(self, lane: str) -> bool:
        """Return whether this node meets what the lane's name requires, and so may sign for its jobs."""
        if priority_of(lane) is None:
            return False
        queue = lane.partition("@")[0]
        if "*" not in self._queues and queue not in self._queues:
            return False
        for need in _needs(lane):
            key, _, value = need.partition("=")
            if need == NEEDS_BROKER:
                # Whether there is one is asked before each start: a node without any refuses, with the reason.
                met = True
            elif key == "node":
                met = value == self._node
            elif key == "level":
                # A node of any level serves these lanes: it refuses, with the reason, what it can't enforce.
                met = value >= self._level or self._level == "none"
            elif key == "priority":
                met = True
            else:
                met = self._labels.get(key) == value
            if not met:
                return False
        return True


def _needs(lane: str) -> tuple[str, ...]:
    """Return what a lane's name requires."""
    return tuple(filter(None, lane.partition("@")[2].split(",")))


def _by_queue(lanes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lanes with those of one queue side by side, the queues in the order of their first lanes."""
    queues: dict[str, list[str]] = {}
    for lane in lanes:
        queues.setdefault(lane.partition("@")[0], []).append(lane)
    return tuple(lane for found in queues.values() for lane in found)
