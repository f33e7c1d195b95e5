"""Finds this host's level by doing: a detached tree is started, killed and looked for, with the agent's own code.

Called by the agent at its start and by `doctor`. Must never conclude from a version or a setting that isolation works;
those serve the advice alone.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from node_agent.containment import advice, landlock, linux, mounts, trial
from node_agent.containment.advice import SCOPED_ABI, Setting
from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.errors import ContainmentError, GroupError, UidsUnavailable
from node_agent.containment.host import HostReport, Missing, Rung
from node_agent.containment.lower.slots import LowSlot
from node_agent.containment.lower.worker import needs_landlock
from node_agent.containment.lower.workspace import SHARED, Workspaces
from node_agent.containment.paths import PSEUDO
from node_agent.containment.plan import Level
from node_agent.containment.slots import Slot
from node_agent.containment.spawner import Zygote
from node_agent.containment.trial import Outcome
from node_agent.containment.uids import JobUids

__all__ = ["probe"]

LADDER: Final[tuple[Level, ...]] = ("A", "B", "C", "D", "E", "F")
OWN_NAME = "probe-"
#: A slot that no agent has: the probe's own, below its node's name.
PROBE_SLOT = 100_000
WANTED = frozenset({"kill", "pids", "memory", "cpu"})
STOP_TIMEOUT_S = 15.0
USUAL_GRANTS = ("/home", "/srv", "/tmp", "/var/tmp", "/dev/shm", "/opt")  # noqa: S108 - looked at, never written


async def probe(
    home: Path, *, groups: NodeGroups | None = None, max_level: Level = "A", every: bool = False
) -> HostReport:
    """Return what this host can do. ``groups``: the agent's own, else some are made for the probe and removed.

    Levels are tried from ``max_level`` down to the first that works; ``every``: also those below it. Takes a few tens
    of milliseconds a level where all works, up to 45 s where a trial hangs.
    """
    setting = advice.read_settings()
    own = None
    if groups is None:
        own = groups = _own_groups()
    try:
        return await _Probe(home, groups, setting, max_level).run(every=every)
    finally:
        if own is not None:
            own.close()


def _own_groups() -> NodeGroups | None:
    """Make groups for this probe, and remove those of earlier probes that were killed."""
    try:
        groups = NodeGroups.open(f"{OWN_NAME}{secrets.token_hex(4)}")
    except ContainmentError:
        return None
    for name in groups.neighbours(OWN_NAME) if groups is not None else []:
        with suppress(ContainmentError):
            left = NodeGroups.open(name)
            if left is not None:
                left.sweep()
                left.close()
    return groups


class _Probe:
    """One look at this host."""

    def __init__(self, home: Path, groups: NodeGroups | None, setting: Setting, max_level: Level) -> None:
        self._home = home
        self._groups = groups
        self._setting = setting
        self._max_level = max_level
        self._abi = landlock.abi()
        self._root = os.geteuid() == 0
        self._idmap: dict[str, bool] = {}
        self._uids: JobUids | None = None

    async def run(self, *, every: bool) -> HostReport:
        missing = advice.for_kernel(platform.release(), platform.machine())
        rungs: list[Rung] = []
        if not missing:
            if self._root:
                try:
                    self._uids = JobUids()
                except UidsUnavailable as error:
                    missing.append(advice.for_uids(str(error)))
            for level in () if missing else LADDER:
                if level >= self._max_level and self._offered(level):
                    rungs.append(await self._rung(level))
                    if rungs[-1].works and not every:
                        break
        best = next((rung for rung in rungs if rung.works), None)
        if (best is None or best.level > "B") and not missing:
            missing.append(self._below(rungs))
        try:
            return self._report(best, tuple(rungs), missing)
        finally:
            if self._uids is not None:
                self._uids.close()

    def _offered(self, level: str) -> bool:
        """Root has own uids for its jobs, so it needs no user namespace; nobody else can have them."""
        return level not in ("B",) if self._root else level not in ("A", "D")

    def _below(self, rungs: Sequence[Rung]) -> Missing:
        """Why this host, or its setting, is below B."""
        for rung in rungs:
            if rung.level in ("A", "B"):
                return Missing(f"level {rung.level}", rung.why, rung.fix, "level")
        why = f"this agent's max_level is {self._max_level}"
        return Missing("level B", why, "unset RINGFENCE_MAX_LEVEL and start the agent again", "level")

    def _report(self, best: Rung | None, rungs: tuple[Rung, ...], missing: list[Missing]) -> HostReport:
        groups, level = self._groups, "none" if best is None else best.level
        by_group = groups.enforces if groups is not None and level <= "C" else frozenset[str]()
        # A user namespace of its own counts its processes alone, and so does a uid: RLIMIT_NPROC is a total there.
        counted = {"pids"} if level == "B" or (self._uids is not None and level > "A") else set[str]()
        own_uid = self._uids is not None
        delegated = groups is not None and not self._root
        missing = [
            *missing,
            *advice.for_totals(WANTED - by_group - counted, self._setting, root=self._root),
            *advice.for_share(by_group, self._setting),
            *advice.for_landlock(self._abi, self._setting),
            *advice.for_idmap(self._idmap),
            *advice.for_delegation(level, own_uid=own_uid, delegated=delegated, abi=self._abi),
        ]
        return HostReport(
            level=best.level if best is not None else "none",
            kernel=platform.release(),
            machine=platform.machine(),
            python=platform.python_version(),
            user=os.geteuid(),
            cgroup=groups.backend if groups is not None else "none",
            enforces=tuple(sorted(by_group)),
            landlock_abi=self._abi,
            userns=any(self._idmap.values()) or level == "B",
            idmap=self._idmap,
            job_uids=f"{self._uids.start}-{self._uids.start + self._uids.count - 1}" if self._uids is not None else "",
            processes_killed=best.processes_killed if best is not None else 0,
            spawn_ms=best.spawn_ms if best is not None else 0.0,
            kill_ms=best.kill_ms if best is not None else 0.0,
            missing=tuple(missing),
            tried=rungs,
            max_level=self._max_level,
        )

    async def _rung(self, level: Level) -> Rung:
        """Try one level, unless something that it needs is known not to be there."""
        lacking = self._lacking(level)
        if lacking is not None:
            return Rung(level, lacking.why, lacking.fix)
        outcome = await self._try(level)
        if not outcome.error:
            return Rung(level, "", "", outcome.processes, outcome.spawn_ms, outcome.kill_ms)
        found = advice.for_failure(level, outcome.error, outcome.errno, self._setting)
        return Rung(level, found.why, found.fix)

    def _lacking(self, level: str) -> Missing | None:
        if level == "C" and (self._groups is None or self._groups.place.unified is None):
            found = advice.for_totals(frozenset({"kill"}), self._setting, root=self._root)[0]
            return Missing(found.what, "no cgroup v2 group that this agent can write", found.fix, "level")
        if needs_landlock(level, own_uid=self._root) and self._abi < SCOPED_ABI:
            return advice.for_landlock(self._abi, self._setting)[0]
        return None

    async def _try(self, level: Level) -> Outcome:
        """Run the trial at one level, with a uid of its own where there are some."""
        lease = self._uids.acquire() if self._uids is not None else None
        uid, gid = (lease.uid, lease.uid) if lease is not None else (os.geteuid(), os.getegid())
        try:
            outcome = await (self._try_view(level, uid, gid) if level in ("A", "B") else self._try_low(level, uid, gid))
        except (ContainmentError, OSError) as error:
            outcome = Outcome(str(error), error.errno or 0 if isinstance(error, OSError) else 0)
        left = self._drop_group()
        if lease is not None and not left:
            lease.release()
        return Outcome(left) if left and not outcome.error else outcome

    async def _try_view(self, level: Level, uid: int, gid: int) -> Outcome:
        """Levels A and B: in a zygote of its own, and with it id maps."""
        zygote = Zygote(level="A" if level == "A" else "B", python=sys.executable)
        try:
            await zygote.start()
            group = self._groups.slot(PROBE_SLOT) if self._groups is not None else None
            outcome = await trial.run(Slot(0, zygote, group), level, uid, gid)
            if level == "A" and not outcome.error:
                self._idmap.update(await _idmaps(zygote, (self._home, *map(Path, USUAL_GRANTS)), uid))
        except (ContainmentError, OSError) as error:
            outcome = Outcome(str(error), error.errno or 0 if isinstance(error, OSError) else 0)
        left = await _end(zygote)
        return Outcome(left) if left and not outcome.error else outcome

    async def _try_low(self, level: Level, uid: int, gid: int) -> Outcome:
        """Levels C to F: no zygote, a workspace of its own."""
        with ExitStack() as stack:
            name = f"{OWN_NAME}{secrets.token_hex(4)}"
            if self._root:
                places = Workspaces(SHARED / name)
            else:
                places = Workspaces(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rf-"))) / name)
            stack.callback(places.close)
            group = self._groups.slot(PROBE_SLOT) if self._groups is not None and level == "C" else None
            return await trial.run(LowSlot(0, level, places, group), level, uid, gid)

    def _drop_group(self) -> str:
        if self._groups is not None:
            try:
                self._groups.drop(PROBE_SLOT)
            except GroupError as error:
                return f"the trial left processes behind: {error}"
        return ""


async def _end(zygote: Zygote) -> str:
    """End the zygote; say if it did not."""
    try:
        await asyncio.wait_for(zygote.stop(), STOP_TIMEOUT_S)
    except TimeoutError:
        if zygote.pid is not None:
            os.kill(zygote.pid, signal.SIGKILL)
        return f"the trial's zygote did not end within {STOP_TIMEOUT_S:g} s"
    return ""


async def _idmaps(zygote: Zygote, folders: Iterable[Path], job_uid: int) -> dict[str, bool]:
    """By file system type: whether a mount of it takes an id map. Clones folders, attaches nothing."""
    found: dict[str, bool] = {}
    table = mounts.table()
    userns = await zygote.userns(0, 0, job_uid, job_uid)
    try:
        for folder in folders:
            with suppress(OSError):
                fd = linux.openat2(str(folder), os.O_PATH, linux.RESOLVE_NO_MAGICLINKS)
                try:
                    entry = mounts.entry_of(fd, table)
                    if entry is not None and entry.kind not in PSEUDO and not found.get(entry.kind):
                        found[entry.kind] = _takes_idmap(fd, userns)
                finally:
                    os.close(fd)
    finally:
        os.close(userns)
    return found


def _takes_idmap(fd: int, userns: int) -> bool:
    copy = linux.open_tree("", at=fd)
    try:
        return mounts.set_idmap(copy, linux.NOSUID | linux.NODEV, userns)
    finally:
        os.close(copy)
