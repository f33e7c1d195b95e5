"""Whatever a job does with its processes, a kill takes all of them, and the proof comes after the last."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
from pathlib import Path

import pytest

from node_agent.containment.plan import Profile
from tests.containment.rig import LEVEL, PROFILE, Rig, in_rig, marked, python
from tests.support.wait import await_until

# Every tree ends by itself after 30 s and makes at most a few hundred processes, should a kill ever fail.
SESSIONS = """
import os, signal, sys, time
def sleeper():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(30)
        os._exit(0)
signal.alarm(30)
for number in range(8): sleeper()
print("up", flush=True)
time.sleep(30)
"""
DEAF = """
import os, signal, time
for number in set(range(1, 32)) - {9, 19, 14}: signal.signal(number, signal.SIG_IGN)
signal.alarm(30)
if os.fork() == 0:
    os.setsid()
    time.sleep(30)
print("up", flush=True)
while True: time.sleep(1)
"""
STOPPED = """
import os, signal, time
for number in range(5):
    if os.fork() == 0:
        signal.alarm(30)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
print("up", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
RELAYS = """
import os, time
end = time.monotonic() + 20
def relay():
    for turn in range(3000):
        time.sleep(0.001)
        if time.monotonic() > end or os.fork(): os._exit(0)
        os.setsid()
for number in range(4):
    if os.fork() == 0: relay(); os._exit(0)
print("up", flush=True)
time.sleep(20)
"""
BOMB = """
import os, time
end = time.monotonic() + 10
print("up", flush=True)
while time.monotonic() < end:
    try: os.fork()
    except OSError: time.sleep(0.01)
"""
NESTED = """
import subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "trap '' TERM; (setsid sh -c 'trap \\"\\" TERM; sleep 30' &) ; sleep 30"])
print("up", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize(
    "code", [SESSIONS, DEAF, STOPPED, RELAYS, BOMB, NESTED], ids=["sessions", "deaf", "stopped", "relays", "bomb", "sh"]
)
def test_a_kill_leaves_nothing(node_name: str, code: str) -> None:
    """At the verdict of a kill, no process of the tree is left on the host, and the slot serves the next job."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(code), pids=120)
        assert marked(mark)
        attempt.kill()
        verdict = await attempt.verdict
        assert marked(mark) == []
        assert (verdict.kind, verdict.proved, verdict.forced) == ("killed", True, True)
        assert verdict.usage.processes >= 1
        await rig.finish(attempt)
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)


@pytest.mark.alone
def test_a_kill_is_proved_in_milliseconds(node_name: str) -> None:
    """From the kill of ten processes to the proof: p50 at most 5 ms."""

    async def scenario(rig: Rig) -> None:
        taken = []
        for _ in range(20):
            script = "for i in 1 2 3 4 5 6 7 8 9; do setsid sleep 30 & done; echo up; wait"
            attempt, _ = await rig.running(["sh", "-c", script])
            attempt.kill()
            taken.append((await attempt.verdict).kill_ms)
            await rig.finish(attempt)
        assert statistics.median(taken) <= 5.0, taken

    in_rig(node_name, scenario)


def test_a_job_can_be_asked_to_end(node_name: str) -> None:
    """terminate() is SIGTERM to the worker; what it leaves behind goes too."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(["sh", "-c", "trap 'exit 5' TERM; setsid sleep 30 & echo up; wait"])
        attempt.terminate()
        verdict = await attempt.verdict
        assert (verdict.kind, verdict.code, marked(mark)) == ("exit", 5, [])
        attempt.terminate()
        attempt.kill()
        await rig.finish(attempt)

    in_rig(node_name, scenario)


def test_a_worker_killed_by_others_is_a_signal(node_name: str) -> None:
    """A SIGKILL that is not ours is told as signal 9, not as a kill."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(["sh", "-c", "echo up; exec sleep 30"])
        # In the middle of its exec a process has no environment to be found by.
        await await_until(lambda: bool(marked(mark)), "the process to be found")
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        verdict = (await rig.finish(attempt)).verdict
        assert (verdict.kind, verdict.signal, verdict.forced) == ("signal", 9, False)

    in_rig(node_name, scenario)


