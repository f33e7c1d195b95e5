"""One slot's cgroups: limits, kill, freeze, counters. One shape over v2, v1 and the two side by side.

Called by cgroup.py (makes it) and by the slot (uses it for each attempt). Must never move a process: the mould joins
once by ``join_paths`` and workers are born in ``job_fd`` (a migration costs 6-14 ms, notes/performance.md).

v2: ``slot/{mould,job}``; only ``job`` is limited and frozen, ``cgroup.kill`` acts on ``slot``, so a frozen job's mould
still sees its lifeline (attack 36). v1: one leaf for both in each controller, hence one pid more than asked.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node_agent.containment import cgroupfs
from node_agent.containment.counters import Counters
from node_agent.containment.errors import GroupError, LimitBusy

__all__ = ["LIMITING", "GroupEvents", "SlotGroup"]

#: Controllers that limit; ``enforces`` of a slot names those it has, besides ``kill`` and ``freeze``.
LIMITING = ("pids", "memory", "cpu")
PERIOD_US = 100_000
#: v2 weight of jobs against the default of 100; v1 shares against 1024.
CPU_WEIGHT = 10
CPU_SHARES = 102
#: The default: of all jobs together against the host's other work. With less, moulds on a busy host come too late to
#: their deadlines, and jobs hardly start.
USUAL_SHARES = 1024
#: For a slot that is being killed, and for all while one is: ten times the default.
DYING_WEIGHT = 1000
DYING_SHARES = 10_240


@dataclass(frozen=True, slots=True)
class GroupEvents:
    """What the kernel counted since the last reset. ``peak_bytes`` is 0 where this kernel can't tell."""

    oom_kills: int = 0
    pids_hits: int = 0
    peak_bytes: int = 0
    cpu_s: float = 0.0


