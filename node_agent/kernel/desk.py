"""All parts of the kernel together: one table, one start, one stop.

Made by the session of the boot (node_agent/session.py); the channel looks calls up in it. Must never offer a call whose
part does not stand: a part is added here once it is carried out, recorded and documented.
"""

from __future__ import annotations

from collections.abc import Mapping

from node_agent.kernel.caller import Caller
from node_agent.kernel.seams import Around, Part
from node_agent.kernel.table import Entry, table_of

__all__ = ["Desk", "parts_of"]


def parts_of(around: Around) -> tuple[Part, ...]:
    """Return every part of this version. A part that lives longer than a call hooks into around.starting, …"""
    return ()


class Desk:
    """The kernel of one boot. ``start`` and ``stop`` are idempotent."""

    def __init__(self, around: Around) -> None:
        self.around = around
        self.parts = parts_of(around)
        self.table: Mapping[str, Entry] = table_of(*(part.entries() for part in self.parts))
        self._started = False

    def start(self) -> None:
        """Start what the parts do by themselves."""
        if not self._started:
            self._started = True
            for begin in self.around.starting:
                begin()

    def ended(self, caller: Caller) -> None:
        """An attempt that had a session is over: each part forgets it."""
        for forget in self.around.ending:
            forget(caller)

    async def stop(self) -> None:
        """End what the parts do by themselves."""
        if self._started:
            self._started = False
            for end in reversed(self.around.stopping):
                await end()
