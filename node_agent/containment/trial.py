"""One real attempt for the probe: a tree that detaches itself and ignores SIGTERM, killed, and looked for.

Called by probe.py. Must never report success without the proof of the kill and an own look through /proc.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from node_agent.containment.errors import ContainmentError, SetupError, SpawnError
from node_agent.containment.lower.slots import LowSlot
from node_agent.containment.plan import Level, Plan, Profile, Verdict
from node_agent.containment.slots import Attempt, Slot
from runner.wire import codec

__all__ = ["Outcome", "run"]

LEASE_S: Final = 30
TIMEOUT_S: Final = 15.0
PIDS: Final = 16
#: Where the kernel counts all processes of the user (E and F), those that start meanwhile must not fail the trial.
SHARED_PIDS: Final = 4096
MARK: Final = "RINGFENCE_PROBE"
#: A child in a session of its own, one whose parent has gone, and the parent, all deaf to SIGTERM.
TREE: Final = "trap '' TERM; setsid sleep 60 & (setsid sh -c 'trap \"\" TERM; sleep 60' &); echo up; sleep 60; true"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. ``error`` is empty if the tree ran and is proved gone; ``errno`` is 0 if none is known."""

    error: str = ""
    errno: int = 0
    processes: int = 0
    spawn_ms: float = 0.0
    kill_ms: float = 0.0


async def run(slot: Slot | LowSlot, level: Level, uid: int, gid: int) -> Outcome:
    """Start the tree in the slot, kill it, look for what is left, close the slot; raises no containment error."""
    slot.renew(time.clock_gettime_ns(time.CLOCK_BOOTTIME) + LEASE_S * 1_000_000_000)
    try:
        return await asyncio.wait_for(_attempt(slot, level, uid, gid), 2 * TIMEOUT_S)
    except SetupError as error:
        return Outcome(str(error), error.errno)
    except (ContainmentError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        return Outcome(str(error) or type(error).__name__, cause.errno or 0 if isinstance(cause, OSError) else 0)
    except TimeoutError:
        return Outcome(f"no answer within {2 * TIMEOUT_S:g} s")
    finally:
        await slot.close()


async def _attempt(slot: Slot | LowSlot, level: Level, uid: int, gid: int) -> Outcome:
    token = secrets.token_hex(16)
    began = time.monotonic()
    await slot.prepare(Profile(tenant="probe", signer="probe"))
    plan = Plan(
        attempt="probe.1",
        kind="command",
        level=level,
        uid=uid,
        gid=gid,
        disk_bytes=1 << 20,
        tmp_bytes=1 << 20,
        shm_bytes=1 << 20,
        inodes=1024,
        files=64,
        pids=SHARED_PIDS if level in ("E", "F") else PIDS,
    )
    attempt = await slot.begin(plan, ())
    try:
        await attempt.release(
            codec.dump({"job": "probe", "attempt": 1, "tags": {}, "env": {MARK: token}, "argv": ["sh", "-c", TREE]})
        )
        if b"up" not in await asyncio.wait_for(_first_line(attempt.stdout), TIMEOUT_S):
            raise SpawnError(f"the trial job did not run: {await _ending(attempt)}")
        spawn_ms = (time.monotonic() - began) * 1000
        attempt.kill()
        verdict = await asyncio.wait_for(attempt.verdict, TIMEOUT_S)
    finally:
        for fd in (attempt.stdout, attempt.stderr):
            with suppress(OSError):
                os.close(fd)
        attempt.kill()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(attempt.verdict), TIMEOUT_S)
        attempt.close()
    return _judged(verdict, spawn_ms, _survivors(token))


def _judged(verdict: Verdict, spawn_ms: float, left: int) -> Outcome:
    if verdict.kind != "killed" or not verdict.proved:
        return Outcome(f"the kill was not proved ({verdict.kind})", processes=verdict.usage.processes)
    if left:
        return Outcome(f"{left} processes were left after a kill that was called proved")
    return Outcome(processes=verdict.usage.processes, spawn_ms=round(spawn_ms, 2), kill_ms=round(verdict.kill_ms, 2))


async def _ending(attempt: Attempt) -> str:
    """Say how a tree that printed nothing ended, with the start of its own words."""
    with suppress(TimeoutError):
        verdict = await asyncio.wait_for(asyncio.shield(attempt.verdict), TIMEOUT_S)
        said = b""
        with suppress(OSError):
            said = os.read(attempt.stderr, 500)
        return f"{verdict.kind} {verdict.code or verdict.signal} {said.decode(errors='replace').strip()}"
    return "silent"


async def _first_line(fd: int) -> bytes:
    """Read what a non-blocking pipe gives first: a line, or nothing at its end."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, 4096)
        except BlockingIOError:
            ready = loop.create_future()
            loop.add_reader(fd, _settle(ready))
            try:
                await ready
            finally:
                loop.remove_reader(fd)


def _settle(future: asyncio.Future[None]) -> Callable[[], None]:
    def settle() -> None:
        if not future.done():
            future.set_result(None)

    return settle


def _survivors(token: str) -> int:
    """Count the processes of this host that carry the token in their environment: the probe's own look."""
    mark = f"{MARK}={token}".encode()
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                found += mark in file.read().split(b"\0")
    return found
