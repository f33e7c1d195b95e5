"""Loops end when they are told to, even if a cancellation got lost on the way."""

from __future__ import annotations

import asyncio

from node_agent.cancelling import end_all


async def deaf(times: int, heard: list[int]) -> None:
    """A loop that loses its first cancellations, as Python 3.11's wait_for may."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append(1)
            if len(heard) > times:
                raise


async def fails() -> None:
    raise ValueError("its own fault")


def test_a_lost_cancellation_is_repeated() -> None:
    """Each task has ended afterwards, and what one raised harms no other."""

    async def end() -> list[int]:
        heard: list[int] = []
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(deaf(2, heard)), loop.create_task(fails()), loop.create_task(deaf(0, [1]))]
        await asyncio.sleep(0)
        await end_all(tasks)
        assert all(task.done() for task in tasks)
        return heard

    assert len(asyncio.run(end())) == 3