class SlotGroup:
    """The groups of one slot. Made by ``NodeGroups.slot``; not for concurrent use."""

    def __init__(self, unified: Path | None, leaves: dict[str, Path], controllers: Iterable[str] = ()) -> None:
        """Make the groups. ``controllers``: those that are on for v2; ``leaves``: the v1 leaf of each controller."""
        self.unified = unified
        self.leaves = leaves
        self._v2 = frozenset(controllers) if unified else frozenset[str]()
        limits = {name for name in LIMITING if name in self._v2 or name in leaves}
        self.enforces = frozenset({"kill", *limits} | ({"freeze"} if unified else set()))
        self.mould_fd: int | None = None
        self.job_fd: int | None = None
        self._files: dict[Path, int] = {}
        self._written: dict[Path, str] = {}
        self._limits: tuple[int, int | None, float | None] | None = None
        self._counting = Counters({})
        self._base = GroupEvents()
        #: The counters at the last look: after an attempt's proof nothing but the next attempt moves them.
        self._last: GroupEvents | None = None
        self._frozen = False
        self._hurried = False
        self._make()

    @property
    def join_paths(self) -> tuple[str, ...]:
        """The ``cgroup.procs`` files into which the mould-to-be writes ``0`` before it becomes the mould."""
        groups = ([self.unified / "mould"] if self.unified else []) + list(dict.fromkeys(self.leaves.values()))
        return tuple(str(group / "cgroup.procs") for group in groups)

    def set_limits(self, *, pids: int, memory_bytes: int | None, cpus: float | None) -> None:
        """Write the totals of the next attempt; None takes a limit away.

        Without a pids controller ``pids`` is left to RLIMIT_NPROC (see ``enforces``).

        Raises:
            LimitBusy: the leaf still holds more memory than the limit; call ``renew`` for a fresh leaf.
            GroupError: a memory or cpu total is asked that this host can't enforce.
        """
        limits = (pids, memory_bytes, cpus)
        if limits == self._limits:
            return
        self._limits = None
        for name, asked in (("memory", memory_bytes), ("cpu", cpus)):
            if asked is not None and name not in self.enforces:
                raise GroupError(f"no {name} controller here, so a {name} total can't be enforced")
        try:
            self._limit_pids(pids)
            self._limit_memory(memory_bytes)
            self._limit_cpu(cpus)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise LimitBusy("the leaf holds more memory than the new limit: make a new mould and leaf") from error
            raise GroupError(f"a limit can't be written: {error}") from error
        self._limits = limits

    def kill(self) -> None:
        """Kill every process of the slot, the mould included. Not the proof: ask ``populated`` until it is False."""
        self._hurry()
        if self.unified:
            self._ignore_gone(self.unified / "cgroup.kill", "1")
        else:
            for leaf in self.leaves.values():
                cgroupfs.sweep_members(leaf)

    def calm(self) -> None:
        """Take back what ``kill`` gave the dying: call it after the proof. Idempotent."""
        if self._hurried:
            self._hurried = False
            with suppress(OSError):
                self._weigh(CPU_SHARES, CPU_WEIGHT)
                self._weigh_all(USUAL_SHARES)

    def _hurry(self) -> None:
        """Lift CPU quota and low weight, the one of all jobs too: the dying free their memory on this account.

        A hundred processes took 0.6 s to die under a quota of 0.05 CPUs, and 2 s beside ten busy sessions of the host.
        """
        if self._hurried:
            return
        self._hurried = True
        self._limits = None
        with suppress(OSError):
            self._limit_cpu(None)
            self._weigh(DYING_SHARES, DYING_WEIGHT)
            self._weigh_all(DYING_SHARES)

    def populated(self) -> bool:
        """Return whether any process of the slot is left, the mould included."""
        if self.unified:
            try:
                return cgroupfs.flat(self._read(self.unified / "cgroup.events")).get("populated", 0) != 0
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENODEV):
                    return False
                raise
        return any(cgroupfs.members(leaf) for leaf in self.leaves.values())

    def count(self) -> int:
        """Return the number of the job's processes now, the mould left out."""
        if self.unified:
            beside_mould = max(0, len(cgroupfs.members(self.unified / "mould")) - 1)
            return beside_mould + len(cgroupfs.members(self.unified / "job"))
        return max(0, max((len(cgroupfs.members(leaf)) for leaf in self.leaves.values()), default=0) - 1)

    def freeze(self, frozen: bool) -> None:
        """Stop or resume the job (never its mould). Raises GroupError where there is no v2 hierarchy."""
        if not self.unified:
            raise GroupError("no cgroup v2 hierarchy here, so a job can't be frozen")
        cgroupfs.put(self.unified / "job" / "cgroup.freeze", "1" if frozen else "0")
        self._frozen = frozen

    def frozen(self) -> bool:
        """Return whether every process of the job stands still now; False where there is no v2 hierarchy."""
        if not self.unified:
            return False
        return cgroupfs.flat(self._read(self.unified / "job" / "cgroup.events")).get("frozen", 0) != 0

    def events(self) -> GroupEvents:
        """Return what happened since the last ``reset``."""
        now = self._last = self._counters()
        return GroupEvents(
            oom_kills=max(0, now.oom_kills - self._base.oom_kills),
            pids_hits=max(0, now.pids_hits - self._base.pids_hits),
            peak_bytes=now.peak_bytes,
            cpu_s=max(0.0, now.cpu_s - self._base.cpu_s),
        )

    def reset(self) -> None:
        """Start counting anew for the next attempt, and thaw."""
        self.calm()
        if self._frozen:
            self.freeze(False)
        self._counting.reset()
        self._base = self._last or self._counters()
        self._last = None

    def renew(self) -> None:
        """Replace every group of the slot by a fresh one. Only when ``populated`` is False.

        Raises:
            GroupError: the kernel still holds one of them.
        """
        self.remove()
        self._make()

    def remove(self) -> None:
        """Remove the slot's groups and whatever was made below them. Idempotent.

        Raises:
            GroupError: a group is still busy after the retries; a process of the slot lives.
        """
        self.close()
        groups = [*dict.fromkeys(self.leaves.values()), *([self.unified] if self.unified else [])]
        stuck = [str(group) for group in groups if not cgroupfs.remove_group(group)]
        if stuck:
            raise GroupError(f"still busy: {', '.join(stuck)}")

    def close(self) -> None:
        """Close the descriptors and leave the groups. Idempotent; ``renew`` opens them again."""
        self.calm()
        for fd in (self.mould_fd, self.job_fd, *self._files.values()):
            if fd is not None:
                os.close(fd)
        self.mould_fd = self.job_fd = None
        self._counting.close()
        self._limits = self._last = None
        self._files.clear()
        self._written.clear()
        self._frozen = False

    def _make(self) -> None:
        if self.unified:
            self.unified.mkdir(parents=True, exist_ok=True)
            for name in self._v2:
                cgroupfs.put(self.unified / "cgroup.subtree_control", f"+{name}")
            for name in ("mould", "job"):
                (self.unified / name).mkdir(exist_ok=True)
            self.mould_fd = os.open(self.unified / "mould", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self.job_fd = os.open(self.unified / "job", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for leaf in self.leaves.values():
            leaf.mkdir(parents=True, exist_ok=True)
        self._weigh(CPU_SHARES, CPU_WEIGHT)
        self._counting = Counters(self._counter_files(), "peak_bytes")
        self._base = self._counters()

    def _limit_pids(self, pids: int) -> None:
        if "pids" in self.leaves:
            self._write(self.leaves["pids"] / "pids.max", str(pids + 1))
        elif "pids" in self._v2:
            self._write(self._job() / "pids.max", str(pids))

    def _limit_memory(self, memory_bytes: int | None) -> None:
        if "memory" in self.leaves:
            leaf = self.leaves["memory"]
            value = "-1" if memory_bytes is None else str(memory_bytes)
            if self._written.get(leaf / "memory.limit_in_bytes") == value:
                return
            # Memory + swap may never be below memory, so it is lifted first and put back last.
            swap = leaf / "memory.memsw.limit_in_bytes"
            if swap.exists():
                self._write(swap, "-1")
            self._write(leaf / "memory.limit_in_bytes", value)
            if swap.exists():
                self._write(swap, value)
        elif "memory" in self._v2:
            self._write(self._job() / "memory.max", "max" if memory_bytes is None else str(memory_bytes))
            if (self._job() / "memory.swap.max").exists():
                self._write(self._job() / "memory.swap.max", "max" if memory_bytes is None else "0")

    def _limit_cpu(self, cpus: float | None) -> None:
        quota = None if cpus is None else max(1000, int(cpus * PERIOD_US))
        if "cpu" in self.leaves:
            self._write(self.leaves["cpu"] / "cpu.cfs_quota_us", "-1" if quota is None else str(quota))
        elif "cpu" in self._v2:
            self._write(self._job() / "cpu.max", f"{'max' if quota is None else quota} {PERIOD_US}")

    def _weigh(self, shares: int, weight: int) -> None:
        if "cpu" in self.leaves:
            self._write(self.leaves["cpu"] / "cpu.shares", str(shares))
        if "cpu" in self._v2 and self.unified:
            self._write(self.unified / "cpu.weight", str(weight))

    def _weigh_all(self, shares: int) -> None:
        """Set the weight of the v1 group of all nodes of this host against its other work. Raises OSError."""
        if "cpu" in self.leaves:
            cgroupfs.put(self.leaves["cpu"].parent.parent / "cpu.shares", str(shares))

    def _counter_files(self) -> dict[str, tuple[Path, str]]:
        """Return where each number stands, in the leaf or in ``job``, and its key there."""
        known = (
            ("oom_kills", "memory", "memory.oom_control", "memory.events", "oom_kill"),
            ("pids_hits", "pids", "pids.events", "pids.events", "max"),
            ("peak_bytes", "memory", "memory.max_usage_in_bytes", "memory.peak", ""),
        )
        found = {}
        for name, controller, v1, v2, key in known:
            if controller in self.leaves:
                found[name] = (self.leaves[controller] / v1, key)
            elif controller in self._v2:
                found[name] = (self._job() / v2, key)
        # Every v2 group but the root counts cpu time, with the controller or without.
        if self.unified:
            found["cpu"] = (self._job() / "cpu.stat", "usage_usec")
        elif "cpuacct" in self.leaves:
            found["cpu"] = (self.leaves["cpuacct"] / "cpuacct.usage", "")
        return found

    def _counters(self) -> GroupEvents:
        count = self._counting.read()
        return GroupEvents(
            oom_kills=count.get("oom_kills", 0),
            pids_hits=count.get("pids_hits", 0),
            peak_bytes=count.get("peak_bytes", 0),
            cpu_s=count.get("cpu", 0) / (1e6 if self.unified else 1e9),
        )

    def _job(self) -> Path:
        if not self.unified:
            raise GroupError("no cgroup v2 hierarchy here")
        return self.unified / "job"

    def _read(self, path: Path) -> str:
        fd = self._files.get(path)
        if fd is None:
            fd = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return cgroupfs.read(fd)

    def _write(self, path: Path, value: str) -> None:
        if self._written.get(path) != value:
            self._written.pop(path, None)
            cgroupfs.put(path, value)
            self._written[path] = value

    @staticmethod
    def _ignore_gone(path: Path, value: str) -> None:
        with suppress(FileNotFoundError):
            cgroupfs.put(path, value)
