"""The slots of one boot, with what they share: zygote, job uids, idmaps, work folders.

Called by the session. Must never drop a slot whose mould is not proved gone without saying so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Final

from node_agent.containment.errors import ContainmentError
from node_agent.containment.idmap import Idmaps
from node_agent.containment.lower.slots import LOW_LEVELS, LowSlot
from node_agent.containment.lower.workspace import Workspaces
from node_agent.containment.slots import Slot, Zygote
from node_agent.containment.uids import JobUids
from node_agent.ground import Ground, python_paths

__all__ = ["TOOL_SLOTS", "SlotSet"]

log = logging.getLogger(__name__)

#: So many tool calls run at a time, on a node whose policy names tools.
TOOL_SLOTS: Final = 2


class SlotSet:
    """Empty until ``make``; ``close`` takes down whatever was made."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.zygote: Zygote | None = None
        self.slots: dict[int, Slot | LowSlot] = {}
        #: Those of tool calls, which no job is claimed for.
        self.tools: dict[int, Slot | LowSlot] = {}
        self.idmaps: Idmaps | None = None
        self.uids: JobUids | None = None
        self._places: Workspaces | None = None

    @property
    def every(self) -> tuple[Slot | LowSlot, ...]:
        """All slots: what a lease keeps alive, and what its end ends."""
        return (*self.slots.values(), *self.tools.values())

    async def make(self, level: str) -> None:
        """Make every slot for the level that this host reached."""
        if level not in ("A", "B"):
            self._make_low(level)
            return
        zygote = self.zygote = Zygote(level="A" if level == "A" else "B")
        await zygote.start()
        groups, settings = self._ground.groups, self._ground.settings
        paths = (*python_paths(), *settings.task_path)
        for index, table in self._numbers():
            group = groups.slot(index) if groups is not None else None
            table[index] = Slot(index, zygote, group, paths=paths)
        if level == "A":
            self.uids = JobUids()
            self.idmaps = Idmaps(lambda ids: zygote.userns(*ids))

    async def close(self) -> None:
        """End every mould, then the zygote, and give back what they used."""
        for slot in self.every:
            try:
                await slot.close()
            except ContainmentError as error:
                # Its mould stays in the journal, and the next start of this node waits for it.
                log.warning("a slot is left behind", extra={"slot": slot.index, "error": str(error)})
        if self.zygote is not None:
            await self.zygote.stop()
        for part in (self.idmaps, self.uids, self._places):
            if part is not None:
                part.close()

    def _numbers(self) -> Iterator[tuple[int, dict[int, Slot | LowSlot]]]:
        """Yield the number of each slot and the table that it belongs to."""
        settings, tools = self._ground.settings, TOOL_SLOTS if self._ground.policy.tools else 0
        for index in range(settings.slots + tools):
            yield index, self.slots if index < settings.slots else self.tools

    def _make_low(self, level: str) -> None:
        groups, settings = self._ground.groups, self._ground.settings
        for low in LOW_LEVELS:
            if low == level:
                places = self._places = Workspaces.of(settings.node_home)
                for index, table in self._numbers():
                    group = groups.slot(index) if groups is not None and low == "C" else None
                    table[index] = LowSlot(index, low, places, group)
                if os.geteuid() == 0:
                    self.uids = JobUids()
