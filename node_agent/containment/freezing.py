"""Lets no process of an attempt run, and lets them go on: the cgroup's freezer, or SIGSTOP through the mould.

Called by the attempt, on the agent's loop. Must never use the freezer of cgroup v1, under which SIGKILL waits for the
thaw, nor freeze the mould, which has to see its lifeline (attack 36).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from node_agent.containment.errors import GroupError
from node_agent.containment.lower.handle import LowMould
from node_agent.containment.moulds import Mould
from node_agent.containment.slotgroup import SlotGroup

__all__ = ["FREEZE_TIMEOUT_S", "Still", "freeze"]

#: A process that the kernel does not stop for so long is in an uninterruptible wait.
FREEZE_TIMEOUT_S: Final = 5.0
_FIRST_LOOK_S: Final = 0.0005
_LONGEST_LOOK_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Still:
    """What a freeze or thaw came to. ``done``: all stand still (or go on); ``processes``: how many there are."""

    done: bool
    processes: int
    method: str


async def freeze(
    group: SlotGroup | None, mould: object, attempt: str, frozen: bool, timeout_s: float = FREEZE_TIMEOUT_S
) -> Still:
    """Freeze or thaw, and wait until it is so. Raises GroupError where neither way exists."""
    if group is not None and "freeze" in group.enforces:
        return await _by_group(group, frozen, timeout_s)
    if not isinstance(mould, Mould | LowMould):
        raise GroupError("without a cgroup v2 hierarchy and a mould, a job can't be paused")
    return await _by_mould(mould, attempt, frozen, timeout_s)


async def _by_group(group: SlotGroup, frozen: bool, timeout_s: float) -> Still:
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + timeout_s, _FIRST_LOOK_S
    try:
        group.freeze(frozen)
        while group.frozen() != frozen:
            if loop.time() >= deadline:
                return Still(False, group.count(), "cgroup.freeze")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        return Still(True, group.count(), "cgroup.freeze")
    except OSError as error:
        raise GroupError(f"the job's group can't be frozen: {error}") from error


async def _by_mould(mould: Mould | LowMould, attempt: str, frozen: bool, timeout_s: float) -> Still:
    loop = asyncio.get_running_loop()
    deadline, pause_s = loop.time() + timeout_s, _FIRST_LOOK_S
    while True:
        try:
            still, moving = await asyncio.wait_for(
                mould.hold(attempt, still=frozen), max(0.001, deadline - loop.time())
            )
        except TimeoutError:
            return Still(False, 0, "SIGSTOP")
        if not moving or not frozen:
            return Still(True, still, "SIGSTOP")
        if loop.time() >= deadline:
            return Still(False, still + moving, "SIGSTOP")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
