"""One node's groups on the hierarchies of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node_agent.containment import cgroup
from node_agent.containment.cgroup import NodeGroups, SlotGroup
from node_agent.containment.cgroupfs import Hierarchies
from node_agent.containment.errors import GroupBusy, GroupError, LimitBusy
from tests.host.support import STRANGER, apart, join, needs_root, sleeper, sleepers
from tests.support.wait import wait_until

FORKER = """
import os, sys
sys.stdin.read(1)
for _ in range(9):
    try:
        os.fork() or os._exit(0)
    except OSError:
        sys.exit(7)
"""
MEMORY_EATER = "import sys; block = bytearray(64 << 20); print('full', flush=True); sys.stdin.read()"


@pytest.fixture
def groups(node_name: str) -> Iterator[NodeGroups]:
    """The groups of one node; gone afterwards."""
    found = NodeGroups.open(node_name)
    if found is None:
        pytest.skip("no writable control group for this user (a delegated subtree is missing)")
    yield found
    found.close()


@pytest.fixture
def slot(groups: NodeGroups) -> SlotGroup:
    """The groups of one slot."""
    return groups.slot(0)


def needs(slot: SlotGroup, *wanted: str) -> None:
    """Skip where this machine has no such controller for us."""
    if missing := set(wanted) - slot.enforces:
        pytest.skip(f"no {', '.join(sorted(missing))} controller for this user here")


def reaped(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that was killed, and return its code."""
    return process.wait(timeout=5)


def test_kill_ends_mould_and_job(slot: SlotGroup) -> None:
    """One kill ends every process of the slot, in both of its groups, and then the slot is not populated."""
    with sleepers(3) as found:
        join(slot.join_paths, found[0].pid)
        for process in found[1:]:
            join(slot.join_paths, process.pid)
            if slot.unified:
                join([slot.unified / "job" / "cgroup.procs"], process.pid)
        assert slot.populated()
        assert slot.count() == 2
        slot.kill()
        assert [reaped(process) for process in found] == [-9, -9, -9]
    wait_until(lambda: not slot.populated(), "the slot to be empty")


def test_kill_reaches_groups_made_below(slot: SlotGroup) -> None:
    """A group made below the job's is killed with it, and removed."""
    needs(slot, "freeze")
    assert slot.unified
    inner = slot.unified / "job" / "deeper"
    inner.mkdir()
    with sleeper() as process:
        join([inner / "cgroup.procs"], process.pid)
        assert slot.populated()
        slot.kill()
        assert reaped(process) == -9
    wait_until(lambda: not slot.populated(), "the slot to be empty")
    slot.remove()
    assert not slot.unified.exists()


def test_frozen_job_leaves_the_mould_running(slot: SlotGroup) -> None:
    """Freezing stops the job alone, and a frozen job can be killed."""
    needs(slot, "freeze")
    assert slot.unified
    with sleepers(2) as (mould, job):
        join([slot.unified / "mould" / "cgroup.procs"], mould.pid)
        join([slot.unified / "job" / "cgroup.procs"], job.pid)
        slot.freeze(True)
        events = slot.unified / "job" / "cgroup.events"
        wait_until(lambda: "frozen 1" in events.read_text(), "the job to be frozen")
        assert "frozen 0" in (slot.unified / "mould" / "cgroup.events").read_text()
        slot.kill()
        assert (reaped(mould), reaped(job)) == (-9, -9)


def test_reset_thaws(slot: SlotGroup) -> None:
    """A slot that was frozen is not frozen for its next attempt."""
    needs(slot, "freeze")
    assert slot.unified
    slot.freeze(True)
    slot.reset()
    assert (slot.unified / "job" / "cgroup.freeze").read_text().strip() == "0"


def test_pids_limit_holds_and_is_counted(slot: SlotGroup) -> None:
    """No more processes than asked (and the mould); the refusal is counted once since the reset."""
    needs(slot, "pids")
    slot.set_limits(pids=2, memory_bytes=None, cpus=None)
    slot.reset()
    code = FORKER
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE) as process:
        join(slot.join_paths, process.pid)
        if slot.unified and "pids" not in slot.leaves:
            join([slot.unified / "job" / "cgroup.procs"], process.pid)
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.wait(timeout=10) == 7
    assert slot.events().pids_hits >= 1
    slot.reset()
    assert slot.events().pids_hits == 0


def test_memory_limit_kills_and_is_counted(slot: SlotGroup) -> None:
    """A process over the memory total is killed, and the events say that it was memory."""
    needs(slot, "memory")
    slot.set_limits(pids=10, memory_bytes=32 << 20, cpus=None)
    slot.reset()
    code = f"import sys; sys.stdin.read(1); {MEMORY_EATER}"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        join(slot.join_paths, process.pid)
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.wait(timeout=20) == -9
    events = slot.events()
    assert events.oom_kills >= 1
    assert 0 < events.peak_bytes <= 33 << 20


