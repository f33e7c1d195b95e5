"""Each feature that confines a job is taken away for real: no job runs without it, and the reason names the step.

A filter in front of the agent's side answers one system call with an error, as a container runtime or an old kernel
does; everything else is the project's own code. What the probe then says of such a host is tests/ladder's part.
"""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from node_agent.containment import landlock
from node_agent.containment.plan import Mount
from tests.containment.rig import LEVEL, Rig, granted, in_rig
from tests.security.fs_tries import Wall, broken, tried

EPERM, ENOSYS = errno.EPERM, errno.ENOSYS
#: Feature: (error, calls, what the refusal must name).
REMOVED = {
    "namespaces": (EPERM, "unshare", "unshare|namespace"),
    "mounts": (EPERM, "mount", "mount|mould"),
    "a root of its own": (EPERM, "pivot_root", "view|root"),
    "unmounting": (EPERM, "umount2", "view|root"),
    "cloned mounts": (ENOSYS, "open_tree", "view|mould"),
    "attached mounts": (ENOSYS, "move_mount", "view|mould"),
    "read-only mounts": (ENOSYS, "mount_setattr", "view|root|mould"),
    "another uid": (EPERM, "setresuid", "identity"),
    "another gid": (EPERM, "setresgid", "identity"),
    "empty capabilities": (EPERM, "capset", "capabilities"),
    "prctl": (EPERM, "prctl", "zygote|capabilities"),
    "seccomp": (EPERM, "seccomp", "seccomp"),
    "an old kernel's seccomp": (ENOSYS, "seccomp", "seccomp"),
    "a session": (EPERM, "setsid", "session"),
    "closed descriptors": (ENOSYS, "close_range", "descriptors|mould|plan|root|view"),
    "limits": (EPERM, "prlimit64", "limits|worker|mould"),
    "a working folder": (EPERM, "chdir", "cwd|view|not permitted: '/'"),
}
if LEVEL == "A":
    REMOVED["no groups"] = (EPERM, "setgroups", "identity")
if landlock.abi():
    REMOVED["Landlock's rules"] = (EPERM, "landlock_add_rule", "landlock|mould")
    REMOVED["Landlock's domain"] = (EPERM, "landlock_restrict_self", "landlock")
#: The kernel says yes and does nothing: found out by the worker's last look at itself.
LIES = {
    "uid": (0, "setresuid", "identity|cwd|check"),
    "gid": (0, "setresgid", "check"),
    "capabilities": (0, "capset", "check"),
    "bounding set": (0, "prctl", "check"),
    "descriptors": (0, "close_range", "check|plan|descriptors"),
}


def ran(node: str, cases: dict[str, tuple[int, str, str]]) -> dict[str, str]:
    """Run each case; return its line."""
    words = [f"{number}:{error}:{calls}" for number, (error, calls, _) in enumerate(cases.values())]
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.host_without", node, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
        cwd=Path(__file__).parents[2],
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return {name: lines.get(str(number), f"no word: {done.stderr[-500:]}") for number, name in enumerate(cases)}


def test_no_job_runs_without_what_confines_it(node_name: str) -> None:
    """With any one call refused the attempt ends before the job, and the error names the step; with none it runs."""
    told = ran(node_name, {"nothing": (0, "", ""), **REMOVED})
    assert told.pop("nothing") == "WHOLE"
    wrong = {name: line for name, line in told.items() if not re.search(f"REFUSED .*({REMOVED[name][2]})", line)}
    assert wrong == {}


def test_a_kernel_that_only_says_so_is_found_out(node_name: str) -> None:
    """Where a call claims success without effect, the worker's check refuses, or nothing is lacking all the same."""
    told = ran(node_name, LIES)
    # At level B a job keeps the agent's uid and gid, so there is nothing to lie about.
    same = {"uid", "gid"} if LEVEL == "B" else set()
    wrong = {
        name: line
        for name, line in told.items()
        if not re.search(f"REFUSED .*({LIES[name][2]})", line) and not (name in same and line == "WHOLE")
    }
    assert wrong == {}


def test_without_landlock_the_view_stands_alone(node_name: str) -> None:
    """ENOSYS to Landlock is a kernel without it: levels A and B run there with everything else, as documented."""
    calls = "landlock_create_ruleset,landlock_add_rule,landlock_restrict_self"
    assert ran(node_name, {"landlock": (ENOSYS, calls, "")}) == {"landlock": "WHOLE"}


CGROUP = r"""
def write(path, text): fd = os.open(path, os.O_WRONLY); os.write(fd, text); os.close(fd)
for name in ("cgroup.procs", "cgroup.kill", "pids.max", "memory.max"):
    attempt(name, lambda: write("/sys/fs/cgroup/" + name, b"0"))
    attempt("grant:" + name, lambda: write(sys.argv[1] + "/../sys/fs/cgroup/" + name, b"0"))
"""


def test_a_job_reaches_no_cgroupfs_read_only_or_not(node_name: str, home: Path) -> None:
    """There is no path to it from a job, not even past a grant."""

    async def scenario(rig: Rig) -> None:
        with granted(home, "write") as fd:
            found = await tried(rig, CGROUP, str(home), mounts=[(Mount(str(home), "write", "dir"), fd)])
        assert broken(found, dict.fromkeys(found, Wall.of("view", "ENOENT"))) == []

    in_rig(node_name, scenario)


READ_ONLY = """
import sys
from node_agent.containment import linux
from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.errors import ContainmentError
linux.unshare(linux.NEWNS)
linux.mount(None, "/", None, 0x4000 | 0x40000)
from node_agent.containment.mounts import table
for entry in sorted(table().values(), key=lambda each: each.point):
    if entry.kind in ("cgroup", "cgroup2"): linux.mount(None, entry.point, None, 0x1000 | 32 | 1)
try:
    groups = NodeGroups.open(sys.argv[1])
    print(sorted(groups.enforces) if groups is not None else "none")
except ContainmentError as error: print("none", error)
"""


@pytest.mark.skipif(LEVEL == "B", reason="needs root to mount control groups read-only; a user has none to begin with")
def test_read_only_control_groups_enforce_nothing(node_name: str) -> None:
    """Where cgroupfs is read-only no total is claimed, so that whoever asks for one is refused (tests/property)."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, node_name],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("none"), done.stdout


PID_1 = """
import os, signal
signal.alarm(20)
child = os.fork()
if child == 0: signal.pause()
def look(pid, name):
    try:
        if name == "fd": os.listdir(f"/proc/{pid}/fd")
        else: os.close(os.open(f"/proc/{pid}/{name}", os.O_RDWR if name == "mem" else os.O_RDONLY))
        return "OPENED"
    except OSError as error: return str(error.errno)
for who, pid in (("mould", 1), ("own", child)):
    print(who, *(look(pid, name) for name in ("mem", "fd", "environ", "maps", "root", "ns/user")))
os.kill(child, 9)
"""


def test_attack_43_the_mould_is_shut_without_landlock(node_name: str) -> None:
    """With Landlock masked pid 1 opens to nobody; a dumpable process of the job's own, asked the same way, does."""
    words = [sys.executable, "-m", "tests.isolation.bare", node_name, PID_1]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=50, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    abi, *lines = done.stdout.splitlines()
    told = dict(line.split(" ", 1) for line in lines if line)
    assert abi == "0"
    assert set(told["mould"].split()) <= {"1", "2", "13"}, "not dumpable, and its capabilities are not the job's"
    assert set(told["own"].split()) == {"OPENED"}
