"""Waiting for a condition instead of for time; the only place in the tests that sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

__all__ = ["apause", "await_until", "pause", "wait_until"]

Found = TypeVar("Found")

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02


def wait_until(predicate: Callable[[], Found], what: str, timeout_s: float = 10.0) -> Found:
    """Return the first truthy value of ``predicate``; after ``timeout_s`` fail and name ``what`` was awaited.

    Raises:
        AssertionError: the condition did not come true in time; the message holds the last value seen.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while not (found := predicate()):
        if time.monotonic() >= deadline:
            raise AssertionError(_late(what, timeout_s, found))
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
    return found


def pause(duration_s: float) -> None:
    """Let a moment pass, to hit another point of a race; never to wait for something."""
    time.sleep(duration_s)


async def apause(duration_s: float) -> None:
    """Like `pause`, on a running event loop."""
    await asyncio.sleep(duration_s)


@overload
async def await_until(predicate: Callable[[], Awaitable[Found]], what: str, timeout_s: float = ...) -> Found: ...
@overload
async def await_until(predicate: Callable[[], Found], what: str, timeout_s: float = ...) -> Found: ...
async def await_until(predicate: Callable[[], object], what: str, timeout_s: float = 10.0) -> object:
    """Like `wait_until`, on a running event loop; ``predicate`` may be a coroutine function.

    Raises:
        AssertionError: the condition did not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        answer = predicate()
        found = await answer if isinstance(answer, Awaitable) else answer
        if found:
            return found
        if time.monotonic() >= deadline:
            raise AssertionError(_late(what, timeout_s, found))
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def _late(what: str, timeout_s: float, found: object) -> str:
    return f"waited {timeout_s:g} s in vain for: {what} (last seen: {found!r})"
