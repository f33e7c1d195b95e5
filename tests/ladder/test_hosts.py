"""Hosts that lack something: the probe finds the right level, says what would help, and no job runs without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from node_agent.containment.lower.workspace import Workspaces
from runner import Grants, JobRefused
from tests.containment.rig import marked
from tests.ladder.rig import OWN_UID
from tests.support.fleet import CLI
from tests.support.rig import Node, Rig, rigged
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[2]
PROBE = f"""
import asyncio, json, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from node_agent.containment.probe import probe
report = asyncio.run(probe(Path("/")))
rest = {{"why": report.why, "fix": report.fix, "higher": report.higher}}
print(json.dumps(report.as_json() | rest | {{"kept": {{each.name: each.kept for each in report.promises}}}}))
"""
TRUSTING = 'version = 1\n[[allow]]\ncommands = ["*"]\nread = ["*"]\nwrite = ["*"]\nnet = ["*"]\ntrusted = true\n'


@dataclass(frozen=True, slots=True)
class Host:
    """What is taken away, what must then be found, and what a job that asks for more is refused for.

    ``advice``: words of which one must be told, apart by |: it differs in a container.
    """

    lacks: str
    level: str
    advice: str
    refused: dict[str, tuple[Grants, str]] = field(default_factory=dict)


GRANTED = Grants(read=("/srv",))
MEMORY = Grants(memory="64M")
#: As root: what is left of level A. C and D have uids, so a total of processes is kept.
ROOTS = (
    Host(
        "admin",
        "C",
        "CAP_SYS_ADMIN",
        {"disk": (Grants(disk="1M"), "disk"), "net": (Grants(net=("a:1",)), "net HOST:PORT")},
    ),
    Host("cgroups,admin", "D", "CAP_SYS_ADMIN", {"memory": (MEMORY, "memory")}),
    Host("cgroups,admin,landlock", "D", "lsm=landlock", {"read": (GRANTED, "read")}),
    Host(
        "cgroups",
        "A",
        "Delegate=|docker",
        {"memory": (MEMORY, "memory"), "cpu": (Grants(cpus=1.0), "cpu")},
    ),
    Host("landlock", "A", "lsm=landlock"),
    Host("cgroups,admin,setuid", "none", "CAP_SYS_ADMIN"),
    Host("user", "B", "Delegate=|docker", {"memory": (MEMORY, "memory")}),
    Host("user,landlock", "B", "lsm=landlock"),
    Host("user,unshare", "E", "RestrictNamespaces=|docker", {"disk": (Grants(disk="1M"), "disk")}),
    Host("user,unshare,landlock", "F", "lsm=landlock", {"read": (GRANTED, "read")}),
)
USERS = tuple(
    Host(host.lacks.removeprefix("user").removeprefix(","), host.level, host.advice, host.refused)
    for host in ROOTS
    if host.lacks.startswith("user,")
)
HOSTS = ROOTS if OWN_UID else USERS


def without(host: Host, *words: str) -> list[str]:
    """The command that runs ``words`` on such a host."""
    return [sys.executable, "-I", "-c", RUN.format(root=str(ROOT)), host.lacks, *words]


RUN = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv[0] = "lacking"
runpy.run_module("tests.ladder.lacking", run_name="__main__", alter_sys=False)
"""


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.lacks)
def test_the_probe_finds_the_level_and_the_fix(host: Host) -> None:
    """With the feature gone the level is the next that works here, and everything missing comes with a fix."""
    done = subprocess.run(
        without(host, sys.executable, "-I", "-B", "-c", PROBE), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["level"] == host.level, (seen["why"], seen["tried"])
    assert all(each["fix"] for each in seen["missing"])
    told = json.dumps(seen["missing"]) + seen["higher"]
    assert any(word in told for word in host.advice.split("|")), told
    if host.level > "B":
        assert seen["why"]
        assert seen["fix"]
    if host.level == "none":
        assert not any(seen["kept"].values())
    works = [each for each in seen["tried"] if not each["why"]]
    assert [each["level"] for each in works] == ([host.level] if host.level != "none" else [])
    assert all(each["processes_killed"] >= 3 for each in works)
    for name, (_, promise) in host.refused.items():
        assert not [kept for each, kept in seen["kept"].items() if each.startswith(promise) and kept], name


@pytest.mark.parametrize(
    "host",
    [host for host in HOSTS if (host.refused or host.level == "none") and not host.lacks.startswith("user")],
    ids=lambda host: host.lacks,
)
def test_what_is_gone_is_refused_and_the_rest_runs(host: Host) -> None:
    """An untrusted job needs level B; a trusted one runs below, but for what it asks and the host can't keep."""
    with rigged() as rig:
        _agent_on(rig, host)
        if host.level > "B":
            with pytest.raises(JobRefused) as refused:
                rig.command("true").result(timeout=20)
            assert refused.value.reason == "level"
            assert "Fix: " in str(refused.value)
        else:
            rig.command("true").result(timeout=20)
        if host.level == "none":
            with pytest.raises(JobRefused) as refused:
                rig.command("true", trusted=True).result(timeout=20)
            assert refused.value.reason == "level"
            return
        rig.command("true", trusted=True).result(timeout=20)
        for name, (grants, promise) in host.refused.items():
            with pytest.raises(JobRefused) as refused:
                rig.command("touch", "/work/ran", trusted=True, grants=grants).result(timeout=20)
            assert refused.value.reason == "unenforceable", name
            assert promise in str(refused.value)
        rig.wait_idle()


@pytest.mark.parametrize("level", ["C", "E"] if OWN_UID else ["E", "F"])
def test_attack_47_a_path_grant_is_no_way_around_a_missing_view(level: str) -> None:
    """Untrusted jobs with path grants never run below B, as root trusted ones neither; files stay as they are."""
    with rigged() as rig:
        _agent_on(rig, None, level)
        (rig.work / "file").write_text("mine")
        os.chmod(rig.work / "file", 0o640)
        grants = Grants(write=(str(rig.work),))
        script = f"chmod 0777 {rig.work}/file; touch -d 2001-01-01 {rig.work}/file"
        with pytest.raises(JobRefused) as refused:
            rig.command("sh", "-c", script, grants=grants, min_level="F").result(timeout=20)
        assert refused.value.reason == "level"
        if OWN_UID or level == "F":
            with pytest.raises(JobRefused) as refused:
                rig.command("sh", "-c", script, grants=grants, trusted=True).result(timeout=20)
            assert refused.value.reason == "unenforceable"
        assert (rig.work / "file").stat().st_mode & 0o777 == 0o640
        assert (rig.work / "file").stat().st_mtime > 1_000_000_000 + 86400


@pytest.mark.skipif(OWN_UID, reason="as root jobs have uids of their own, so no path is granted below B")
def test_a_trusted_job_without_a_view_keeps_the_code_around_a_grant() -> None:
    """At E a write grant with files that a view would keep read-only is given as PATH:all or not at all."""
    with rigged() as rig:
        _agent_on(rig, None, "E")
        tree = rig.work / "tree"
        (tree / ".git").mkdir(parents=True)
        (tree / ".git/config").write_text("[core]\n")
        with pytest.raises(JobRefused) as refused:
            rig.command("true", grants=Grants(write=(str(tree),)), trusted=True).result(timeout=20)
        assert refused.value.reason == "unenforceable"
        assert ":all" in str(refused.value)
        rig.command("touch", f"{tree}/new", grants=Grants(write=(f"{tree}:all",)), trusted=True).result(timeout=20)
        assert (tree / "new").exists()


def test_attack_35_without_a_cpu_controller_jobs_are_nice_and_few(tmp_path: Path) -> None:
    """Such jobs get nice 19 and at most 128 processes, `nodes` and `doctor` say so, and no renewal is missed."""
    with rigged() as rig:
        node = _agent_on(rig, None, "F" if OWN_UID else "B")
        trusted = OWN_UID
        job = rig.command("sh", "-c", "nice; grep processes /proc/self/limits", trusted=trusted)
        job.result(timeout=20)
        nice, _, _, processes, *_ = rig.logs(job).split()
        assert nice == "19"
        assert int(processes) <= 129 or not OWN_UID
        with pytest.raises(JobRefused) as refused:
            rig.command("true", trusted=trusted, grants=Grants(pids=129)).result(timeout=20)
        assert refused.value.reason == "unenforceable"
        boot = rig.boot(node)
        burn = "i=0; while [ $i -lt 40 ]; do setsid sh -c 'while :; do :; done' & i=$((i+1)); done; echo up; sleep 20"
        storm = rig.command("sh", "-c", burn, trusted=trusted, timeout=15.0)
        rig.wait_output(storm, "up")
        beat = rig.record(node)["heartbeat_at"]
        wait_until(lambda: rig.record(node)["heartbeat_at"] not in (beat, None), "a renewal under load", 10)
        receipt = storm.kill()
        assert (receipt.outcome, receipt.survivors) == ("killed", 0)
        assert rig.boot(node) == boot
        told = rig.record(node)["enforcement"]
        assert "nice 19" in told["fair share of the cpu"]  # type: ignore[index]  # a JSON object


@pytest.mark.parametrize("level", ["C", "D", "E", "F"] if OWN_UID else ["E", "F"])
def test_a_crashed_agent_leaves_nothing_below_b(level: str) -> None:
    """SIGKILL to the agent: its job is gone, its next start waits for the mould, sweeps the workspace and serves."""
    with rigged(slots=1) as rig:
        node = _agent_on(rig, None, level)
        mark = f"crash{os.getpid()}{level}"
        script = "touch here; (setsid sleep 60 &); setsid sleep 60 & echo up; sleep 60"
        job = rig.command("sh", "-c", script, trusted=True, env={"MARK": mark})
        rig.wait_output(job, "up")
        assert marked(mark)
        node.crash()
        wait_until(lambda: marked(mark) == [], "the job to be gone", 10)
        places = Workspaces.of(rig.home / "nodes" / node.name).path

        def left() -> list[str]:
            return sorted(os.listdir(places)) if places.exists() else []

        assert left() == [f"{job.id}.1"]
        rig.restart(node)
        rig.wait_state(job, "lost", timeout_s=30)
        assert left() == []
        rig.command("true", trusted=True).result(timeout=20)


def test_doctor_shows_the_ladder_and_exits_by_it(home: Path) -> None:
    """The table names every level tried and every promise; below B the exit code is 1."""
    weak = next(host for host in HOSTS if host.level > "B")
    for words, code in (([*CLI], 0), (without(weak, *CLI), 1)):
        done = subprocess.run(
            [*words, "--home", str(home), "doctor"], capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == code, done.stderr
        assert "isolation level: " in done.stdout
        assert "kill is certain" in done.stdout
        assert "Traceback" not in done.stdout + done.stderr
    assert "no untrusted job runs on this host" in done.stdout
    assert "fix: " in done.stdout


def _agent_on(rig: Rig, host: Host | None, max_level: str = "A") -> Node:
    """Start a node whose agent lacks something, with a policy that trusts."""
    (rig.home / "policy.toml").write_text(TRUSTING)
    return rig.start("weak", under=without(host) if host is not None else (), RINGFENCE_MAX_LEVEL=max_level)
