"""Path grants through a whole agent, with a policy that allows every path: the node's own rules are the wall.

Attack 1 (grants that reach Ringfence's own files), and a granted path that hangs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from node_agent.containment import linux
from runner.grants import Grants
from runner.job import Job
from tests.containment.rig import LEVEL
from tests.support import silent
from tests.support.rig import Rig, rigged

OPEN = 'version = 1\n[[allow]]\ncommands = ["*"]\nread = ["/"]\nwrite = ["/"]\n'


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One agent with two slots."""
    with rigged(slots=2) as found:
        (found.home / "policy.toml").write_text(OPEN)
        found.start("one")
        # The connections that a test would leave open are opened here.
        assert found.app.command(["true"]).outcome(20).state == "finished"
        yield found


def enqueue(rig: Rig, path: Path, mode: str, mark: Path) -> Job[None]:
    """A job with one grant, which leaves a mark if it runs."""
    asked = Grants(write=(str(path),)) if mode == "write" else Grants(read=(str(path),))
    return rig.app.command(["sh", "-c", f"echo ran >{mark}; echo ran"], grants=asked)


def reason(rig: Rig, job: Job[None]) -> str:
    """Why the job was refused; fails if it was not."""
    rig.wait_state(job, "refused", "finished", "failed")
    ended = job.outcome(5)
    assert ended.state == "refused", ended
    return f"{ended.reason}: {ended}"


def test_attack_01_no_grant_reaches_the_nodes_own_files(rig: Rig) -> None:
    """Home, keys, their ancestors, Python and task code are refused for writing, also by links and bind mounts."""
    top = rig.home.parent
    (rig.work / "link").symlink_to(top)
    paths = {
        "home": rig.home,
        "keys": rig.home / "keys",
        "a file in it": rig.home / "trust.toml",
        "its parent": top,
        "the root": Path("/"),
        "Python": Path(os.path.realpath(sys.prefix)),
        "through a link": rig.work / "link" / "h",
    }
    with ExitStack() as stack:
        if LEVEL == "A":
            (top / "bound").mkdir()
            linux.mount(str(top), str(top / "bound"), None, 0x1000)
            stack.callback(linux.umount, str(top / "bound"), linux.DETACH)
            paths |= {"a bind mount": top / "bound", "home below a bind mount": top / "bound" / "h"}
        jobs = {name: enqueue(rig, path, "write", path / "mark") for name, path in paths.items()}
        jobs["read the home"] = enqueue(rig, rig.home, "read", Path("/tmp/mark"))
        said = {name: reason(rig, job) for name, job in jobs.items()}
    assert {name for name, text in said.items() if not text.startswith("policy: ")} == set(), said
    assert not [path for path in paths.values() if (path / "mark").exists()]
    rig.wait_state(enqueue(rig, rig.work, "write", rig.work / "mark"), "finished")
    assert (rig.work / "mark").exists(), "the same grant of a folder that is nobody's is given"


@silent.needed
def test_a_hung_grant_stalls_neither_heartbeat_nor_neighbours(rig: Rig) -> None:
    """While one job's path does not answer the agent serves others and stays the same boot; that job is refused."""
    hung = rig.home.parent / "hung"
    hung.mkdir()
    boot = rig.boot(rig.nodes["one"])
    with silent.silent(hung) as server:
        waiting = enqueue(rig, hung, "read", Path("/tmp/mark"))
        others = []
        while rig.state(waiting) not in ("refused", "failed", "finished"):
            others.append(rig.app.command(["true"]))
            rig.wait_state(others[-1], "finished", timeout_s=3)
        assert 3 in server.asked
        assert "did not answer within 5 s" in reason(rig, waiting)
        assert len(others) > 3
    assert rig.boot(rig.nodes["one"]) == boot
    rig.wait_idle()