def test_a_dead_mould_takes_its_job_along(node_name: str) -> None:
    """If the mould is killed by others, nothing of the job is left and the verdict says that the worker died."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(SESSIONS))
        assert rig.slot.mould_pid is not None
        os.kill(rig.slot.mould_pid, signal.SIGKILL)
        verdict = (await rig.finish(attempt)).verdict
        assert (verdict.kind, marked(mark)) == ("worker_died", [])
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)


def test_a_kill_right_after_the_start_holds(node_name: str) -> None:
    """A kill before, at and just after the release never leaves anything and always gives a verdict."""

    async def scenario(rig: Rig) -> None:
        for turns in range(12):
            attempt = await rig.start(python(SESSIONS), env={"MARK": f"early{os.getpid()}"})
            for _ in range(turns * turns):
                await asyncio.sleep(0)
            attempt.kill()
            assert (await attempt.verdict).kind == "killed"
            assert marked(f"early{os.getpid()}") == []
            await rig.finish(attempt)

    in_rig(node_name, scenario)


def test_a_cancelled_begin_leaves_nothing(node_name: str) -> None:
    """If the caller gives up at any moment of ``begin``, the worker is killed at once and the slot serves on."""

    async def scenario(rig: Rig) -> None:
        for turns in range(0, 200, 17):
            await rig.slot.prepare(PROFILE)
            begin = asyncio.ensure_future(rig.slot.begin(rig.plan(), []))
            for _ in range(turns):
                await asyncio.sleep(0)
            begin.cancel()
            try:
                attempt = await begin
            except asyncio.CancelledError:
                continue
            attempt.kill()
            await rig.finish(attempt)
        await await_until(lambda: rig.slot._attempt is None, "the slot to be free")
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)


def test_the_pids_limit_stands(node_name: str) -> None:
    """A job can't have more processes than its limit, at either level."""

    async def scenario(rig: Rig) -> None:
        code = """
import os, time
made = 0
try:
    for number in range(60):
        if os.fork() == 0: time.sleep(20); os._exit(0)
        made += 1
except OSError: pass
print(made)
"""
        seen = await rig.run(python(code), pids=20)
        assert int(seen.out) == 19, seen
        if rig.group is not None and "pids" in rig.group.enforces:
            assert seen.verdict.limit == "pids"

    in_rig(node_name, scenario)


@pytest.mark.skipif(
    LEVEL == "B", reason="needs cgroup v2 freeze, which an ordinary user has only where it is delegated"
)
def test_a_frozen_job_dies_all_the_same(node_name: str) -> None:
    """cgroup.freeze on the job stops neither a kill nor the proof."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(SESSIONS))
        assert rig.group is not None
        rig.group.freeze(True)
        attempt.kill()
        assert (await attempt.verdict).proved
        assert marked(mark) == []
        await rig.finish(attempt)
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)


def test_attack_38_a_mould_serves_one_profile(node_name: str) -> None:
    """Another tenant, signer, secret or net grant, and a fresh or secret-holding job, never get a used mould."""

    async def scenario(rig: Rig) -> None:
        moulds = []
        profiles = [
            PROFILE,
            PROFILE,
            Profile("other", "key-1"),
            Profile("other", "key-2"),
            Profile("other", "key-2", net=("h:1",)),
            Profile("other", "key-2", secrets=("A",)),
            Profile("other", "key-2", secrets=("A",)),
            Profile("other", "key-2", fresh=True),
            Profile("other", "key-2", fresh=True),
        ]
        for profile in profiles:
            await rig.run(["true"], profile=profile)
            moulds.append(rig.slot.mould_pid)
        assert moulds[0] == moulds[1]
        assert len(set(moulds)) == len(profiles) - 1

    in_rig(node_name, scenario)


def test_a_mould_is_replaced_with_age(node_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its number of attempts, and after its hour, a mould is replaced; after a kill too, ahead of need."""

    async def scenario(rig: Rig) -> None:
        await rig.run(["true"])
        first = rig.slot.mould_pid
        monkeypatch.setattr("node_agent.containment.slots.MOST_ATTEMPTS", 2)
        await rig.run(["true"])
        assert rig.slot.mould_pid == first
        await rig.run(["true"])
        second = rig.slot.mould_pid
        assert second != first
        monkeypatch.setattr("node_agent.containment.slots.LONGEST_LIFE_S", 0.0)
        await rig.run(["true"])
        third = rig.slot.mould_pid
        assert third != second
        monkeypatch.undo()
        attempt, _ = await rig.running(["sh", "-c", "echo up; sleep 30"])
        attempt.kill()
        await rig.finish(attempt)
        await await_until(lambda: rig.slot.mould_pid not in (None, third), "the next mould to stand")

    in_rig(node_name, scenario)


def test_nothing_of_ours_is_left_after_stop(node_name: str) -> None:
    """Zygote.stop ends every mould, running jobs included, and itself; twice is once."""
    pids: list[int] = []

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(SESSIONS))
        assert rig.slot.mould_pid is not None
        assert rig.zygote.pid is not None
        pids.extend([rig.slot.mould_pid, rig.zygote.pid])
        await rig.zygote.stop()
        await rig.zygote.stop()
        assert rig.zygote.died.done()
        assert (await rig.finish(attempt)).verdict.kind == "worker_died"
        assert marked(mark) == []

    in_rig(node_name, scenario)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
