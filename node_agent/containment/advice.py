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
    "for_delegation",
    "for_failure",
    "for_idmap",
    "for_kernel",
    "for_landlock",
    "for_share",
    "for_totals",
    "for_uids",
    "read_settings",
]

OLDEST_KERNEL = (5, 15)
MACHINES = ("x86_64", "aarch64")
POD_MARK = "var/run/secrets/kubernetes.io"
CONTAINER_MARKS = (".dockerenv", "run/.containerenv", POD_MARK)

PROFILE = (
    "printf 'abi <abi/4.0>,\\ninclude <tunables/global>\\n"
    "profile ringfence {python} flags=(unconfined) {{\\n  userns,\\n}}\\n' "
    "| sudo tee /etc/apparmor.d/ringfence && sudo apparmor_parser -r /etc/apparmor.d/ringfence "
    "(or, for every program: sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0)"
)
DOCKER_A = (
    "docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN --cap-add SETPCAP --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined …"
)
DOCKER_B = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined …"
)
POD_A = (
    "in the pod: securityContext: {capabilities: {add: [SYS_ADMIN, NET_ADMIN, SETPCAP]}, procMount: Unmasked, "
    "seccompProfile: {type: Unconfined}, appArmorProfile: {type: Unconfined}}"
)
POD_B = (
    "in the pod: securityContext: {procMount: Unmasked, seccompProfile: {type: Unconfined}, "
    "appArmorProfile: {type: Unconfined}} with hostUsers: false"
)
DELEGATE_UNIT = (
    "sudo mkdir -p /etc/systemd/system/ringfence-agent.service.d && printf '[Service]\\nDelegate=cpu memory pids\\n' | "
    "sudo tee /etc/systemd/system/ringfence-agent.service.d/delegate.conf && sudo systemctl daemon-reload && "
    "sudo systemctl restart ringfence-agent (use the agent's own unit name)"
)
DELEGATE_USER = (
    "sudo mkdir -p /etc/systemd/system/user@.service.d && printf '[Service]\\nDelegate=cpu memory pids\\n' | "
    "sudo tee /etc/systemd/system/user@.service.d/ringfence.conf && sudo systemctl daemon-reload, log in anew, "
    "then start it as: systemd-run --user --scope -p Delegate=yes ringfence agent …"
)
DOCKER_CGROUP = "docker run --cgroupns=private --privileged … (a container's cgroup file system is read-only otherwise)"
UNIT_A = (
    "give the agent CAP_SYS_ADMIN: take CapabilityBoundingSet=, RestrictNamespaces=, PrivateUsers= and "
    "SystemCallFilter= out of its unit"
)
UNIT_B = (
    "run the agent outside the sandbox that forbids user namespaces (in a unit: take RestrictNamespaces= and "
    "SystemCallFilter= out), or as root (level A)"
)
LANDLOCK_BOOT = "boot with lsm=landlock,{others} on the kernel's command line (CONFIG_SECURITY_LANDLOCK=y)"
CAP_SYS_ADMIN = 21
#: Since this one, a process in a Landlock domain can't signal one outside.
SCOPED_ABI = 6


@dataclass(frozen=True, slots=True)
class Setting:
    """What the advice depends on, read from the running system."""

    container: bool = False
    max_userns: int = 1
    clone_allowed: bool = True
    apparmor_restricts: bool = False
    pod: bool = False
    #: Whether a system call filter is on this process already.
    filtered: bool = False
    #: Whether CAP_SYS_ADMIN is in this process's bounding set.
    admin: bool = True
    #: The kernel's security modules; empty if it does not tell.
    modules: str = ""
    autogroup: bool = False


