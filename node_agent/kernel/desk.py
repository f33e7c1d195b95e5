"""All parts of the kernel together: one table, one start, one stop.

Made by the session of the boot (node_agent/session.py); the channel looks calls up in it. Must never offer a call whose
part does not stand: a part is added here once it is carried out, recorded and documented.
"""

from __future__ import annotations

from collections.abc import Mapping

from node_agent.doornews import Metered
from node_agent.kernel.artifacts import Artifacts
from node_agent.kernel.caller import Caller
from node_agent.kernel.children import Children
from node_agent.kernel.deciding import PolicyPart
from node_agent.kernel.family import Family
from node_agent.kernel.progress import Progress
from node_agent.kernel.seams import Around, Part
from node_agent.kernel.signals import Signals
from node_agent.kernel.table import Entry, table_of
from node_agent.kernel.talk import Talk
from node_agent.kernel.toolrun import ToolDesk
from node_agent.kernel.vfs.files import Files
from node_agent.run import Run

__all__ = ["Desk", "parts_of"]


def parts_of(around: Around) -> tuple[Part, ...]:
    """Return every part of this version. A part that lives longer than a call hooks into around.starting, …"""
    spending = () if around.spending is None else (around.spending,)
    tools = ToolDesk(around)
    files = Files.on(around, tools.of)
    parts = (Artifacts(around), Children(around), files, PolicyPart(around), Progress(around), tools)
    return (*parts, *Talk.on(around).parts, *spending)


class Desk:
    """The kernel of one boot. ``start`` and ``stop`` are idempotent."""

    def __init__(self, around: Around) -> None:
        self.around = around
        self.parts = parts_of(around)
        self.table: Mapping[str, Entry] = table_of(*(part.entries() for part in self.parts))
        self.family = Family(around)
        self._started = False

    def start(self) -> None:
        """Start what the parts do by themselves."""
        if not self._started:
            self._started = True
            for begin in self.around.starting:
                begin()

    @property
    def signals(self) -> Signals:
        """The part that carries out operators' signals, too."""
        return next(part for part in self.parts if isinstance(part, Signals))

    async def parks(self, run: Run) -> None:
        """Note how many attempts of a job operators' words allowed beside those that were signed."""
        await self.around.parks(run)

    def metered(self, told: Metered) -> None:
        """The egress process tells what an attempt took of a model."""
        if self.around.spending is not None:
            self.around.spending.metered(told)
        for hear in self.around.metering:
            hear(told)

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
