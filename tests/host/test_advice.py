"""For everything that a host may lack there is an exact command, and the cause is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_agent.containment import advice
from node_agent.containment.advice import Setting

DOCKER_STATUS = "Name:\tpython\nCapBnd:\t00000000a80425fb\nNoNewPrivs:\t0\nSeccomp:\t2\n"


@pytest.mark.parametrize(
    ("level", "setting", "cause", "fix"),
    [
        ("A", Setting(admin=False, filtered=True, container=True), "lacks CAP_SYS_ADMIN", "--cap-add SYS_ADMIN"),
        ("A", Setting(admin=False, container=True, pod=True), "lacks CAP_SYS_ADMIN", "capabilities: {add: [SYS_ADMIN"),
        ("A", Setting(admin=False), "lacks CAP_SYS_ADMIN", "CapabilityBoundingSet="),
        ("B", Setting(max_userns=0), "user.max_user_namespaces is 0", "sysctl -w user.max_user_namespaces=65536"),
        ("B", Setting(clone_allowed=False), "unprivileged_userns_clone is 0", "kernel.unprivileged_userns_clone=1"),
        ("B", Setting(apparmor_restricts=True), "AppArmor", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("B", Setting(apparmor_restricts=True), "AppArmor", "userns,"),
        ("B", Setting(filtered=True), "system call filter", "RestrictNamespaces="),
        ("B", Setting(filtered=True, container=True), "system call filter", "--security-opt seccomp=unconfined"),
        ("B", Setting(filtered=True, container=True, pod=True), "system call filter", "seccompProfile"),
    ],
)
def test_a_failed_trial_names_cause_and_fix(level: str, setting: Setting, cause: str, fix: str) -> None:
    """What most likely forbade the trial is told, with the line that allows it on this kind of host."""
    found = advice.for_failure(level, "Operation not permitted", 1, setting)
    assert cause in found.why
    assert fix in found.fix
    assert found.hurts == "level"


def test_a_docker_host_is_read_as_one(tmp_path: Path) -> None:
    """A container's bounding set and filter are seen in its own status."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(DOCKER_STATUS)
    (tmp_path / ".dockerenv").touch()
    found = advice.read_settings(tmp_path)
    assert (found.container, found.admin, found.filtered, found.pod) == (True, False, True, False)
    (tmp_path / "var/run/secrets/kubernetes.io").mkdir(parents=True)
    assert advice.read_settings(tmp_path).pod


def test_landlock_is_asked_for_in_the_form_that_the_kernel_takes() -> None:
    """None: the boot line with the modules that are there; an old one: the newer kernel; new enough: nothing."""
    assert "lsm=landlock,yama,apparmor" in advice.for_landlock(0, Setting(modules="yama,apparmor"))[0].fix
    assert "6.12" in advice.for_landlock(4, Setting())[0].fix
    assert advice.for_landlock(6, Setting()) == []


def test_delegation_is_a_drop_in_to_paste() -> None:
    """Without totals root gets a drop-in for its unit, a user one for the user manager."""
    for root, unit in ((True, "ringfence-agent.service.d"), (False, "user@.service.d")):
        found = advice.for_totals(frozenset({"memory", "kill"}), Setting(), root=root)
        assert all(unit in each.fix and "Delegate=cpu memory pids" in each.fix for each in found)


def test_attack_35_a_host_without_a_cpu_controller_is_told() -> None:
    """The line says what jobs get instead, and which switch makes nice count."""
    assert advice.for_share(frozenset({"cpu"}), Setting(autogroup=True)) == []
    found = advice.for_share(frozenset(), Setting(autogroup=True))[0]
    assert "nice 19" in found.why
    assert "autogroups" in found.why
    assert "kernel.sched_autogroup_enabled=0" in found.fix


def test_attack_49_delegation_without_a_view_is_insecure() -> None:
    """Only where jobs have the agent's uid, no view, and a group that this uid may write."""
    found = advice.for_delegation("C", own_uid=False, delegated=True, abi=7)
    assert [each.hurts for each in found] == ["insecure"]
    assert advice.for_delegation("B", own_uid=False, delegated=True, abi=7) == []
    assert advice.for_delegation("C", own_uid=True, delegated=True, abi=7) == []
    assert advice.for_delegation("E", own_uid=False, delegated=False, abi=7) == []
