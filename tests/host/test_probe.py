"""The probe tells what this host really does, and what to do where it does not."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from node_agent.containment import advice, trial
from node_agent.containment.advice import Setting
from node_agent.containment.cgroup import NodeGroups
from node_agent.containment.host import HostReport, Missing
from node_agent.containment.plan import Verdict
from node_agent.containment.probe import probe
from runner.wire import record
from tests.host.support import STRANGER, apart, needs_root
from tests.support.wait import wait_until

AS_USER = """
import asyncio, json
from pathlib import Path
from node_agent.containment.probe import probe
report = asyncio.run(probe(Path("/")))
print(json.dumps(report.as_json() | {"why": report.why, "fix": report.fix}))
"""

# In a user namespace that may hold no further one, as an ordinary user of it.
NO_USERNS = """
import os
from node_agent.containment import linux
read, write = os.pipe(); read2, write2 = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    os.read(read, 1)
    for name in ("uid_map", "gid_map"):
        open(f"/proc/{parent}/{name}", "w").write("0 0 65536")
    os.write(write2, b"x")
    os._exit(0)
linux.unshare(linux.NEWUSER)
os.write(write, b"x"); os.read(read2, 1); os.wait()
open("/proc/sys/user/max_user_namespaces", "w").write("0")
os.setgroups([]); os.setresgid(65533, 65533, 65533); os.setresuid(65533, 65533, 65533)
"""


def test_this_host_is_probed_by_doing(home: Path) -> None:
    """Here a detached tree of at least three processes was started, killed and proved gone, at this user's level."""
    report = asyncio.run(probe(home))
    if report.level == "none" and os.geteuid() != 0:
        pytest.skip(f"this user can't isolate here: {report.why}")
    assert report.level == ("A" if os.geteuid() == 0 else "B"), report.why
    assert report.processes_killed >= 3
    assert 0 < report.kill_ms < report.spawn_ms + 10_000
    assert (report.why, report.fix) == ("", "")
    assert bool(report.job_uids) == (report.level == "A")


def test_report_travels_as_json(home: Path) -> None:
    """The report's JSON is read back as the same report."""
    report = asyncio.run(probe(home))
    assert record.loads(HostReport, json.dumps(report.as_json()).encode()) == report


def test_killed_probe_is_cleared_by_the_next(home: Path) -> None:
    """Groups that a killed probe left are removed by the next one; those of a probe that still runs are not."""
    left, running = NodeGroups.open("probe-left"), NodeGroups.open("probe-running")
    if left is None or running is None:
        pytest.skip("no writable control group for this user (a delegated subtree is missing)")
    left.slot(0)
    left.slot(0).close()
    assert left._lock is not None
    os.close(left._lock)
    asyncio.run(probe(home))
    assert not any(folder.exists() for folder in left.place.folders)
    assert all(folder.exists() for folder in running.place.folders)
    running.close()


@needs_root
def test_ordinary_user_without_an_account_reaches_level_b() -> None:
    """A uid without an account isolates and kills in a user namespace, and is told how to get totals."""
    seen = json.loads(apart(AS_USER, user=STRANGER))
    assert (seen["level"], seen["userns"], seen["cgroup"]) == ("B", True, "none"), seen["why"]
    assert {each["hurts"] for each in seen["missing"]} == {"totals", "fence"}
    assert all(each["fix"] for each in seen["missing"])


@needs_root
def test_host_without_user_namespaces_is_below_b() -> None:
    """Where no user namespace can be made, the level is E, and the fix is the setting that forbids it."""
    seen = json.loads(apart(NO_USERNS + AS_USER).splitlines()[-1])
    assert seen["level"] == ("E" if seen["landlock_abi"] >= 6 else "F")
    assert "sudo sysctl -w user.max_user_namespaces=" in seen["fix"]
    assert "a trial job could not be isolated" in seen["why"]


def test_unproved_kills_and_survivors_fail_the_trial() -> None:
    """A kill without proof, another end, or one process found afterwards make the trial fail."""
    assert trial._judged(Verdict("killed"), 5.0, 0).error == ""
    assert trial._judged(Verdict("killed", proved=False), 5.0, 0).error
    assert trial._judged(Verdict("exit"), 5.0, 0).error
    assert "2 processes were left" in trial._judged(Verdict("killed"), 5.0, 2).error


def test_survivors_are_found_by_their_environment() -> None:
    """The probe's own look through /proc counts the processes that carry its token, and no others."""
    with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], trial.MARK: "token-1"}) as process:
        wait_until(lambda: trial._survivors("token-1") == 1, "the marked process to be found")
        assert trial._survivors("token-") == 0
        process.kill()


def test_old_kernels_and_unknown_machines_have_no_level() -> None:
    """A kernel below 5.15, or a machine without a system call table, is below every level."""
    assert [each.hurts for each in advice.for_kernel("5.10.0-8-amd64", "x86_64")] == ["level"]
    assert [each.what for each in advice.for_kernel("6.1", "riscv64")] == ["machine"]
    assert advice.for_kernel("5.15.0-100-generic", "aarch64") == []
    assert advice.for_kernel(platform.release(), platform.machine()) == []


def test_settings_are_read_from_the_system(tmp_path: Path) -> None:
    """The three settings that forbid user namespaces, and a container's mark, are seen; absent ones forbid nothing."""
    assert advice.read_settings(tmp_path) == Setting()
    for name, value in {
        "proc/sys/user/max_user_namespaces": "0\n",
        "proc/sys/kernel/unprivileged_userns_clone": "0\n",
        "proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
        ".dockerenv": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(value)
    assert advice.read_settings(tmp_path) == Setting(True, 0, False, True)


@pytest.mark.parametrize(
    ("level", "setting", "words"),
    [
        ("B", Setting(clone_allowed=False), "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("B", Setting(apparmor_restricts=True), "apparmor_parser -r"),
        ("B", Setting(container=True), "--security-opt seccomp=unconfined"),
        ("B", Setting(), "as root"),
        ("A", Setting(container=True), "--cap-add SYS_ADMIN"),
        ("A", Setting(), "CAP_SYS_ADMIN"),
    ],
)
def test_advice_is_an_exact_command(level: str, setting: Setting, words: str) -> None:
    """For each thing that forbids isolation, the report holds what to type."""
    found = advice.for_failure(level, "clone: Operation not permitted", 1, setting, sys.executable)
    assert words in found.fix
    assert found.hurts == "level"


def test_apparmor_profile_names_the_real_python() -> None:
    """The profile that lets user namespaces through is for the program that the agent runs, links resolved."""
    found = advice.for_failure("B", "", 1, Setting(apparmor_restricts=True), sys.executable)
    assert f"profile ringfence {os.path.realpath(sys.executable)} flags=(unconfined)" in found.fix


def test_only_what_hurts_the_level_is_the_reason() -> None:
    """Missing totals are listed and do not make the one-line reason of a refusal."""
    totals = advice.for_totals(frozenset({"memory", "kill"}), Setting(), root=False)
    grants = advice.for_idmap({"ext4": True, "9p": False})
    report = HostReport("B", "6.1", "x86_64", "3.11", 1000, missing=(*totals, *grants, *advice.for_landlock(0)))
    assert [each.hurts for each in report.missing] == ["totals", "fence", "grants", "fence"]
    assert report.why == report.fix == ""
    blocked = HostReport("none", "6.1", "x86_64", "3.11", 1000, missing=(*totals, Missing("x", "w", "f", "level")))
    assert (blocked.why, blocked.fix) == ("w", "f")
