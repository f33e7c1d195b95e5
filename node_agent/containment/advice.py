"""Exact commands for what a host lacks: from the facts of a failed probe to the text that `doctor` prints.

Called by probe.py. Pure, but for reading kernel settings below a given root. Must never decide a level: settings are
read only to advise after a real attempt failed.
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from node_agent.containment.host import Missing

__all__ = [
    "Setting",
    "for_failure",
    "for_idmap",
    "for_kernel",
    "for_landlock",
    "for_totals",
    "for_uids",
    "read_settings",
]

OLDEST_KERNEL = (5, 15)
MACHINES = ("x86_64", "aarch64")
CONTAINER_MARKS = (".dockerenv", "run/.containerenv")

PROFILE = (
    "printf 'abi <abi/4.0>,\\ninclude <tunables/global>\\n"
    "profile ringfence {python} flags=(unconfined) {{\\n  userns,\\n}}\\n' "
    "| sudo tee /etc/apparmor.d/ringfence && sudo apparmor_parser -r /etc/apparmor.d/ringfence"
)
DOCKER_A = (
    "docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN --cap-add SETPCAP --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined …"
)
DOCKER_B = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined …"
)
DELEGATE_UNIT = (
    "add Delegate=cpu memory pids to [Service] of the agent's unit, then systemctl daemon-reload and restart"
)
DELEGATE_USER = (
    "sudo mkdir -p /etc/systemd/system/user@.service.d && printf '[Service]\\nDelegate=cpu memory pids\\n' | "
    "sudo tee /etc/systemd/system/user@.service.d/ringfence.conf && sudo systemctl daemon-reload, log in anew, "
    "then start it as: systemd-run --user --scope -p Delegate=yes ringfence agent …"
)
DOCKER_CGROUP = "docker run --cgroupns=private --privileged … (a container's cgroup file system is read-only otherwise)"


@dataclass(frozen=True, slots=True)
class Setting:
    """What the advice depends on, read from the running system."""

    container: bool = False
    max_userns: int = 1
    clone_allowed: bool = True
    apparmor_restricts: bool = False


def read_settings(root: Path = Path("/")) -> Setting:
    """Read the kernel settings that stand in the way most often."""
    kernel = root / "proc/sys"
    return Setting(
        container=any((root / mark).exists() for mark in CONTAINER_MARKS),
        max_userns=_number(kernel / "user/max_user_namespaces", 1),
        clone_allowed=_number(kernel / "kernel/unprivileged_userns_clone", 1) != 0,
        apparmor_restricts=_number(kernel / "kernel/apparmor_restrict_unprivileged_userns", 0) != 0,
    )


def for_kernel(release: str, machine: str) -> list[Missing]:
    """A kernel that is too old, or a machine whose system calls we have no table for."""
    out = []
    found = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if found < OLDEST_KERNEL:
        wanted = ".".join(map(str, OLDEST_KERNEL))
        out.append(
            Missing("kernel", f"Linux {release} is older than {wanted}", f"boot Linux {wanted} or newer", "level")
        )
    if machine not in MACHINES:
        out.append(Missing("machine", f"no system call table for {machine}", "use x86-64 or arm64", "level"))
    return out


def for_failure(level: str, text: str, code: int, setting: Setting, python: str = sys.executable) -> Missing:
    """A detached tree could not be started or killed with proof at this level."""
    fix = _fix_a(setting) if level == "A" else _fix_b(setting, os.path.realpath(python))
    if code == errno.ENOSPC and level == "B":
        fix = "sudo sysctl -w user.max_user_namespaces=65536"
    return Missing(f"level {level}", f"a trial job could not be isolated and killed: {text}", fix, "level")


def for_uids(text: str) -> Missing:
    """No uid for jobs: level A gives each running job one of its own."""
    fix = (
        "keep 1900000000-1900000999 free of users, groups, /etc/subuid and /etc/subgid, "
        "or, if it is about the locks: rm -rf /run/ringfence/uids while no agent runs"
    )
    return Missing("job uids", text, fix, "level")


def for_totals(missing: frozenset[str], setting: Setting, *, root: bool) -> list[Missing]:
    """Controllers without which a job's total can't be enforced; ``kill`` and ``freeze`` mean no group at all."""
    fix = DOCKER_CGROUP if setting.container else DELEGATE_UNIT if root else DELEGATE_USER
    out = []
    limits = sorted(missing & {"pids", "memory", "cpu"})
    if limits:
        names = ", ".join(limits)
        out.append(Missing(f"cgroup controllers: {names}", f"no writable group with {names}", fix, "totals"))
    if "kill" in missing:
        why = "no writable cgroup v2 group, so a kill acts through the mould alone and pause is a signal sweep"
        out.append(Missing("cgroup kill", why, fix, "fence"))
    return out


def for_landlock(abi: int) -> list[Missing]:
    """No second fence around the view."""
    if abi > 0:
        return []
    fix = "boot with lsm=landlock,$(cat /sys/kernel/security/lsm) on the kernel's command line"
    return [Missing("landlock", "the kernel has no Landlock or has it switched off", fix, "fence")]


def for_idmap(kinds: dict[str, bool]) -> list[Missing]:
    """File systems on which a write grant can't get the owner's uid."""
    lacking = sorted(kind for kind, able in kinds.items() if not able)
    if not lacking:
        return []
    names = ", ".join(lacking)
    return [
        Missing(
            f"id maps on {names}",
            f"write grants on {names} are refused: the file system takes no id map",
            "grant paths on ext4, xfs, btrfs or tmpfs, or boot a newer kernel",
            "grants",
        )
    ]


def _fix_a(setting: Setting) -> str:
    if setting.container:
        return DOCKER_A
    return "give the agent CAP_SYS_ADMIN (remove CapabilityBoundingSet= and RestrictNamespaces= from its unit)"


def _fix_b(setting: Setting, python: str) -> str:
    steps = []
    if setting.max_userns == 0:
        steps.append("sudo sysctl -w user.max_user_namespaces=65536")
    if not setting.clone_allowed:
        steps.append("sudo sysctl -w kernel.unprivileged_userns_clone=1")
    if setting.apparmor_restricts:
        steps.append(PROFILE.format(python=python))
    if setting.container:
        steps.append(DOCKER_B)
    return "; ".join(steps) or "run the agent outside the sandbox that forbids user namespaces, or as root (level A)"


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
