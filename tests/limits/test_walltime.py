"""The clock of a time limit: it runs, stands still while paused, and goes on where it stood."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from node_agent.walltime import WallTime
from tests.support.wait import apause

Scenario = Callable[[list[str]], Awaitable[None]]


def run(scenario: Scenario) -> list[str]:
    """Run a scenario with a list that it and its clock write to; return the list."""
    told: list[str] = []

    async def main() -> None:
        await scenario(told)

    asyncio.run(main())
    return told


def test_it_ends_at_its_limit_and_not_when_cancelled() -> None:
    """Once, after the limit; never after cancel, paused or not."""

    async def scenario(told: list[str]) -> None:
        WallTime(0.05, lambda: told.append("limit"))
        WallTime(0.05, lambda: told.append("cancelled")).cancel()
        paused = WallTime(0.05, lambda: told.append("cancelled"))
        paused.pause(0.05, lambda: told.append("late"))
        paused.cancel()
        await apause(0.15)

    assert run(scenario) == ["limit"]


def test_paused_time_does_not_count() -> None:
    """A pause longer than the limit ends nothing; resumed, what was left is left."""

    async def scenario(told: list[str]) -> None:
        clock = WallTime(0.1, lambda: told.append("limit"))
        for _ in range(2):
            clock.pause(10, lambda: told.append("late"))
            clock.pause(10, lambda: told.append("twice"))
            await apause(0.15)
            assert told == []
            clock.resume()
            clock.resume()
        await apause(0.2)

    assert run(scenario) == ["limit"]


def test_a_pause_has_an_end() -> None:
    """One that nobody lifts in its time is told, in place of the limit."""

    async def scenario(told: list[str]) -> None:
        clock = WallTime(0.05, lambda: told.append("limit"))
        clock.pause(0.1, lambda: told.append("late"))
        await apause(0.25)

    assert run(scenario) == ["late"]
