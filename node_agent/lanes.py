"""Which lanes this node serves, and in which order.

Called by the agent (refreshes) and the dispatcher (asks). Pure but for the rotation. Must never serve a lane whose
requirements this node does not meet: the store's word is checked again against the signed job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Lanes"]


class Lanes:
    """Lanes by queue, labels, node and level; every call starts one lane further, so that none starves another."""

    def __init__(self, node: str, queues: Iterable[str], labels: Mapping[str, str], level: str) -> None:
        self._node = node
        self._queues = frozenset(queues)
        self._labels = dict(labels)
        self._level = level
        self._known: tuple[str, ...] = ()
        self._turn = 0

    @property
    def known(self) -> tuple[str, ...]:
        """Every lane that is served now."""
        return self._known

    def refresh(self, lanes: Iterable[str]) -> bool:
        """Take the names of all lanes; return whether the served ones changed."""
        found = tuple(sorted(lane for lane in lanes if self.serves(lane)))
        changed = found != self._known
        self._known = found
        return changed

    def order(self) -> tuple[str, ...]:
        """Return the lanes to claim from, first come first."""
        if not self._known:
            return ()
        self._turn = (self._turn + 1) % len(self._known)
        return self._known[self._turn :] + self._known[: self._turn]

    def serves(self, lane: str) -> bool:
        """Return whether this node meets what the lane's name requires, and so may sign for its jobs."""
        queue, _, needs = lane.partition("@")
        if "*" not in self._queues and queue not in self._queues:
            return False
        for need in filter(None, needs.split(",")):
            key, _, value = need.partition("=")
            if key == "node":
                met = value == self._node
            elif key == "level":
                # A node of any level serves these lanes: it refuses, with the reason, what it can't enforce.
                met = value >= self._level or self._level == "none"
            else:
                met = self._labels.get(key) == value
            if not met:
                return False
        return True