def test_limit_below_use_is_busy_and_renewed(slot: SlotGroup) -> None:
    """A limit that the leaf can't take now raises LimitBusy; a renewed leaf takes it."""
    needs(slot, "memory")
    if "memory" not in slot.leaves:
        pytest.skip("v2 lowers a limit at once: no EBUSY there")
    slot.set_limits(pids=10, memory_bytes=256 << 20, cpus=None)
    code = f"import sys; sys.stdin.read(1); {MEMORY_EATER}"
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        join(slot.join_paths, process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.readline() == b"full\n"
        with pytest.raises(LimitBusy):
            slot.set_limits(pids=10, memory_bytes=8 << 20, cpus=None)
        process.kill()
    wait_until(lambda: not slot.populated(), "the slot to be empty")
    slot.renew()
    slot.set_limits(pids=10, memory_bytes=8 << 20, cpus=None)
    assert (slot.leaves["memory"] / "memory.limit_in_bytes").read_text().strip() == str(8 << 20)


def test_limits_are_written_and_taken_away(slot: SlotGroup) -> None:
    """The kernel shows what was asked (one pid more on v1, for the mould), and no limit after None."""
    needs(slot, "pids", "memory", "cpu")
    if not {"pids", "memory", "cpu"} <= slot.leaves.keys():
        pytest.skip("v1 controllers are not mounted here")
    pids, memory, cpu = (slot.leaves[name] for name in ("pids", "memory", "cpu"))
    slot.set_limits(pids=7, memory_bytes=64 << 20, cpus=0.5)
    assert (pids / "pids.max").read_text() == "8\n"
    assert (memory / "memory.memsw.limit_in_bytes").read_text() == f"{64 << 20}\n"
    assert (cpu / "cpu.cfs_quota_us").read_text() == "50000\n"
    slot.set_limits(pids=7, memory_bytes=None, cpus=None)
    assert int((memory / "memory.limit_in_bytes").read_text()) > 1 << 50
    assert (cpu / "cpu.cfs_quota_us").read_text() == "-1\n"


def test_cpu_weight_is_always_low(slot: SlotGroup) -> None:
    """A slot weighs a tenth of the default without being asked; all jobs together have the default on v1."""
    needs(slot, "cpu")
    name = "cpu.shares" if "cpu" in slot.leaves else "cpu.weight"
    group = slot.leaves.get("cpu") or slot.unified
    assert group
    assert (group / name).read_text().strip() == ("102" if name == "cpu.shares" else "10")
    if name == "cpu.shares":
        assert (group.parent.parent / name).read_text().strip() == "1024"


def test_the_dying_have_all_the_cpu_there_is(slot: SlotGroup) -> None:
    """A kill lifts quota and weight; the proof takes the weight back, the next limits set the quota again."""
    needs(slot, "cpu")
    if "cpu" not in slot.leaves:
        pytest.skip("no v1 cpu controller here")
    leaf = slot.leaves["cpu"]
    slot.set_limits(pids=7, memory_bytes=None, cpus=0.5)
    slot.kill()
    assert (leaf / "cpu.cfs_quota_us").read_text() == "-1\n"
    assert [int((each / "cpu.shares").read_text()) for each in (leaf, leaf.parent.parent)] == [10_240] * 2
    slot.calm()
    assert [int((each / "cpu.shares").read_text()) for each in (leaf, leaf.parent.parent)] == [102, 1024]
    slot.set_limits(pids=7, memory_bytes=None, cpus=0.5)
    assert (leaf / "cpu.cfs_quota_us").read_text() == "50000\n"


def test_cpu_time_is_counted(slot: SlotGroup) -> None:
    """The events tell the cpu time of the job since the reset."""
    if not slot.unified and "cpuacct" not in slot.leaves:
        pytest.skip("no hierarchy that counts cpu time")
    slot.reset()
    with subprocess.Popen(
        [sys.executable, "-I", "-c", "import sys; sys.stdin.read(1); sum(range(3_000_000))"], stdin=-1
    ) as process:
        paths = [slot.unified / "job" / "cgroup.procs"] if slot.unified else slot.join_paths
        join(paths, process.pid)
        process.communicate(b"x")
    assert slot.events().cpu_s > 0.005


def test_unenforceable_totals_are_refused(tmp_path: Path) -> None:
    """A memory or cpu total without its controller is an error, never ignored."""
    bare = SlotGroup(None, {})
    for limits in ({"memory_bytes": 1 << 20, "cpus": None}, {"memory_bytes": None, "cpus": 1.0}):
        with pytest.raises(GroupError, match="can't be enforced"):
            bare.set_limits(pids=5, **limits)
    assert bare.enforces == {"kill"}


def test_name_is_held_once(groups: NodeGroups, node_name: str) -> None:
    """A second agent of the same name is turned away; with another home it has groups of its own."""
    with pytest.raises(GroupBusy):
        NodeGroups.open(node_name)
    other = NodeGroups.open(node_name, home=Path("/elsewhere"))
    assert other is not None
    try:
        assert not set(other.place.folders) & set(groups.place.folders)
    finally:
        other.close()


def test_sweep_touches_its_own_name_only(node_name: str) -> None:
    """Leftovers of this name are killed and removed; another node's processes live on."""
    first, other = NodeGroups.open(node_name), NodeGroups.open(f"{node_name}x")
    if first is None or other is None:
        pytest.skip("no writable control group for this user (a delegated subtree is missing)")
    with sleepers(2) as (left, foreign):
        join(first.slot(3).join_paths, left.pid)
        join(other.slot(3).join_paths, foreign.pid)
        forget(first)
        again = NodeGroups.open(node_name)
        assert again is not None
        assert again.sweep() == ["cgroup slot3: 1 processes killed"]
        assert again.sweep() == []
        assert reaped(left) == -9
        assert foreign.poll() is None
        again.close()
        foreign.kill()
        foreign.wait()
    wait_until(lambda: not other.slot(3).populated(), "the other node's slot to be empty")
    other.close()


def test_close_is_idempotent(node_name: str) -> None:
    """Closing twice is fine, and the second open finds the name free."""
    for _ in range(2):
        groups = NodeGroups.open(node_name)
        if groups is None:
            pytest.skip("no writable control group for this user (a delegated subtree is missing)")
        groups.slot(0)
        groups.close()
        groups.close()


COMING_AND_GOING = """
from node_agent.containment.cgroup import NodeGroups
seen = set()
for turn in range(60):
    groups = NodeGroups.open(f"{sys.argv[1]}{turn}")
    seen.add((groups.backend, *sorted(groups.enforces)))
    groups.close()
print(len(seen))
"""


@needs_root
def test_agents_that_come_and_go_do_not_disturb(node_name: str) -> None:
    """While other agents open and close, and the folder above comes and goes with them, nobody gets less."""
    names = [f"{node_name}{letter}" for letter in "abc"]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda name: apart(COMING_AND_GOING, name), names)) == ["1\n"] * 3


