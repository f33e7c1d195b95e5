"""However a job's processes detach, a kill and a normal end take all of them.

Stopped by the pid namespace: nothing leaves it, and its end is the end of all in it. The cgroup is the second lock.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.containment.rig import Rig, in_rig, marked
from tests.security.jobs import REFUSED, next_is_fine, program, said, still_held
from tests.support.wait import wait_until

#: Kind → (size, the layer that ends it or refuses it).
KINDS = {
    "forest": (20, "pid-namespace"),
    "siblings": (5, "pid-namespace"),
    "subreaper": (5, "pid-namespace"),
    "nested": (4, "seccomp"),
    "leaderless": (3, "pid-namespace"),
    "vforked": (3, "pid-namespace"),
    "hydra": (2, "pid-namespace"),
    "hopper": (4, "pid-namespace"),
    "bomb": (100, "pids-limit"),
    "stopped": (5, "sigkill"),
    "traced": (4, "seccomp"),
    "deaf": (4, "sigkill"),
    "hidden": (4, "pid-namespace"),
    "threads": (4, "pid-namespace"),
    "reborn": (3, "pid-namespace"),
    "held": (3, "sigkill"),
    "zombies": (50, "pid-namespace"),
}
#: What a kind tries before it stands, and in how many ways.
TRIED = {"nested": 3, "traced": 2}


@pytest.mark.parametrize("kind", KINDS, ids=[f"{kind}-{layer}" for kind, (_, layer) in KINDS.items()])
def test_nothing_of_a_detached_tree_is_left(node_name: str, kind: str) -> None:
    """At the verdict of a kill and of a normal end, no process of the tree lives or holds a descriptor of it."""
    size, layer = KINDS[kind]

    async def scenario(rig: Rig) -> None:
        for how in ("kill", "end"):
            mark = f"rfmark{secrets.token_hex(8)}"
            attempt = await rig.start(program("trees", kind, size, how), env={"MARK": mark}, pids=120)
            line = await said(attempt)
            tried = line.split()[1:]
            if kind in TRIED:
                assert len(tried) == TRIED[kind], line
                assert set(tried) <= REFUSED, f"{layer} let through: {line}"
            if how == "kill":
                assert marked(mark), "the tree was gone before the kill"
                attempt.kill()
            verdict = await attempt.verdict
            assert marked(mark) == [], f"{layer}: processes outlive a job that was ended by {how}"
            assert not still_held(attempt), f"{layer}: somebody still holds the job's output after {how}"
            assert (verdict.kind, verdict.proved) == ("killed" if how == "kill" else "exit", True)
            await rig.finish(attempt)
        assert await next_is_fine(rig)

    in_rig(node_name, scenario)


@pytest.mark.parametrize("kind", ["forest", "subreaper", "hydra", "deaf", "reborn", "held"])
def test_without_the_namespace_they_would_escape(kind: str) -> None:
    """Counter-check: outside of a sandbox the same tree outlives the end of its process group, and is seen to."""
    mark = f"rfmark{secrets.token_hex(8)}"
    size, _ = KINDS[kind]
    try:
        with subprocess.Popen(
            program("trees", kind, size),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={"MARK": mark, "PATH": os.defpath},
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"up")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert marked(mark), "the search for survivors is blind"
    finally:
        wait_until(lambda: not _kill_marked(mark), "the counter-check's own tree to be gone", 20)


def _kill_marked(mark: str) -> list[int]:
    """Stop all that carry the mark, so that none can start another, then kill them; return who was there."""
    found = marked(mark)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    return [pid for pid in found if not _zombie(pid)]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
