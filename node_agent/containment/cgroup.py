"""The cgroups of one node agent: finds a place that can be written, keeps it for one agent, cleans it.

Called by the agent at start (open, sweep, slot) and stop (close), and by the probe. Must never touch a group outside
its own name: several agents share a host.

Two places, chosen by trying:
    v1 or hybrid   ``UNIFIED/ringfence/NAME/slotN`` for kill and freeze, ``CONTROLLER/ringfence/NAME/slotN`` for limits
    pure v2        delegated: ``OWN/jobs/NAME/slotN`` with the agent itself moved to ``OWN/agent`` (a group that has
                   controllers may hold no process of its own); root without delegation: ``ROOT/ringfence/NAME/slotN``
Source: cgroups(7), Documentation/admin-guide/cgroup-v2.rst ("Delegation", "No Internal Process Constraint").
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from node_agent.containment import cgroupfs
from node_agent.containment.cgroupfs import Hierarchies
from node_agent.containment.errors import GroupBusy, GroupError
from node_agent.containment.slotgroup import CPU_WEIGHT, LIMITING, USUAL_SHARES, GroupEvents, SlotGroup

__all__ = ["GroupEvents", "NodeGroups", "SlotGroup"]

TOP = "ringfence"
AGENT_WEIGHT = 1000
SWEEP_TIMEOUT_S = 10.0
MAKE_TRIES = 50
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.ENOTSUP, errno.ENOSPC)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this agent's slots go. ``unified`` is None without a writable v2 hierarchy; ``controllers`` are v2's."""

    unified: Path | None
    v1: dict[str, Path]
    controllers: tuple[str, ...] = ()

    @property
    def folders(self) -> list[Path]:
        """Every folder with this agent's name, each once."""
        return [*([self.unified] if self.unified else []), *dict.fromkeys(self.v1.values())]


class NodeGroups:
    """All slots of one node name; the name is locked on this host until ``close`` or the end of the process."""

    def __init__(self, place: Place, lock: int) -> None:
        self.place = place
        self._lock: int | None = lock
        self._slots: dict[int, SlotGroup] = {}

    @classmethod
    def open(cls, node: str, *, home: Path | None = None, hierarchies: Hierarchies | None = None) -> NodeGroups | None:
        """Return this node's groups, or None where no cgroup can be written.

        ``home`` keeps agents of equal name but different homes apart (its hash becomes part of the folder's name).

        Raises:
            GroupBusy: another process holds this node's groups.
        """
        found = hierarchies or Hierarchies.find()
        name = node if home is None else f"{node}-{hashlib.sha256(os.fsencode(os.path.realpath(home))).hexdigest()[:8]}"
        while True:
            place = _place(found, name)
            if not place.folders:
                return None
            lock = _lock(place.folders[0])
            if lock is not None:
                return cls(place, lock)

    @property
    def enforces(self) -> frozenset[str]:
        """What every slot of this node enforces: of kill, freeze, pids, memory, cpu."""
        limits = {name for name in LIMITING if name in self.place.controllers or name in self.place.v1}
        return frozenset({"kill", *limits} | ({"freeze"} if self.place.unified else set()))

    @property
    def backend(self) -> Literal["v2", "hybrid", "v1"]:
        """``v2``, ``hybrid`` or ``v1``."""
        if not self.place.unified:
            return "v1"
        return "hybrid" if self.place.v1 else "v2"

    def slot(self, index: int) -> SlotGroup:
        """Return the slot's groups, made at the first call. Raises GroupError."""
        if index not in self._slots:
            name = f"slot{index}"
            try:
                self._slots[index] = SlotGroup(
                    self.place.unified / name if self.place.unified else None,
                    {controller: folder / name for controller, folder in self.place.v1.items()},
                    self.place.controllers,
                )
            except OSError as error:
                raise GroupError(f"the groups of slot {index} can't be made: {error}") from error
        return self._slots[index]

    def drop(self, index: int) -> None:
        """Remove a slot that no process is in any more. Raises GroupError if one is."""
        slot = self._slots.pop(index, None)
        if slot is not None:
            slot.remove()

    def neighbours(self, prefix: str) -> list[str]:
        """Return the other names beside this one that begin so, alive or left behind."""
        folders = [child.name for folder in self.place.folders for child in _children(folder.parent)]
        own = {folder.name for folder in self.place.folders}
        return sorted({name for name in folders if name.startswith(prefix)} - own)

    def sweep(self) -> list[str]:
        """Kill and remove every slot that a former agent of this name left; say what was found.

        Blocks up to 10 s a slot: call it before the loop serves.
        """
        used = {f"slot{index}" for index in self._slots}
        left = {child.name for folder in self.place.folders for child in _children(folder)} - used
        return [self._sweep_one(name) for name in sorted(left)]

    def close(self) -> None:
        """Remove the groups that no process is in, and give the name back. Idempotent."""
        for slot in self._slots.values():
            with suppress(GroupError):
                slot.remove()
        self._slots.clear()
        if self._lock is None:
            return
        for folder in self.place.folders:
            for each in (folder, folder.parent):
                with suppress(OSError):
                    each.rmdir()
        os.close(self._lock)
        self._lock = None

    def _sweep_one(self, name: str) -> str:
        groups = [folder / name for folder in self.place.folders]
        found = {pid for group in groups for each in [group, *_children(group)] for pid in cgroupfs.members(each)}
        if self.place.unified:
            with suppress(FileNotFoundError):
                cgroupfs.put(self.place.unified / name / "cgroup.kill", "1")
        # A mould that died half-way through joining may sit in a v1 leaf alone.
        deadline = time.monotonic() + SWEEP_TIMEOUT_S
        left = groups
        while left and time.monotonic() < deadline:
            left = [group for group in left if not cgroupfs.sweep_members(group)]
        stuck = [] if left else [group for group in groups if not cgroupfs.remove_group(group)]
        return f"cgroup {name}: {len(found)} processes {'NOT PROVED GONE' if left or stuck else 'killed'}"


