"""An attempt that is frozen does nothing, goes on where it stood, and dies as any other: by the cgroup's freezer where
there is a writable cgroup v2 hierarchy, and by SIGSTOP through the mould."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from node_agent.containment.attempts import Attempt
from node_agent.containment.slots import Slot
from tests.containment.rig import Rig, in_rig, marked, python
from tests.support.wait import apause, await_until

WAYS = ["cgroup", "mould"]
# A tree whose parts all count: sessions, a thread whose process's first thread is dead, and a process that was stopped
# before. Each ends by itself after 30 s.
COUNTERS = """
import ctypes, os, signal, threading, time
def count(letter):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        os.write(1, letter)
        time.sleep(0.002)
for letter in (b"a", b"b"):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: count(letter)
        os._exit(0)
if os.fork() == 0:
    threading.Thread(target=count, args=(b"t",)).start()
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
stopped = os.fork()
if stopped == 0:
    signal.alarm(30)
    os.kill(os.getpid(), signal.SIGSTOP)
    count(b"S")
os.waitpid(stopped, os.WUNTRACED)
os.write(1, b"up")
count(b"c")
"""


def on(rig: Rig, way: str) -> Rig:
    """Return a rig that freezes this way, or skip with the reason."""
    if way == "mould":
        return Rig(rig.zygote, Slot(1, rig.zygote, None), None)
    if rig.group is None or "freeze" not in rig.group.enforces:
        pytest.skip("no writable cgroup v2 hierarchy here, so there is no freezer")
    return rig


def drained(attempt: Attempt) -> bytes:
    """Return everything that the pipe holds now."""
    data = b""
    while True:
        try:
            more = os.read(attempt.stdout, 1 << 16)
        except BlockingIOError:
            return data
        if not more:
            return data
        data += more


async def quiet(attempt: Attempt) -> None:
    """Fail if anything of the job still writes."""
    drained(attempt)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        assert drained(attempt) == b""
        await apause(0.01)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_tree_stands_still_and_goes_on(node_name: str, way: str) -> None:
    """Every process and thread stands still after the answer, and all but the one stopped before go on afterwards."""

    async def scenario(rig: Rig) -> None:
        held = on(rig, way)
        attempt, mark = await held.running(python(COUNTERS))
        for _ in range(3):
            still = await attempt.freeze(True)
            assert still.done, still
            assert still.processes >= 5
            assert still.method == ("cgroup.freeze" if way == "cgroup" else "SIGSTOP")
            await quiet(attempt)
            assert (await attempt.freeze(False)).done
            seen = b""

            def all_go_on() -> bool:
                nonlocal seen
                seen += drained(attempt)
                return set(b"abtc") <= set(seen)

            await await_until(all_go_on, "every counter to go on")
            assert b"S" not in seen
        attempt.kill()
        assert (await held.finish(attempt)).verdict.proved
        assert marked(mark) == []
        await held.slot.close()

    in_rig(node_name, scenario)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_tree_is_killed_with_proof_and_the_slot_serves_on(node_name: str, way: str) -> None:
    """A kill needs no thaw, and the next job of the slot runs: nothing of the freeze is left."""

    async def scenario(rig: Rig) -> None:
        held = on(rig, way)
        attempt, mark = await held.running(python(COUNTERS))
        assert (await attempt.freeze(True)).done
        attempt.kill()
        verdict = (await held.finish(attempt)).verdict
        assert (verdict.kind, verdict.proved, marked(mark)) == ("killed", True, [])
        assert (await asyncio.wait_for(held.run(["true"]), 10)).verdict.code == 0
        await held.slot.close()

    in_rig(node_name, scenario)


def test_a_job_that_fights_the_stop_signal_stands_still(node_name: str) -> None:
    """A bomb that forks as fast as it can below its pids limit, and one that continues its children, are stopped."""
    fighters = """
import os, signal, time
end = time.monotonic() + 20
if os.fork() == 0:
    while time.monotonic() < end:
        try:
            child = os.fork()
        except OSError:
            continue
        if child == 0: os._exit(0)
        os.waitpid(child, 0)
child = os.fork()
if child == 0:
    while time.monotonic() < end: os.write(1, b"x"); time.sleep(0.001)
    os._exit(0)
os.write(1, b"up")
while time.monotonic() < end:
    os.kill(child, signal.SIGCONT)
"""

    async def scenario(rig: Rig) -> None:
        held = on(rig, "mould")
        attempt, _ = await held.running(python(fighters), pids=64)
        assert (await attempt.freeze(True)).done
        await quiet(attempt)
        attempt.kill()
        await held.finish(attempt)
        await held.slot.close()

    in_rig(node_name, scenario)
