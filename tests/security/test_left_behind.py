"""Nothing that a job leaves is there for the next one, in the same mould or in a fresh one.

New for each attempt: process tree, mount and ipc namespace, view, tmpfs, uid; the mould proves that no process is left.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node_agent.containment.plan import Profile
from tests.containment.rig import FIRST_UID, LEVEL, Rig, in_rig, python
from tests.security.jobs import PROGRAMS, program

#: What a job does change for its own processes, as the search shows from within: so the search is not blind to it.
SEEN_FROM_WITHIN = {"files", "own", "processes", "sockets", "sysv", "limits", "nice", "policy"}


@pytest.mark.parametrize("fresh", [False, True], ids=["same-mould", "fresh"])
def test_nothing_is_left_for_the_next_job(node_name: str, fresh: bool) -> None:
    """What the second job finds is what a first job found before anything was left: no file, object, process, limit."""

    async def scenario(rig: Rig) -> None:
        own = {"uid": FIRST_UID + 455, "gid": FIRST_UID + 455} if LEVEL == "A" else {}
        profile = Profile("main", "key-1", fresh=fresh)

        async def job(name: str, *words: str) -> dict[str, object]:
            seen = await rig.run(program(name, *words), profile=profile, **own)
            assert seen.verdict.code == 0, seen
            found: dict[str, object] = json.loads(seen.out)
            return found

        before = await job("find")
        mould = rig.slot.mould_pid
        within = await job("leave", (PROGRAMS / "find.py").read_text())
        after = await job("find")
        assert after == before
        blind = {name for name in SEEN_FROM_WITHIN if within[name] == before[name]}
        assert blind == set(), "the search does not see what is there"
        assert (rig.slot.mould_pid == mould) != fresh

    in_rig(node_name, scenario)


CHARGE = """
import mmap, os, socket
size = 24 << 20
for path in ("/dev/shm/left", "/tmp/left", "/work/left"):
    with open(path, "wb") as file: file.write(bytes(size))
memory = os.memfd_create("left"); os.write(memory, bytes(size))
shared = mmap.mmap(-1, size); shared.write(bytes(size))
a, b = socket.socketpair(); a.setblocking(False)
try:
    while True: a.send(bytes(1 << 16))
except BlockingIOError: print("charged")
"""
#: What a mould and its caches may be charged for from one attempt to the next.
SLACK_BYTES = 8 << 20


def test_the_memory_that_a_job_was_charged_for_goes_with_it(node_name: str) -> None:
    """tmpfs files, memfds, shared memory and socket buffers of one job are no part of the next one's total."""

    async def scenario(rig: Rig) -> None:
        leaf = None if rig.group is None else rig.group.leaves.get("memory")
        if leaf is None:
            pytest.skip("needs the v1 memory controller, to read what the slot is charged for")
        await rig.run(["true"])
        before = _charged(leaf)
        for _ in range(2):
            assert (await rig.run(python(CHARGE), memory_bytes=256 << 20)).out == b"charged\n"
            assert _charged(leaf) - before < SLACK_BYTES, "cgroup: a later job pays for what an earlier one left"
        # Counter-check: while it runs, it is charged.
        attempt, _ = await rig.running(python(CHARGE + "print('up', flush=True); import time; time.sleep(30)"))
        assert _charged(leaf) - before > 5 * (20 << 20)
        attempt.kill()
        await rig.finish(attempt)

    in_rig(node_name, scenario)


def _charged(leaf: Path) -> int:
    return int((leaf / "memory.usage_in_bytes").read_text())


def test_a_task_finds_python_as_it_was(node_name: str) -> None:
    """What a task does to its interpreter is gone with it; no two share random numbers or a page to write to."""

    async def scenario(rig: Rig) -> None:
        async def task(name: str) -> dict[str, object]:
            seen = await rig.run(task=f"left_tasks:{name}")
            assert isinstance(seen.result, dict), seen
            found: dict[str, object] = seen.result["ok"]
            return found

        before = await task("look")
        within = await task("spoil")
        after = await task("look")
        numbers = [found.pop("random") for found in (before, within, after)]
        assert len(set(map(str, numbers))) == 3, "seeds: two jobs draw the same random numbers"
        assert after == before
        assert {name for name in before if within[name] == before[name]} == {"shared"}
        assert before["shared"] == [], "own memory: a page that is shared for writing outlives the job"

    in_rig(node_name, scenario)