def _children(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _lock(folder: Path) -> int | None:
    """Lock the folder for this process; None if it was removed meanwhile, so that the caller starts over."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(fd), folder.stat())
    except BlockingIOError:
        os.close(fd)
        raise GroupBusy(f"{folder} is held by another agent: give this node another name") from None
    except FileNotFoundError:
        same = False
    if same:
        return fd
    os.close(fd)
    return None


def _place(found: Hierarchies, name: str) -> Place:
    v1 = {}
    for controller, mount in found.v1.items():
        if _make(mount / TOP / name):
            v1[controller] = mount / TOP / name
            if controller == "cpu":
                _try_put(mount / TOP / "cpu.shares", str(USUAL_SHARES))
    if not v1.keys() & set(LIMITING):
        v1 = {}
    best: Place | None = None
    for base, own in _bases(found):
        controllers = _prepare(base, name, own)
        if controllers is None:
            continue
        here = Place(base / name, v1, tuple(each for each in controllers if each not in v1))
        if best is not None and len(here.controllers) <= len(best.controllers):
            _discard(here)
            continue
        if best is not None:
            _discard(best)
        best = here
        if len(controllers) == len(_offered(found.unified)):
            break
    return best or Place(None, v1)


def _discard(place: Place) -> None:
    if place.unified:
        for each in (place.unified, place.unified.parent):
            with suppress(OSError):
                each.rmdir()


def _offered(group: Path | None) -> list[str]:
    """The limiting controllers that a v2 group could switch on for those below it."""
    return [each for each in LIMITING if group is not None and each in _words(group / "cgroup.controllers")]


def _bases(found: Hierarchies) -> list[tuple[Path, Path | None]]:
    """The folders to try, best first, each with the group whose processes must make way (None: none have to)."""
    if found.unified is None:
        return []
    top: tuple[Path, Path | None] = (found.unified / TOP, None)
    if found.own is None:
        return [top]
    # Started below an agent that moved aside (by `up`, or from the same shell): its place is ours too.
    aside = found.own.name == "agent" and _delegated(found.own.parent)
    own = found.own.parent if aside else found.own
    below: tuple[Path, Path | None] = (own / "jobs", own)
    return [below, top] if _delegated(own) else [top, below] if os.geteuid() == 0 and not found.v1 else [top]


def _delegated(group: Path) -> bool:
    """systemd marks what it delegates, and gives it to the unit's user."""
    for mark in ("trusted.delegate", "user.delegate"):
        with suppress(OSError):
            if os.getxattr(group, mark) == b"1":
                return True
    try:
        owner = group.stat().st_uid
    except OSError:
        return False
    return owner == os.geteuid() != 0


def _prepare(base: Path, name: str, own: Path | None) -> list[str] | None:
    """Make ``base/name`` and switch on what can be; None if it can't be written."""
    wanted = _offered(base.parent)
    if own is not None and wanted:
        if not _make(own / "agent"):
            return None
        for pid in cgroupfs.members(own):
            _try_put(own / "agent" / "cgroup.procs", str(pid))
        _try_put(own / "agent" / "cpu.weight", str(AGENT_WEIGHT))
    if not _make(base / name):
        return None
    for group in (base.parent, base, base / name):
        for controller in wanted:
            _try_put(group / "cgroup.subtree_control", f"+{controller}")
    if own is not None:
        # Against the agent beside it; against the host's other work the group of both has the default.
        _try_put(base / "cpu.weight", str(CPU_WEIGHT))
    return [each for each in wanted if each in _words(base / name / "cgroup.subtree_control")]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _make(folder: Path) -> bool:
    """Make the folder; whether groups can be made and joined in it is tried with a group that goes at once."""
    for _ in range(MAKE_TRIES):
        try:
            return _make_once(folder)
        except FileNotFoundError:
            # Another agent's close took the empty folder above away in between.
            continue
        except OSError as error:
            if error.errno in UNWRITABLE:
                return False
            raise
    return False


def _make_once(folder: Path) -> bool:
    trial = folder / f"trial{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    trial.mkdir()
    writable = os.access(trial / "cgroup.procs", os.W_OK)
    trial.rmdir()
    return writable


def _try_put(path: Path, value: str) -> None:
    with suppress(OSError):
        cgroupfs.put(path, value)
