"""What a running agent holds: descriptors, processes, groups, mounts, memory, locks. Called by the tests that look for
leaks over a series of jobs.

Must only read: it looks at another process through /proc.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.support import leaks

__all__ = ["Holdings", "descendants", "look"]


@dataclass(frozen=True, slots=True)
class Holdings:
    """One look at an agent and at all that it started."""

    descriptors: int
    processes: int
    groups: int
    mounts: int
    uid_locks: int
    agent_kb: int
    tree_kb: int

    def __str__(self) -> str:
        """Return one line for a report."""
        return (
            f"{self.descriptors} descriptors, {self.processes} processes, {self.groups} groups, {self.mounts} mounts, "
            f"{self.uid_locks} uids held, agent {self.agent_kb} kB, all {self.tree_kb} kB"
        )


def look(pid: int, node: str) -> Holdings:
    """Look at the agent with this pid, whose node has this name."""
    links = _links(pid)
    tree = descendants(pid)
    return Holdings(
        descriptors=len(links),
        processes=len(tree),
        groups=sum(1 for top in leaks.cgroups() if Path(top).name.startswith(node) for path in _folders(Path(top))),
        mounts=len(leaks.mounts(pid)),
        uid_locks=sum("/ringfence/uids/" in link for link in links),
        agent_kb=_pss_kb(pid),
        tree_kb=sum(map(_pss_kb, tree)),
    )


def descendants(pid: int) -> list[int]:
    """Return every process below one."""
    found, todo = [], [pid]
    while todo:
        each = todo.pop()
        try:
            children = [int(word) for word in Path(f"/proc/{each}/task/{each}/children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += children
        todo += children
    return found


def _links(pid: int) -> list[str]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


def _folders(top: Path) -> list[Path]:
    return [top, *(Path(folder) / name for folder, names, _ in os.walk(top) for name in names)]


def _pss_kb(pid: int) -> int:
    """Return the memory of a process with what it shares counted in parts; 0 where this user may not know."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
