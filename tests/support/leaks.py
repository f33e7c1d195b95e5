"""What a test may not leave behind, seen before and after it. Called by the autouse fixture in conftest.

Must stay cheap: one pass over a few small /proc files a test; only a test that leaks pays for a second look.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

import redis

from runner.wire import keys
from tests.support import scratch
from tests.support.wait import wait_until

__all__ = ["Snapshot", "cgroups", "complaints", "mind", "mounts", "snapshot", "spare", "stale_keys"]

SETTLE_TIMEOUT_S = 2.0
CGROUP_ROOT = Path("/sys/fs/cgroup")

# Keys that live as long as the fleet. RQ's own come first; ours stand in the key table, which says who owns each.
PERMANENT = (
    "rq:queues",
    "rq:queue:*",
    "rq:workers",
    "rq:workers:*",
    "rq:wip:*",
    "rq:finished:*",
    "rq:failed:*",
    "rq:canceled:*",
    "rq:scheduled:*",
    "rq:deferred:*",
)
OURS = (
    "rf:seq",
    "rf:lanes",
    "rf:leases",
    "rf:claims:*",
    "rf:nodes",
    "rf:cards",
    "rf:ctl:*",
    "rf:act:*",
)
# A job that has not ended is owned by its lane; one that has ended must be on its way out.
ENDED = frozenset({b"finished", b"failed", b"stopped", b"canceled"})
JOB_PREFIX = "rq:job:"
#: Children and descriptors that the whole test process shares.
_spared_pids: set[str] = set()
_spared_fds: set[str] = set()

# Arguments: the prefix of job hashes. Reply: key, status (or ""), key, status, ... of all keys without a TTL.
KEYS_WITHOUT_TTL = """
local found = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if redis.call('PTTL', key) == -1 then
    found[#found + 1] = key
    local status = false
    if string.sub(key, 1, #ARGV[1]) == ARGV[1] then status = redis.call('HGET', key, 'status') end
    found[#found + 1] = status or ''
  end
end
return found
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this process and this machine hold at one moment, each as a set of readable names."""

    descriptors: frozenset[str]
    children: frozenset[str]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    files: frozenset[str]


def snapshot(tag: str) -> Snapshot:
    """Look at everything that a test could leave; control groups only of nodes whose name holds ``tag``."""
    return Snapshot(
        descriptors=_descriptors(),
        children=_children(),
        mounts=mounts(),
        cgroups=frozenset(path for path in cgroups() if tag in path),
        files=frozenset(name for name in os.listdir(scratch.root()) if not name.startswith("pytest-of-")),
    )


def spare(pid: int, descriptor: int) -> None:
    """Take no offence at a child, and the descriptor that leads to it, that this test process keeps to its end."""
    _spared_pids.add(str(pid))
    _spared_fds.add(str(descriptor))


def mind(pid: int, descriptor: int) -> None:
    """Take offence again: what was spared has ended, and its numbers may be given to others."""
    _spared_pids.discard(str(pid))
    _spared_fds.discard(str(descriptor))


def complaints(before: Snapshot, look: Callable[[], Snapshot]) -> list[str]:
    """Say what is there after a test that was not there before; what is just going away gets a moment for it."""
    if not _grown(before, look()):
        return []
    gc.collect()
    try:
        wait_until(lambda: not _grown(before, look()), "what a test left to go away", SETTLE_TIMEOUT_S)
    except AssertionError:
        return _grown(before, look())
    return []


def stale_keys(client: redis.Redis) -> list[str]:
    """Return the keys of the store that would stay for ever and that nobody owns."""
    found = cast("list[bytes]", client.eval(KEYS_WITHOUT_TTL, 0, JOB_PREFIX))
    pairs = zip(found[::2], found[1::2], strict=True)
    return sorted(key for raw, status in pairs if not _owned(key := os.fsdecode(raw), status))


def cgroups() -> list[str]:
    """Return every control group of a node on this machine, in every hierarchy."""
    root = str(CGROUP_ROOT)
    tops = [f"{root}/ringfence", *(f"{path}/ringfence" for path in _folders(root))]
    return [path for top in tops for path in _folders(top)]


def _folders(place: str) -> list[str]:
    try:
        with os.scandir(place) as found:
            return [entry.path for entry in found if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _owned(key: str, status: bytes) -> bool:
    if key.startswith(JOB_PREFIX):
        return status not in ENDED and bool(status)
    ours: tuple[str, ...] = getattr(keys, "PERMANENT", OURS)
    return any(fnmatchcase(key, pattern) for pattern in (*PERMANENT, *ours))


def mounts(pid: int | str = "self") -> frozenset[str]:
    """Every mount of the host but those in the folders of other test processes, of any user, beside this one."""
    own = scratch.root()
    found = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    points = [(line.split()[4], line) for line in found]
    return frozenset(line for point, line in points if Path(point).is_relative_to(own) or "/rf-" not in point)


def _descriptors() -> frozenset[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        if number in _spared_fds:
            continue
        try:
            found.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return frozenset(found)


def _children() -> frozenset[str]:
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that was just ending
        for pid in pids:
            if pid in _spared_pids:
                continue
            try:
                found.add(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})")
            except (FileNotFoundError, ProcessLookupError):
                continue
    return frozenset(found)


def _grown(before: Snapshot, after: Snapshot) -> list[str]:
    found = []
    # A number may be closed and opened again on something else: only growth is a leak.
    if len(after.descriptors) > len(before.descriptors):
        found += [f"open descriptor: {name}" for name in sorted(after.descriptors - before.descriptors)]
    for what, old, new in (
        ("child process", before.children, after.children),
        ("mount", before.mounts, after.mounts),
        ("control group", before.cgroups, after.cgroups),
        ("temporary file", before.files, after.files),
    ):
        found += [f"{what}: {name}" for name in sorted(new - old)]
    return found
