"""Who waits for work: an agent with a free slot takes a lane's wake-up, one without leaves it to the others.

Called by the session in the wake-up loop (dispatch.py), on a connection of its own. Must never keep a wake-up that it
can't use: the jobs behind it would wait until somebody looks by himself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from node_agent.dispatch import LOOK_S
from node_agent.lanes import WINDOW, Lanes

__all__ = ["Room", "WakeStore", "Wakeups"]

#: How often the names of all lanes are read although their number is the same, in seconds.
NAMES_S: Final = 10.0


class WakeStore(Protocol):
    """What is needed of the store."""

    async def wait(self, lanes: Sequence[str]) -> str | None:
        """Wait a second for the wake-up of a lane; return its name."""

    async def pass_on(self, lane: str) -> None:
        """Give a wake-up back."""

    async def lanes(self) -> tuple[str, ...]:
        """Return every lane."""


class Room(Protocol):
    """Who knows about free slots: the dispatcher. Set while there is one."""

    @property
    def room(self) -> asyncio.Event:
        """Set while a slot is free."""


class Wakeups:
    """``fit``: whether this boot may claim now. ``clock``: seconds that never go back."""

    def __init__(
        self, store: WakeStore, lanes: Lanes, room: Room, fit: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._room = room
        self._fit = fit
        self._clock = clock
        self._looked_s = clock()

    async def wait(self, idle: bool) -> None:
        """Return when a lane got work, or about a second has passed, and look for new lanes now and then.

        ``idle``: whether to wait at all. Raises StoreAwayError.
        """
        self._lanes.woken = await self._woken() if idle else None
        # The turn that follows tells of new lanes, too: it compares how many there are. Beyond a window some are
        # forgotten while others come.
        often = len(self._lanes.known) > WINDOW or not self._fit()
        if self._clock() - self._looked_s < (LOOK_S if often else NAMES_S):
            return
        self._lanes.refresh(await self._store.lanes())
        self._looked_s = self._clock()

    async def _woken(self) -> str | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._room.room.wait()
        if not self._room.room.is_set():
            return None
        # Who may not claim takes no wake-up from those who may.
        woken = await self._store.wait(self._lanes.awaited() if self._fit() else ())
        if woken is not None and not (self._fit() and self._room.room.is_set()):
            await self._store.pass_on(woken)
            return None
        return woken