def read_settings(root: Path = Path("/")) -> Setting:
    """Read the kernel settings that stand in the way most often."""
    kernel = root / "proc/sys"
    status = _text(root / "proc/self/status")
    return Setting(
        container=any((root / mark).exists() for mark in CONTAINER_MARKS),
        max_userns=_number(kernel / "user/max_user_namespaces", 1),
        clone_allowed=_number(kernel / "kernel/unprivileged_userns_clone", 1) != 0,
        apparmor_restricts=_number(kernel / "kernel/apparmor_restrict_unprivileged_userns", 0) != 0,
        pod=(root / POD_MARK).exists(),
        filtered=_field(status, "Seccomp") not in ("", "0"),
        admin=not status or bool(int(_field(status, "CapBnd") or "0", 16) >> CAP_SYS_ADMIN & 1),
        modules=_text(root / "sys/kernel/security/lsm").strip(),
        autogroup=_number(kernel / "kernel/sched_autogroup_enabled", 0) != 0,
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
    why = f"a trial job could not be isolated and killed: {text}"
    cause = _cause(level, setting)
    return Missing(f"level {level}", f"{why} ({cause})" if cause else why, fix, "level")


def _cause(level: str, setting: Setting) -> str:
    """What most likely stands behind a refused namespace."""
    found = []
    if level == "A" and not setting.admin:
        found.append("this process lacks CAP_SYS_ADMIN")
    if level == "B" and setting.max_userns == 0:
        found.append("user.max_user_namespaces is 0")
    if level == "B" and not setting.clone_allowed:
        found.append("kernel.unprivileged_userns_clone is 0")
    if level == "B" and setting.apparmor_restricts:
        found.append("AppArmor restricts user namespaces")
    if setting.filtered:
        found.append("a system call filter is on this process")
    return ", ".join(found)


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


def for_landlock(abi: int, setting: Setting = Setting()) -> list[Missing]:
    """No second fence around the view, or one that signals can leave."""
    if abi >= SCOPED_ABI:
        return []
    if abi > 0:
        why = f"Landlock {abi} does not keep signals inside: without namespaces, jobs of one uid are not kept apart"
        return [Missing("landlock", why, "boot Linux 6.12 or newer", "fence")]
    others = setting.modules or "$(cat /sys/kernel/security/lsm)"
    why = "the kernel has no Landlock or has it switched off"
    return [Missing("landlock", why, LANDLOCK_BOOT.format(others=others), "fence")]


def for_share(enforces: frozenset[str], setting: Setting) -> list[Missing]:
    """Without a cpu controller many sessions of one job can starve the agent; nice reaches over them only so."""
    if "cpu" in enforces:
        return []
    why = "no cpu controller, so jobs get nice 19 and at most 128 processes"
    if setting.autogroup:
        why += "; and each session of a job counts as much as the whole agent (autogroups)"
    fix = "sudo sysctl -w kernel.sched_autogroup_enabled=0, or give the agent a cpu controller"
    return [Missing("cpu share", why, fix, "fence")]


def for_delegation(level: str, *, own_uid: bool, delegated: bool, abi: int) -> list[Missing]:
    """Jobs that have the agent's uid and no view can write the agent's own groups (attack 49)."""
    if level in ("A", "B") or own_uid or not delegated:
        return []
    held = f"only Landlock {abi} keeps" if abi else "nothing keeps"
    why = (
        f"insecure: delegation without a view: {held} a job from moving or killing its neighbours in the agent's groups"
    )
    return [Missing("delegation", why, "make user namespaces possible (level B), or don't delegate", "insecure")]


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
    """What gives root its namespaces."""
    if setting.pod:
        return POD_A
    if setting.container:
        return DOCKER_A
    return UNIT_A


def _fix_b(setting: Setting, python: str) -> str:
    steps = []
    if setting.max_userns == 0:
        steps.append("sudo sysctl -w user.max_user_namespaces=65536")
    if not setting.clone_allowed:
        steps.append("sudo sysctl -w kernel.unprivileged_userns_clone=1")
    if setting.apparmor_restricts:
        steps.append(PROFILE.format(python=python))
    if setting.container:
        steps.append(POD_B if setting.pod else DOCKER_B)
    return "; ".join(steps) or UNIT_B


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _field(status: str, name: str) -> str:
    return next((line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")), "")


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
