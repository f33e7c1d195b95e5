"""One slot at any level of the ladder, with the same short ways to run jobs in it as the containment tests have."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import pytest

from node_agent.containment.cgroup import NodeGroups, SlotGroup
from node_agent.containment.lower.slots import LowSlot
from node_agent.containment.lower.workspace import SHARED, Workspaces
from node_agent.containment.plan import Level, Plan
from tests.containment.rig import Rig, in_rig

__all__ = ["LEVELS", "LOW", "OWN_UID", "Ladder", "at_levels", "climb", "opened"]

OWN_UID: Final = os.geteuid() == 0
#: What this user can have on a host that lacks nothing; C needs a writable cgroup, which only root is sure to have.
LEVELS: Final[tuple[Level, ...]] = ("A", "C", "D", "E", "F") if OWN_UID else ("B", "E", "F")
LOW: Final[tuple[Level, ...]] = tuple(level for level in LEVELS if level > "B")
FIRST_UID: Final = 1_900_000_700

T = TypeVar("T")
_numbers = itertools.count(1)


def at_levels(*levels: Level) -> pytest.MarkDecorator:
    """Run a test at each of these levels that this user can have here; default: all."""
    return pytest.mark.parametrize("level", [each for each in LEVELS if each in (levels or LEVELS)])


class Ladder(Rig):
    """A rig at one of the levels C to F; ``zygote`` is not there."""

    slot: LowSlot  # type: ignore[assignment]  # it does what a Slot does

    def __init__(self, level: Level, slot: LowSlot, group: SlotGroup | None, places: Path) -> None:
        self.level: Level = level
        self.slot = slot
        self.group = group
        self.places = places

    def plan(self, **changes: object) -> Plan:
        """Return a plan with a new attempt name and, as root, a uid of its own."""
        number = next(_numbers)
        uid = FIRST_UID + number % 200 if OWN_UID else os.geteuid()
        gid = uid if OWN_UID else os.getegid()
        plan = Plan(f"main-low.{number}", "command", self.level, uid, gid, python_paths=(sys.base_prefix, sys.prefix))
        return replace(plan, **changes)  # type: ignore[arg-type] # each test names real fields


def climb(level: Level, node: str, scenario: Callable[[Rig], Awaitable[T]], *, folder: Path | None = None) -> T:
    """Run ``scenario`` with a slot of its own at ``level`` on a new event loop.

    ``folder``: where an ordinary user's workspaces go; default one that is removed.
    """
    return in_rig(node, scenario) if level in ("A", "B") else asyncio.run(_low(level, node, scenario, folder))


async def _low(level: Level, node: str, scenario: Callable[[Rig], Awaitable[T]], folder: Path | None) -> T:
    groups = NodeGroups.open(node) if level == "C" else None
    with ExitStack() as stack:
        if folder is None and not OWN_UID:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = Workspaces(SHARED / node if folder is None else folder / "work")
        try:
            group = None if groups is None else groups.slot(0)
            slot = LowSlot(0, level, places, group)
            try:
                return await asyncio.wait_for(_awaited(scenario(Ladder(level, slot, group, places.path))), 50)
            finally:
                await slot.close()
        finally:
            places.close()
            if groups is not None:
                groups.close()


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield what the node hands to ``begin`` for a granted path where there are no mounts: an O_PATH descriptor."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


async def _awaited(thing: Awaitable[T]) -> T:
    return await thing
