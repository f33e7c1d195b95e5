"""Plans that come again: all that a worker does for one is made by its mould, once, and found by every later worker.

Called by the agent's handle on a mould (``Taught``), by the mould (worker.learn fills ``Outfit.known``) and by the
worker (looks a plan up). Must never answer for another plan: the key is every byte of the record and the number of each
descriptor that came with it. Must never hold what a job chose: a plan with grants, with a channel to the broker, with a
folder of its own to start in or for a worker that is reused is no plain one, and the worker makes its rows itself.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from node_agent.containment.plan import Plan
from node_agent.containment.script import Table

__all__ = ["HOME", "MOST", "Known", "Taught"]

#: As many plans as a mould keeps, the newest; and as many as are remembered to see which come again.
MOST: Final = 24
#: Where jobs start that name no folder.
HOME: Final = "/work"


class Known(NamedTuple):
    """What a plan says that is needed after its rows, and the rows: up to the last look, and from READY on."""

    kind: str
    task_paths: tuple[str, ...]
    result_bytes: int
    look: bytes
    restrict: Table
    answer: Table


class Taught:
    """What one mould knows, and what it is to learn with its next order. A plan is taught when it comes again."""

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}
        self._lesson = b""

    def sent(self, plan: Plan, record: bytes) -> None:
        """Note that a worker got ``record``."""
        if plan.mounts or plan.broker or plan.reuse or not plan.allow_exec or plan.cwd != HOME:
            return
        known = self._known.get(record)
        if known is None:
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            self._known[record] = False
        elif not known:
            self._known[record] = True
            self._lesson = record

    def lesson(self) -> bytes:
        """Return the record that the mould is to learn now, once; nothing if there is none."""
        lesson, self._lesson = self._lesson, b""
        return lesson
