"""How much memory, and how much of the file systems in memory, each slot of a node may have.

Called by the agent's start. Pure. Must never promise the slots together more than half the host where nobody counts:
without a memory cgroup a job's tmpfs is charged to nobody, and would fill the host's memory (attack 33).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Room", "most_slots", "split"]

#: Memory of one job, at most, unless it asks for another total.
MEMORY_BYTES: Final = 2 << 30
#: /work, /tmp and /dev/shm of a job that asks for nothing; /tmp and /dev/shm are these parts of /work on small hosts.
DISK_BYTES: Final = 1 << 30
TMP_BYTES, TMP_PART = 256 << 20, 4
SHM_BYTES, SHM_PART = 64 << 20, 8
#: A workspace is never smaller: a host that has no room for so many has fewer slots.
LEAST_DISK_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of one slot. ``memory``: the total of a job; None where nobody counts.

    Then ``data`` bounds one process, and ``most_disk`` what a job may ask for.
    """

    disk: int
    tmp: int
    shm: int
    memory: int | None
    data: int | None = None
    most_disk: int | None = None


def split(ram: int, slots: int, *, counted: bool) -> Room:
    """Return a slot's room. ``counted``: a memory cgroup counts every job, its files in memory included."""
    share = ram // slots
    memory = min(MEMORY_BYTES, share)
    if counted:
        return Room(DISK_BYTES, TMP_BYTES, SHM_BYTES, memory)
    half = share // 2
    disk = min(DISK_BYTES, _workspace(half))
    tmp, shm = min(TMP_BYTES, disk // TMP_PART), min(SHM_BYTES, disk // SHM_PART)
    return Room(disk, tmp, shm, None, memory, half - tmp - shm)


def most_slots(ram: int) -> int:
    """Return for how many slots half the host's memory is room enough, where nobody counts; at least one."""
    least = LEAST_DISK_BYTES + LEAST_DISK_BYTES // TMP_PART + LEAST_DISK_BYTES // SHM_PART
    return max(1, ram // 2 // least)


def _workspace(whole: int) -> int:
    """Return the /work of a slot whose three file systems have ``whole`` bytes together."""
    return whole * TMP_PART * SHM_PART // (TMP_PART * SHM_PART + SHM_PART + TMP_PART)
