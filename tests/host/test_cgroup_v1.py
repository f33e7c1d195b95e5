"""A host without cgroup v2: leaves of the v1 controllers alone, killed by a loop over their members."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.cgroupfs import Hierarchies
from node_agent.containment.errors import GroupError
from node_agent.containment.slotgroup import SlotGroup
from tests.host.support import join, sleepers
from tests.support.wait import wait_until

#: Forks a successor in a session of its own each time and ends: a target that never stands still. It is capped.
RELAY = """
import os, sys
sys.stdin.read(1)
for _ in range(4000):
    if os.fork():
        os._exit(0)
    os.setsid()
"""


@pytest.fixture
def groups(node_name: str) -> Iterator[NodeGroups]:
    """A node's groups with the v2 hierarchy left out."""
    found = NodeGroups.open(node_name, hierarchies=Hierarchies(None, Hierarchies.find().v1, None))
    if found is None:
        pytest.skip("no writable v1 controller for this user here")
    yield found
    found.close()


@pytest.fixture
def slot(groups: NodeGroups) -> SlotGroup:
    """One slot without v2 groups."""
    return groups.slot(0)


def test_v1_alone_can_kill_and_limit_but_not_freeze(groups: NodeGroups, slot: SlotGroup) -> None:
    """Kill is there, freeze is not, and asking for it is an error: the v1 freezer blocks SIGKILL."""
    assert groups.backend == "v1"
    assert "kill" in slot.enforces
    assert "freeze" not in slot.enforces
    assert (slot.mould_fd, slot.job_fd) == (None, None)
    with pytest.raises(GroupError, match="can't be frozen"):
        slot.freeze(True)


def test_every_member_is_killed(slot: SlotGroup) -> None:
    """The loop ends mould and job, and the leaf tells when it is empty."""
    with sleepers(4) as found:
        for process in found:
            join(slot.join_paths, process.pid)
        assert (slot.populated(), slot.count()) == (True, 3)
        slot.kill()
        assert [process.wait(5) for process in found] == [-9] * 4
    wait_until(lambda: not slot.populated(), "the leaf to be empty")


def test_relays_are_caught(slot: SlotGroup) -> None:
    """Processes that fork a successor and end at once are caught under a pids limit."""
    if "pids" not in slot.enforces:
        pytest.skip("no pids controller for this user here")
    slot.set_limits(pids=32, memory_bytes=None, cpus=None)
    started = [subprocess.Popen([sys.executable, "-I", "-c", RELAY], stdin=subprocess.PIPE) for _ in range(4)]
    for process in started:
        join(slot.join_paths, process.pid)
    for process in started:
        process.communicate(b"x")
    slot.kill()
    wait_until(lambda: not slot.populated(), "the leaf to be empty")
    slot.remove()
    assert not any(leaf.exists() for leaf in slot.leaves.values())


def test_leftovers_are_swept(node_name: str) -> None:
    """The next agent of the name kills and removes what a killed one left."""
    found = Hierarchies(None, Hierarchies.find().v1, None)
    first = NodeGroups.open(node_name, hierarchies=found)
    if first is None:
        pytest.skip("no writable v1 controller for this user here")
    with sleepers(2) as left:
        for process in left:
            join(first.slot(0).join_paths, process.pid)
        first.slot(0).close()
        assert first._lock is not None
        os.close(first._lock)
        again = NodeGroups.open(node_name, hierarchies=found)
        assert again is not None
        assert again.sweep() == ["cgroup slot0: 2 processes killed"]
        assert [process.wait(5) for process in left] == [-9, -9]
        again.close()