def test_folder_taken_away_meanwhile_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent's close between two calls costs a second try, not a controller."""
    answers = iter([FileNotFoundError(), FileNotFoundError(), None])

    def once(folder: Path) -> bool:
        if (error := next(answers)) is not None:
            raise error
        return True

    monkeypatch.setattr(cgroup, "_make_once", once)
    assert cgroup._make(Path("/nowhere"))


@needs_root
def test_ordinary_user_gets_none(node_name: str) -> None:
    """An ordinary user without a delegated subtree gets no groups, and leaves nothing."""
    code = "from node_agent.containment.cgroup import NodeGroups; print(NodeGroups.open(sys.argv[1]))"
    assert apart(code, node_name, user=STRANGER) == "None\n"


@needs_root
def test_delegated_subtree_of_an_ordinary_user(node_name: str) -> None:
    """With a subtree of their own, an ordinary user's agent moves itself aside and can kill and freeze."""
    hierarchies = Hierarchies.find()
    if hierarchies.unified is None:
        pytest.skip("no cgroup v2 hierarchy here")
    top = hierarchies.unified / "ringfence"
    top.mkdir(exist_ok=True)
    mine = top / node_name
    mine.mkdir()
    try:
        for path in (mine, mine / "cgroup.procs", mine / "cgroup.subtree_control", mine / "cgroup.threads"):
            os.chown(path, STRANGER, STRANGER)
        assert apart(DELEGATED, str(mine), node_name, str(STRANGER)).split() == ["True", "v2", "freeze,kill", "-9"]
    finally:
        for each in (mine / "jobs", mine / "agent", mine):
            if each.exists():
                each.rmdir()
        if not [child for child in top.iterdir() if child.is_dir()]:
            top.rmdir()


# As root it joins the subtree (which only root may do from outside), then it is the stranger.
DELEGATED = """
import os, subprocess
from pathlib import Path
from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.cgroupfs import Hierarchies
mine, name, uid = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
(mine / "cgroup.procs").write_text("0")
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
found = Hierarchies.find()
groups = NodeGroups.open(name, hierarchies=Hierarchies(found.unified, {}, found.own))
slot = groups.slot(0)
print(str(slot.unified) == f"{mine}/jobs/{name}/slot0", groups.backend, ",".join(sorted(slot.enforces)))
job = subprocess.Popen(["sleep", "60"])
(slot.unified / "job" / "cgroup.procs").write_text(str(job.pid))
slot.freeze(True)
slot.kill()
print(job.wait(5))
while slot.populated(): pass
groups.close()
"""


def forget(groups: NodeGroups) -> None:
    """Drop a node's groups as a killed agent does: its lock and descriptors go, its groups stay."""
    for slot in groups._slots.values():
        slot.close()
    assert groups._lock is not None
    os.close(groups._lock)
