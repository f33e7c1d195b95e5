"""Kill, normal end and lifeline at every level: whatever a job does, none of its processes is left, with proof."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.errors import SpawnError
from node_agent.containment.lower import slots as low_slots
from node_agent.containment.lower.handle import LowMould
from node_agent.containment.lower.workspace import SHARED, Workspaces
from node_agent.containment.plan import Level
from tests.containment.rig import PROFILE, Rig, marked, python
from tests.containment.test_kill import BOMB, DEAF, NESTED, RELAYS, SESSIONS, STOPPED
from tests.ladder.rig import LOW, OWN_UID, Ladder, at_levels, climb
from tests.support.wait import await_until, wait_until

#: A process that traces another can let it go on; a leaderless thread group has a dead first thread.
LEADERLESS = """
import ctypes, os, signal, threading, time
signal.alarm(30)
if os.fork() == 0:
    os.setsid()
    signal.alarm(30)
    threading.Thread(target=time.sleep, args=(30,)).start()
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
print("up", flush=True)
time.sleep(30)
"""
#: Kills everything that it may, over and over, its mould and the helper of level D included.
HUNTER = """
import os, signal, time
end = time.monotonic() + 20
print("up", flush=True)
for number in range(3):
    if os.fork() == 0:
        os.setsid()
        me = os.getpid()
        while time.monotonic() < end:
            for name in filter(str.isdigit, os.listdir("/proc")):
                if int(name) not in (me, os.getppid()):
                    for number in (signal.SIGSTOP, signal.SIGKILL):
                        try: os.kill(int(name), number)
                        except OSError: pass
time.sleep(20)
"""
TICKING = """
import os, time
if os.fork() == 0: os.setsid()
print("up", flush=True)
while True: time.sleep(0.001)
"""
TREES = {
    "sessions": SESSIONS,
    "deaf": DEAF,
    "stopped": STOPPED,
    "relays": RELAYS,
    "bomb": BOMB,
    "sh": NESTED,
    "leaderless": LEADERLESS,
}


@at_levels()
@pytest.mark.parametrize("tree", TREES)
def test_a_kill_leaves_nothing(node_name: str, level: Level, tree: str) -> None:
    """At the verdict of a kill no process of the tree is left on the host, and the slot serves the next job."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(TREES[tree]), pids=60)
        assert marked(mark)
        attempt.kill()
        verdict = await attempt.verdict
        assert marked(mark) == [], f"level {level} left processes of {tree}"
        assert (verdict.kind, verdict.proved, verdict.forced) == ("killed", True, True)
        assert verdict.usage.processes >= 1
        await rig.finish(attempt)
        assert (await rig.run(["true"])).verdict.code == 0

    climb(level, node_name, scenario)


@at_levels("A", "B", "C", "D", "E")
def test_a_job_that_hunts_its_supervisors_dies_all_the_same(node_name: str, level: Level) -> None:
    """SIGSTOP and SIGKILL to every process in sight reach neither the mould nor the helper that kills."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(HUNTER), pids=60)
        await await_until(lambda: sum(map(int, _cpu_ticks(mark))) >= 5, "the hunt to be on")
        attempt.kill()
        verdict = await attempt.verdict
        assert marked(mark) == []
        assert (verdict.kind, verdict.proved) == ("killed", True)
        await rig.finish(attempt)

    climb(level, node_name, scenario)


@at_levels()
def test_a_normal_end_takes_what_is_left(node_name: str, level: Level) -> None:
    """What a job leaves behind at its end is dead before its verdict; its code and its children's time are told."""

    async def scenario(rig: Rig) -> None:
        script = "setsid sleep 60 & (setsid sleep 60 &); echo done; exit 7"
        seen = await rig.run(["sh", "-c", script], env={"MARK": f"left{os.getpid()}"})
        assert marked(f"left{os.getpid()}") == []
        assert (seen.verdict.kind, seen.verdict.code, seen.out) == ("exit", 7, b"done\n")
        assert seen.verdict.usage.max_rss_bytes > 0
        killed = await rig.run(["sh", "-c", "kill -9 $$"])
        assert (killed.verdict.kind, killed.verdict.signal) == ("signal", 9)

    climb(level, node_name, scenario)


@at_levels()
def test_a_job_can_be_asked_to_end(node_name: str, level: Level) -> None:
    """terminate() is SIGTERM to the worker; what it leaves behind goes too."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(["sh", "-c", "trap 'exit 5' TERM; setsid sleep 30 & echo up; wait"])
        attempt.terminate()
        verdict = await attempt.verdict
        assert (verdict.kind, verdict.code, marked(mark)) == ("exit", 5, [])
        await rig.finish(attempt)

    climb(level, node_name, scenario)


@at_levels()
def test_a_pause_stops_everything_and_a_paused_job_can_be_killed(node_name: str, level: Level) -> None:
    """While a job is paused none of its processes runs; it goes on where it was, and dies when it is killed paused."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(TICKING))
        still = await attempt.freeze(True)
        assert (still.done, still.processes) == (True, 2)
        before = _cpu_ticks(mark)
        later = time.monotonic() + 0.1
        await await_until(lambda: time.monotonic() >= later, "a time in which it would have run")
        assert _cpu_ticks(mark) == before
        assert (await attempt.freeze(False)).done
        assert (await attempt.freeze(True)).done
        attempt.kill()
        assert (await attempt.verdict).proved
        assert marked(mark) == []
        await rig.finish(attempt)

    climb(level, node_name, scenario)


