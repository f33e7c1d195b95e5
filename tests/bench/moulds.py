"""How fast sandboxes come to be, without a queue: a mould, a worker's start in one that stands, many moulds at once.

Used by main.py, on this process's own level (root: A). Must leave no process and no group behind.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass

from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.plan import Plan, Profile
from node_agent.containment.slots import Attempt, Slot, Zygote
from runner.wire import codec, frames
from runner.wire.frames import Op

AT_ONCE = 20
STARTS = 40
FIRST_UID = 1_900_000_900
PROFILE = Profile("main", "bench")


@dataclass(frozen=True, slots=True)
class Times:
    """Medians in milliseconds; ``many`` is the wall time of AT_ONCE moulds and their workers."""

    mould: float
    start: float
    many: float


def measure() -> Times:
    """Return the times of this machine."""
    return asyncio.run(_measure())


async def _measure() -> Times:
    level = "A" if os.geteuid() == 0 else "B"
    groups = NodeGroups.open(f"bench-{os.getpid()}")
    zygote = Zygote(level="A" if level == "A" else "B")
    await zygote.start()
    slots = [Slot(index, zygote, None if groups is None else groups.slot(index)) for index in range(2 * AT_ONCE)]
    try:
        moulds = [await _timed_ms(slot.prepare(PROFILE)) for slot in slots[:AT_ONCE]]
        starts = [await _start_ms(slots[0], number) for number in range(STARTS)]
        many = await _timed_ms(asyncio.gather(*(_one(slot, slot.index) for slot in slots[AT_ONCE:])))
    finally:
        for slot in slots:
            await slot.close()
        await zygote.stop()
        if groups is not None:
            groups.close()
    return Times(statistics.median(moulds), statistics.median(starts[1:]), many)


async def _one(slot: Slot, number: int) -> None:
    await slot.prepare(PROFILE)
    await _end(await _running(slot, number))


async def _start_ms(slot: Slot, number: int) -> float:
    """Return the time from the plan's arrival at the slot to the first instruction of the job's own."""
    start = time.perf_counter()
    attempt = await _running(slot, number)
    found = 1000 * (time.perf_counter() - start)
    await _end(attempt)
    return found


async def _running(slot: Slot, number: int) -> Attempt:
    root = os.geteuid() == 0
    uid, gid = (FIRST_UID + slot.index,) * 2 if root else (os.geteuid(), os.getegid())
    plan = Plan(f"main-bench.{number}", "command", "A" if root else "B", uid, gid, python_paths=(sys.base_prefix,))
    attempt = await slot.begin(plan, [])
    await attempt.release(codec.dump({"argv": ["true"], "env": {}, "job": "main-bench", "attempt": 1, "tags": {}}))
    data = await asyncio.get_running_loop().sock_recv(attempt.channel, frames.MAX_RECORD_BYTES)
    if not data or data[0] != Op.RUNNING:
        raise SystemExit("a sandbox of the bench did not run")
    return attempt


async def _end(attempt: Attempt) -> None:
    verdict = await attempt.verdict
    for fd in (attempt.stdout, attempt.stderr):
        os.close(fd)
    attempt.close()
    if verdict.kind != "exit" or verdict.code != 0:
        raise SystemExit(f"a sandbox of the bench ended with {verdict}")


async def _timed_ms(work: object) -> float:
    start = time.perf_counter()
    await work  # type: ignore[misc]  # an awaitable of any kind
    return 1000 * (time.perf_counter() - start)
