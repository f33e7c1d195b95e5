"""What the machine does: processor time of process trees and of everybody, memory of processes. Reads /proc alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processes() -> dict[int, tuple[int, float]]:
    """Return every process's parent and its processor seconds, those of its waited-for children included."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/stat").read_text().rsplit(") ", 1)[1].split()
        except OSError:
            continue
        found[int(name)] = (int(words[1]), sum(map(int, words[11:15])) * _TICK_S)
    return found


def tree_of(roots: Iterable[int]) -> set[int]:
    """Return the pids of these processes and of all below them."""
    known = processes()
    tree = set(roots)
    while more := {pid for pid, (parent, _) in known.items() if parent in tree} - tree:
        tree |= more
    return tree


def tree_cpu_s(roots: Iterable[int]) -> float:
    """Return the processor seconds of these processes and of all below them, the dead ones included."""
    known = processes()
    return sum(known[pid][1] for pid in tree_of(roots) if pid in known)


def own_cpu_s(pid: int) -> float:
    """Return the processor seconds of one process without its children, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


def busy_s() -> float:
    """Return the seconds in which any processor did anything."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) * _TICK_S


def pss_kib(pid: int) -> int:
    """Return the proportional memory of one process, 0 if it is gone or hides it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def uids_running(first: int, count: int) -> int:
    """Return how many processes run under the ``count`` uids from ``first`` on."""
    found = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            found += first <= os.stat(f"/proc/{name}").st_uid < first + count
        except OSError:
            continue
    return found
