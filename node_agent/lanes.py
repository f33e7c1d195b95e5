"""Which lanes this node serves, and in which order.

Called by the agent (refreshes) and the dispatcher (asks). Pure but for the rotation. Must never serve a lane whose
requirements this node does not meet: the store's word is checked again against the signed job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from runner.wire.spec import NEEDS_BROKER, priority_of

__all__ = ["Lanes"]


class Lanes:
    """Lanes by queue, labels, node and level; every call starts one lane further, so that none starves another.

    Lanes of other priorities than 0 are served together with the others of their queue (points.lua).
    """

    def __init__(self, node: str, queues: Iterable[str], labels: Mapping[str, str], level: str) -> None:
        self._node = node
        self._queues = frozenset(queues)
        self._labels = dict(labels)
        self._level = level
        self._known: tuple[str, ...] = ()
        self._turn = 0
        self._priorities = False
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
        lanes = self._known
        if self.suspended:
            lanes = tuple(lane for lane in lanes if lane.partition("@")[0] not in self.suspended)
        if self.broker_away:
            lanes = tuple(lane for lane in lanes if NEEDS_BROKER not in _needs(lane))
        return lanes

    def refresh(self, lanes: Iterable[str]) -> bool:
        """Take the names of all lanes; return whether the served ones changed."""
        found = tuple(sorted(lane for lane in lanes if self.serves(lane)))
        changed = found != self._known
        self._priorities = any(priority_of(lane) for lane in found)
        self._known = found
        return changed

    def order(self) -> tuple[str, ...]:
        """Return the lanes to claim from, first come first."""
        lanes = self.open
        if not lanes:
            return ()
        self._turn = (self._turn + 1) % len(lanes)
        order = lanes[self._turn :] + lanes[: self._turn]
        return _by_queue(order) if self._priorities else order

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
