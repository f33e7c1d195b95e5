"""Memory where nobody counts it (attack 33): the slots' file systems fit in half the host, or there are fewer slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent import admission, ground, room
from node_agent.admission import Enforcement
from node_agent.settings import AgentSettings
from runner.wire.grants import Grants
from runner.wire.states import RefuseReason
from tests.agent.build import job

GIB = 1 << 30


@given(ram=st.integers(1 * GIB, 4096 * GIB), slots=st.integers(1, 1024))
def test_attack_33_without_a_cgroup_all_slots_fit_in_half_the_memory(ram: int, slots: int) -> None:
    """Whatever the host and the setting: slots that fit have a real workspace, and their sum is bounded."""
    fit = min(slots, room.most_slots(ram))
    found = room.split(ram, fit, counted=False)
    assert found.disk >= room.LEAST_DISK_BYTES
    assert fit * (found.disk + found.tmp + found.shm) <= ram // 2
    assert found.most_disk is not None
    assert found.disk <= found.most_disk
    assert fit * (found.most_disk + found.tmp + found.shm) <= ram // 2
    assert found.memory is None
    assert found.data == min(2 * GIB, ram // fit)


def test_with_a_cgroup_every_job_has_a_total() -> None:
    """min(2 GiB, RAM / slots), files in memory included, and the full workspace."""
    assert room.split(24 * GIB, 4, counted=True) == room.Room(GIB, 256 << 20, 64 << 20, 2 * GIB)
    assert room.split(24 * GIB, 64, counted=True).memory == 24 * GIB // 64


def test_a_node_lowers_its_slots_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB of memory, 64 slots, no cgroup: as many as fit, with a note that names both numbers; else unchanged."""
    monkeypatch.setattr(ground, "_ram", lambda: 2 * GIB)
    asked = AgentSettings(home=Path("/h"), name="n1", slots=64)
    lowered, (note,) = ground.fitting(asked, counted=False)
    assert lowered.slots == room.most_slots(2 * GIB) < 64
    assert f"{lowered.slots} slots instead of 64" in note
    assert ground.fitting(asked, counted=True) == (asked, ())


def test_an_asked_workspace_beyond_the_room_is_refused() -> None:
    """What nobody counts is not promised: unenforceable, with the size that is possible."""
    host = Enforcement("B", most_disk_bytes=512 << 20)
    denial = admission._enforceable(job(grants=Grants(disk_bytes=GIB)), host)
    assert denial is not None
    assert (denial.reason, "512 MiB" in denial.message) == (RefuseReason.UNENFORCEABLE, True)
    assert admission._enforceable(job(grants=Grants(disk_bytes=100 << 20)), host) is None
