"""Ends tasks for certain. A cancellation can get lost: on Python 3.11, `asyncio.wait_for` drops one that arrives in the
moment in which what it waits for is done, and redis-py sends each command through it.

Called by whoever ends loops that talk to the store. Must never be used for a task that cleans up for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

__all__ = ["end_all"]

#: So long a cancelled task has before it is cancelled again, in seconds.
_AGAIN_S: Final = 0.1


async def end_all(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancel the tasks until each has ended; what they raised is dropped."""
    every = tuple(tasks)
    left = {task for task in every if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    for task in every:
        if not task.cancelled():
            task.exception()  # or asyncio complains that nobody looked at it