@at_levels()
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_job_does_not_outlive_its_agent(node_name: str, level: Level, number: signal.Signals, tmp_path: Path) -> None:
    """An agent that is killed, or stopped until its lease is over, takes the whole tree along."""
    mark = f"agent{os.getpid()}{level}"
    with _agent(level, node_name, mark, "2500" if number == signal.SIGSTOP else "30000", tmp_path) as process:
        tree = _jobs(mark, process)
        assert tree
        process.send_signal(number)
        wait_until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in tree), "the tree to go", 10)
        wait_until(lambda: _jobs(mark, process) == [], "all of it to be gone", 10)


@pytest.mark.parametrize("level", LOW)
@pytest.mark.parametrize("who", ["mould", "guard"])
def test_one_supervisor_of_two_is_enough(node_name: str, level: Level, who: str) -> None:
    """If the mould or its guard is killed by others, the other one ends the job and brings the proof."""

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(SESSIONS))
        os.kill(_mould_of(rig, who), signal.SIGKILL)
        if who == "guard":
            # The mould serves on; only its word can be the proof now.
            assert marked(mark)
            attempt.kill()
        verdict = await attempt.verdict
        assert (verdict.kind, verdict.proved) == ("killed" if who == "guard" else "worker_died", True)
        assert marked(mark) == []
        await rig.finish(attempt)
        assert (await rig.run(["true"])).verdict.code == 0

    climb(level, node_name, scenario)


@pytest.mark.parametrize("level", LOW)
def test_without_a_word_nothing_is_called_proved(node_name: str, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mould and guard both killed by others, C and D still prove the end from outside; E and F never claim it."""
    if level > "D":
        monkeypatch.setattr("node_agent.containment.attempts.PROOF_TIMEOUT_S", 1.0)
        monkeypatch.setattr(low_slots, "PROOF_TIMEOUT_S", 1.0)

    async def scenario(rig: Rig) -> None:
        attempt, mark = await rig.running(python(SESSIONS))
        both = [_mould_of(rig, who) for who in ("mould", "guard")]
        # Stopped first: the one that outlives the other for a moment would end the job and say so.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in both:
                os.kill(pid, number)
        attempt.kill()
        verdict = await attempt.verdict
        if level in ("C", "D"):
            assert (verdict.proved, marked(mark)) == (True, [])
            await rig.finish(attempt)
            return
        assert not verdict.proved
        assert not rig.slot.healthy
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
        await await_until(lambda: marked(mark) == [], "the test's own clean-up")
        os.close(attempt.stdout)
        os.close(attempt.stderr)
        attempt.close()
        # What the test killed by hand the slot can't know.
        mould = rig.slot._mould
        assert mould is not None
        mould.gone.set_result(None)
        attempt._take_gone()

    climb(level, node_name, scenario)


@pytest.mark.parametrize("level", LOW)
def test_a_kill_right_after_the_start_holds(node_name: str, level: Level) -> None:
    """A kill before, at and just after the release never leaves anything and always gives a verdict."""

    async def scenario(rig: Rig) -> None:
        mark = f"early{os.getpid()}{level}"
        for turns in range(6):
            attempt = await rig.start(python(SESSIONS), env={"MARK": mark})
            for _ in range(turns * turns):
                await asyncio.sleep(0)
            attempt.kill()
            verdict = await attempt.verdict
            assert (verdict.kind, verdict.proved, marked(mark)) == ("killed", True, [])
            await rig.finish(attempt)

    climb(level, node_name, scenario)


@pytest.mark.parametrize("level", LOW)
def test_a_cancelled_begin_leaves_nothing(node_name: str, level: Level) -> None:
    """If the caller gives up at any moment of ``begin``, the worker is killed and the slot serves on."""

    async def scenario(rig: Rig) -> None:
        for turns in range(0, 60, 7):
            await rig.slot.prepare(PROFILE)
            begin = asyncio.ensure_future(rig.slot.begin(rig.plan(), []))
            for _ in range(turns):
                await asyncio.sleep(0)
            begin.cancel()
            with suppress(asyncio.CancelledError):
                attempt = await begin
                attempt.kill()
                await rig.finish(attempt)
            await await_until(lambda: rig.slot._attempt is None, "the slot to be free")
        assert (await rig.run(["true"])).verdict.code == 0

    climb(level, node_name, scenario)


def test_a_mould_that_can_not_start_says_why(node_name: str) -> None:
    """A group that can't be joined is an error with its words, and nothing is left of the mould."""

    async def scenario() -> None:
        with pytest.raises(SpawnError, match="No such file"):
            await LowMould.start("C", [f"/{node_name}/cgroup.procs"], None)

    asyncio.run(scenario())


def _mould_of(rig: Rig, who: str) -> int:
    assert isinstance(rig, Ladder)
    mould = rig.slot._mould
    assert mould is not None
    return mould.guard if who == "guard" else mould.pid


@contextmanager
def _agent(level: Level, node: str, mark: str, deadline_ms: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.ladder.agent", level, node, mark, deadline_ms]
    places = Workspaces(SHARED / node if OWN_UID else folder / "work")
    words += [] if OWN_UID else [str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("up")
            yield process
        finally:
            process.kill()
            process.wait()  # until then it holds its groups
            wait_until(lambda: _jobs(mark, process) == [], "the tree to be gone", 20)
            groups = NodeGroups.open(node)
            if groups is not None:
                groups.sweep()
                groups.close()
            # As the next start of this agent does.
            if level > "B":
                assert len(places.sweep()) == 1
            places.close()


def _jobs(mark: str, agent: subprocess.Popen[str]) -> list[int]:
    return [pid for pid in marked(mark) if pid != agent.pid]


def _cpu_ticks(mark: str) -> list[bytes]:
    found = []
    for pid in marked(mark):
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            found += file.read().rpartition(b")")[2].split()[11:13]
    return found
