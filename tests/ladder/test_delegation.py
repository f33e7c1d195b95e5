"""A control group delegated to an ordinary user: whoever can write it can move and kill (attacks 9 and 49)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.containment.cgroupfs import Hierarchies
from tests.ladder.lacking import STRANGER
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to delegate a control group to another user")
JOIN = """
import os, sys
sys.path.insert(0, sys.argv[3])
from node_agent.containment import linux
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
found = sys.argv[2] + "/found"
linux.unshare(linux.NEWNS)
linux.mount(None, "/", None, linux.SLAVE_TREE)
os.mkdir(found)
linux.move_mount(linux.open_tree(sys.argv[1]), found)
os.setgroups([]); os.setresgid(65533, 65533, 65533); os.setresuid(65533, 65533, 65533)
os.environ["TMPDIR"] = sys.argv[2]
exec(sys.argv[4])
"""
PROBE = """
import asyncio, json
from pathlib import Path
from node_agent.containment.probe import probe
report = asyncio.run(probe(Path(sys.argv[2]), max_level="C"))
print(json.dumps(report.as_json() | {"kept": {each.name: each.kept for each in report.promises}}))
"""
#: What a job finds out of its own group, and tries there.
ATTACK = """
import os, signal, sys
top = sys.argv[1]
def tried(what, *args):
    try: what(*args); return "done"
    except OSError as error: return type(error).__name__
def put(path, text): open(path, "w").write(text)
print(tried(os.listdir, top), tried(put, top + "/cgroup.procs", str(os.getpid())),
      *(tried(put, os.path.join(where, "cgroup.kill"), "1") for where, _, _ in os.walk(top)),
      tried(put, top + "/cgroup.kill", "1"), tried(os.mkdir, top + "/mine"))
"""
AT_C = f"""
from node_agent.containment.plan import Mount
from tests.containment.rig import python
from tests.containment.test_kill import SESSIONS
from tests.ladder.rig import climb, opened
from tests.ladder.test_walls import SET_ID
from tests.containment.rig import marked
from pathlib import Path
async def scenario(rig):
    seen = await rig.run([*python({ATTACK!r}), sys.argv[1]])
    print(seen.verdict.code, seen.out.decode().strip())
    attempt, mark = await rig.running(python(SESSIONS))
    attempt.kill()
    verdict = await attempt.verdict
    print(verdict.proved, verdict.method, marked(mark))
    await rig.finish(attempt)
    place = Path(sys.argv[2])
    with opened(place) as fd:
        seen = await rig.run([*python(SET_ID), str(place)], mounts=[(Mount(str(place), "write", "dir"), fd)])
    print(" ".join(seen.out.decode().split()))
    print([path.name for path in place.iterdir() if path.lstat().st_mode & 0o6000])
climb("C", sys.argv[5], scenario, folder=Path(sys.argv[2]))
"""
AT_B = f"""
from pathlib import Path
from node_agent.containment.plan import Mount
from tests.containment.rig import granted, python
from tests.ladder.rig import climb
async def scenario(rig):
    assert rig.group is not None
    top = Path(found)
    with granted(top, "read") as fd:
        seen = await rig.run([*python({ATTACK!r}), str(top)], mounts=[(Mount(str(top), "read", "dir"), fd)])
    print(seen.verdict.code, seen.out.decode().strip())
climb("B", sys.argv[5], scenario)
"""


@pytest.fixture
def delegated(node_name: str, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A group that belongs to the ordinary user, and a folder of its own."""
    unified = Hierarchies.find().unified
    if unified is None:
        pytest.skip("this host has no cgroup v2 hierarchy")
    group = unified / f"{node_name}-user"
    group.mkdir()
    for path in (group, *(group / name for name in ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control"))):
        os.chown(path, STRANGER, STRANGER)
    folder = tmp_path / "user"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    for parent in (tmp_path, *tmp_path.parents):
        if "rf-" in str(parent):
            parent.chmod(parent.stat().st_mode | 0o111)
    yield group, folder
    wait_until(lambda: "populated 0" in (group / "cgroup.events").read_text(), "the group to be empty")
    for where, _, _ in os.walk(group, topdown=False):
        os.rmdir(where)


def apart(delegated: tuple[Path, Path], code: str, node: str) -> str:
    """Run ``code`` as the ordinary user in its group; return what it printed."""
    group, folder = delegated
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", JOIN, str(group), str(folder), str(ROOT), code, node],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_attack_49_doctor_calls_delegation_without_a_view_insecure(
    delegated: tuple[Path, Path], node_name: str
) -> None:
    """Level C is found by doing, for an ordinary user too, and marked: Landlock alone keeps jobs out of the group."""
    seen = json.loads(apart(delegated, PROBE, node_name))
    assert seen["level"] == "C", seen["tried"]
    marked = [each for each in seen["missing"] if each["hurts"] == "insecure"]
    assert len(marked) == 1
    assert "insecure: delegation without a view" in marked[0]["why"]
    assert seen["kept"]["kill is certain"]
    assert not seen["kept"]["user quotas"]


def test_attack_49_and_09_a_job_at_c_can_not_write_its_own_users_group(
    delegated: tuple[Path, Path], node_name: str
) -> None:
    """Its uid owns the group, and it neither lists, leaves nor kills it; a write grant makes no set-user-ID file."""
    attack, kill, made, found = apart(delegated, AT_C, node_name).splitlines()
    assert attack.split() == ["0", *["PermissionError"] * 4], attack
    assert kill == "True cgroup.kill+subreaper []"
    assert made == "4 by the job"
    assert found == "[]"


def test_attack_49_a_job_at_b_that_finds_the_group_can_not_write_it(
    delegated: tuple[Path, Path], node_name: str
) -> None:
    """With the group's files bind-mounted into its view a job still moves and kills nobody."""
    words = apart(delegated, AT_B, node_name).split()
    assert words[:2] == ["0", "done"], words
    assert len(words) > 6
    assert set(words[2:]) <= {"PermissionError", "OSError"}, words
