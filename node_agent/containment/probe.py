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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from node_agent.containment import advice, landlock, linux, mounts, trial
from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.errors import ContainmentError, GroupError, UidsUnavailable
from node_agent.containment.host import HostReport, Missing
from node_agent.containment.paths import PSEUDO
from node_agent.containment.spawner import Zygote
from node_agent.containment.trial import Outcome
from node_agent.containment.uids import JobUids

__all__ = ["probe"]

OWN_NAME = "probe-"
#: A slot that no agent has: the probe's own, below its node's name.
PROBE_SLOT = 100_000
WANTED = frozenset({"kill", "pids", "memory", "cpu"})
STOP_TIMEOUT_S = 15.0
USUAL_GRANTS = ("/home", "/srv", "/tmp", "/var/tmp", "/dev/shm", "/opt")  # noqa: S108 - looked at, never written


async def probe(home: Path, *, groups: NodeGroups | None = None) -> HostReport:
    """Return what this host can do. ``groups``: the agent's own, else some are made for the probe and removed.

    Takes a few tens of milliseconds where all works, up to 45 s where a trial hangs.
    """
    setting = advice.read_settings()
    missing = advice.for_kernel(platform.release(), platform.machine())
    own = None
    if groups is None:
        own = groups = _own_groups()
    try:
        report = await _probe(home, groups, setting, missing)
    finally:
        if own is not None:
            own.close()
    return report


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


async def _probe(home: Path, groups: NodeGroups | None, setting: advice.Setting, missing: list[Missing]) -> HostReport:
    level: Literal["A", "B"] = "A" if os.geteuid() == 0 else "B"
    enforces = groups.enforces if groups is not None else frozenset[str]()
    # A user namespace of its own counts its processes alone, so RLIMIT_NPROC is a total at level B.
    counted = {"pids"} if level == "B" else set[str]()
    idmap: dict[str, bool] = {}
    job_uids = ""
    if missing:
        outcome = Outcome("not tried")
    else:
        try:
            uids = JobUids() if level == "A" else None
            job_uids = f"{uids.start}-{uids.start + uids.count - 1}" if uids is not None else ""
            outcome = await _try(level, groups, uids, (home, *map(Path, USUAL_GRANTS)), idmap)
            if outcome.error:
                missing = [advice.for_failure(level, outcome.error, outcome.errno, setting)]
        except UidsUnavailable as error:
            outcome = Outcome(str(error))
            missing = [advice.for_uids(str(error))]
    missing = [
        *missing,
        *advice.for_totals(WANTED - enforces - counted, setting, root=level == "A"),
        *advice.for_landlock(landlock.abi()),
        *advice.for_idmap(idmap),
    ]
    return HostReport(
        level="none" if outcome.error else level,
        kernel=platform.release(),
        machine=platform.machine(),
        python=platform.python_version(),
        user=os.geteuid(),
        cgroup=groups.backend if groups is not None else "none",
        enforces=tuple(sorted(enforces)),
        landlock_abi=landlock.abi(),
        userns=any(idmap.values()) or (level == "B" and not outcome.error),
        idmap=idmap,
        job_uids=job_uids,
        processes_killed=outcome.processes,
        spawn_ms=outcome.spawn_ms,
        kill_ms=outcome.kill_ms,
        missing=tuple(missing),
    )


async def _try(
    level: Literal["A", "B"],
    groups: NodeGroups | None,
    uids: JobUids | None,
    folders: Iterable[Path],
    idmap: dict[str, bool],
) -> Outcome:
    """Run the trial in a zygote of its own, and try id maps with it; fills ``idmap``."""
    lease = uids.acquire() if uids is not None else None
    uid, gid = (lease.uid, lease.uid) if lease is not None else (os.geteuid(), os.getegid())
    zygote = Zygote(level=level, python=sys.executable)
    try:
        await zygote.start()
        outcome = await trial.run(zygote, groups.slot(PROBE_SLOT) if groups is not None else None, level, uid, gid)
        if level == "A" and not outcome.error:
            idmap.update(await _idmaps(zygote, folders, uid))
    except (ContainmentError, OSError) as error:
        outcome = Outcome(str(error), error.errno or 0 if isinstance(error, OSError) else 0)
    left = await _clean_up(zygote, groups)
    if uids is not None:
        uids.close()
    if lease is not None and not left:
        lease.release()
    return Outcome(left) if left and not outcome.error else outcome


async def _clean_up(zygote: Zygote, groups: NodeGroups | None) -> str:
    """End the zygote and remove the slot's groups; say what did not go."""
    try:
        await asyncio.wait_for(zygote.stop(), STOP_TIMEOUT_S)
    except TimeoutError:
        if zygote.pid is not None:
            os.kill(zygote.pid, signal.SIGKILL)
        return f"the trial's zygote did not end within {STOP_TIMEOUT_S:g} s"
    if groups is not None:
        try:
            groups.drop(PROBE_SLOT)
        except GroupError as error:
            return f"the trial left processes behind: {error}"
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
