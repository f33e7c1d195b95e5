"""The pure v2 back end. The tree is a real one; controllers that this kernel has on v1 only are stood in for by files.

A test with stand-ins says so in its docstring: it shows what is written where, not what the kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.cgroupfs import Hierarchies
from node_agent.containment.slotgroup import SlotGroup
from tests.host.support import apart, needs_root

LIMIT_FILES = {
    "pids.max": "max",
    "pids.events": "max 0",
    "memory.max": "max",
    "memory.swap.max": "max",
    "memory.events": "low 0\noom 0\noom_kill 0",
    "memory.peak": "0",
    "cpu.max": "max 100000",
    "cpu.stat": "usage_usec 0",
}


@pytest.fixture
def stand_in(tmp_path: Path) -> SlotGroup:
    """A slot on plain files that look like a v2 group with every controller."""
    slot = tmp_path / "slot0"
    (slot / "job").mkdir(parents=True)
    (slot / "mould").mkdir()
    for name, text in LIMIT_FILES.items():
        (slot / "job" / name).write_text(text)
    for name in ("cgroup.subtree_control", "cpu.weight"):
        (slot / name).touch()
    return SlotGroup(slot, {}, ("pids", "memory", "cpu"))


@pytest.fixture
def made(stand_in: SlotGroup) -> Iterator[SlotGroup]:
    """The stand-in; its descriptors are closed afterwards."""
    yield stand_in
    stand_in.close()


def content(slot: SlotGroup, name: str) -> str:
    """What was written into a file of the job's group (the stand-in keeps the longer of old and new text)."""
    assert slot.unified
    return (slot.unified / "job" / name).read_text()


def test_limits_go_to_the_job_alone(made: SlotGroup) -> None:
    """Stand-in files: limits are written to the job's group, as asked, and swap is none."""
    assert made.enforces == {"kill", "freeze", "pids", "memory", "cpu"}
    made.set_limits(pids=100, memory_bytes=512 << 20, cpus=1.5)
    assert content(made, "pids.max") == "100"
    assert content(made, "memory.max") == str(512 << 20)
    assert content(made, "memory.swap.max").startswith("0")
    assert content(made, "cpu.max").startswith("150000 100000")


def test_counters_are_since_the_reset(made: SlotGroup) -> None:
    """Stand-in files: what was counted before the reset is not told of the next attempt."""
    assert made.unified
    job = made.unified / "job"
    (job / "memory.events").write_text("low 0\noom 0\noom_kill 5")
    (job / "pids.events").write_text("max 4")
    made.reset()
    assert (made.events().oom_kills, made.events().pids_hits) == (0, 0)
    (job / "memory.events").write_text("low 0\noom 0\noom_kill 7")
    (job / "cpu.stat").write_text("usage_usec 2500000")
    events = made.events()
    assert (events.oom_kills, events.pids_hits, events.cpu_s) == (2, 0, 2.5)


@needs_root
def test_root_without_delegation_uses_the_top(node_name: str) -> None:
    """On a v2 hierarchy alone, root's slots lie in the top's ``ringfence`` folder and the agent is not moved."""
    found = Hierarchies.find()
    if found.unified is None:
        pytest.skip("no cgroup v2 hierarchy here")
    before = Path("/proc/self/cgroup").read_text()
    groups = NodeGroups.open(node_name, hierarchies=Hierarchies(found.unified, {}, None))
    assert groups is not None
    try:
        slot = groups.slot(1)
        assert slot.unified == found.unified / "ringfence" / node_name / "slot1"
        assert groups.backend == "v2"
        assert slot.enforces == groups.enforces >= {"kill", "freeze"}
        assert Path("/proc/self/cgroup").read_text() == before
    finally:
        groups.close()


# Joins a group with a controller, as a unit's main process would be, and opens its node there.
ASIDE = """
from pathlib import Path
from node_agent.containment import cgroup, slotgroup
from node_agent.containment.cgroupfs import Hierarchies
cgroup.LIMITING = slotgroup.LIMITING = ("hugetlb",)
cgroup._delegated = lambda group: group == Path(sys.argv[1])
(Path(sys.argv[1]) / "cgroup.procs").write_text("0")
for _ in range(2):
    found = Hierarchies.find()
    groups = cgroup.NodeGroups.open("n", hierarchies=Hierarchies(found.unified, {}, found.own))
    slot = groups.slot(0)
    print(found.own.name, groups.place.controllers, slot.unified.relative_to(sys.argv[1]))
    print((slot.unified / "job" / "cgroup.controllers").read_text())
    groups.close()
"""


@needs_root
def test_agent_moves_aside_for_controllers(node_name: str) -> None:
    """A real controller (hugetlb, the only one here) is on for the job's group, which needs the agent out of the way.

    A second start from the place to which the first moved finds the same groups and nests nothing.
    """
    unified = Hierarchies.find().unified
    if unified is None or "hugetlb" not in (unified / "cgroup.controllers").read_text().split():
        pytest.skip("no controller of the v2 hierarchy here to try it with")
    control = unified / "cgroup.subtree_control"
    was_on = "hugetlb" in control.read_text()
    control.write_text("+hugetlb")
    mine = unified / f"trial-{node_name}"
    mine.mkdir()
    try:
        lines = apart(ASIDE, str(mine)).split("\n")
        assert lines[0] == f"{mine.name} ('hugetlb',) jobs/n/slot0"
        assert lines[3] == "agent ('hugetlb',) jobs/n/slot0"
        assert (lines[1], lines[4]) == ("hugetlb", "hugetlb")
    finally:
        for each in (mine / "agent", mine / "jobs" / "n", mine / "jobs", mine):
            if each.exists():
                each.rmdir()
        if not was_on:
            control.write_text("-hugetlb")


def test_mounts_are_found_by_their_kind(tmp_path: Path) -> None:
    """The table of mounts tells the v2 hierarchy, the v1 controllers and the own group; names with blanks are read."""
    (tmp_path / "mountinfo").write_text(
        "30 1 0:26 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n"
        "31 1 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 1 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    )
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/x\n0::/user.slice/app.scope\n")
    found = Hierarchies.find(tmp_path)
    assert found.unified == Path("/sys/fs/cgroup/uni fied")
    assert found.own == Path("/sys/fs/cgroup/uni fied/user.slice/app.scope")
    assert set(found.v1) == {"cpu", "cpuacct"}


def test_own_group_outside_the_mount_is_unknown(tmp_path: Path) -> None:
    """A mount of a sub-tree that does not hold the own group gives none, rather than a wrong path."""
    (tmp_path / "mountinfo").write_text("30 1 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup").write_text("0::/system.slice\n")
    assert Hierarchies.find(tmp_path).own is None
    (tmp_path / "cgroup").write_text("0::/docker/abc/inner\n")
    assert Hierarchies.find(tmp_path).own == Path("/sys/fs/cgroup/inner")
