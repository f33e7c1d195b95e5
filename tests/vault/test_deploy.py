"""The systemd units: rendered for this environment, accepted by systemd where it is, and as strict as they say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import units
from runner.cli import broker as brokers
from runner.cli.children import environment
from runner.home import Home
from tests.support.wait import wait_until
from tests.vault.test_doctor import answers, home

__all__ = ["home"]

PROGRAM = Path(sys.prefix) / "bin" / "ringfence"
#: Every directive that the units use, by section: a misspelt one is a warning in a log that nobody reads.
KNOWN = {
    "Unit": {"Description", "Documentation", "After", "Before", "Wants", "StartLimitIntervalSec"},
    "Install": {"WantedBy"},
    "Service": {
        *("Type", "User", "ExecStart", "Delegate", "KillMode", "TimeoutStopSec", "Restart", "RestartSec"),
        *("RestartPreventExitStatus", "OOMPolicy", "OOMScoreAdjust", "TasksMax", "LimitNOFILE", "LimitCORE"),
        *("LimitMEMLOCK", "UMask", "NoNewPrivileges", "CapabilityBoundingSet", "AmbientCapabilities"),
        *("PrivateDevices", "PrivateNetwork", "PrivateTmp", "ProtectClock", "ProtectKernelLogs", "ReadWritePaths"),
        *("ProtectKernelModules", "ProtectKernelTunables", "ProtectControlGroups", "ProtectHostname"),
        *("ProtectSystem", "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID"),
        *("LockPersonality", "MemoryDenyWriteExecute", "SystemCallArchitectures", "SystemCallFilter"),
        "SystemCallErrorNumber",
    },
}
NAMES = {"ringfence-agent.service", "ringfence-broker.service", "ringfence-egress.service"}
WAYS = [{"home": "/var/lib/ringfence"}, {"home": "/srv/a b%c", "name": "n-1", "user": "ringfence"}]


def read(text: str) -> dict[str, dict[str, str]]:
    """Return a unit's directives by section; a line that is none fails."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            assert key in KNOWN[section], line
            assert key not in found.setdefault(section, {}), f"{key} stands twice"
            found[section][key] = value
    return found


@pytest.mark.parametrize("way", WAYS)
def test_units_are_well_formed(way: dict[str, str]) -> None:
    """Known directives only, each once, nothing left to fill in, and a program that is there."""
    rendered = units.render(PROGRAM, **way)
    assert rendered.keys() == NAMES
    for text in rendered.values():
        assert set(read(text)) == {"Unit", "Service", "Install"}
        assert "@" not in text.replace("@system-service", "")
        start = read(text)["Service"]["ExecStart"]
        assert start.startswith(f"{PROGRAM} --home ")
        assert "%" not in start.replace("%%", "")
        assert read(text)["Service"].get("User") == way.get("user")


def test_what_the_units_promise() -> None:
    """The agent has a delegated group; the broker no network, no capability but to give up root, no core."""
    rendered = {name: read(text)["Service"] for name, text in units.render(PROGRAM, "/var/lib/ringfence").items()}
    assert rendered["ringfence-agent.service"]["Delegate"] == "yes"
    broker = rendered["ringfence-broker.service"]
    assert broker["PrivateNetwork"] == broker["NoNewPrivileges"] == broker["MemoryDenyWriteExecute"] == "yes"
    assert broker["CapabilityBoundingSet"] == "CAP_SETUID CAP_SETGID"
    assert broker["RestrictAddressFamilies"] == "AF_UNIX"
    assert {one["RestartPreventExitStatus"] for one in rendered.values()} == {"78"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_them(way: dict[str, str], tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say against a unit."""
    for name, text in units.render(PROGRAM, **way).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / name) for name in NAMES)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize(
    ("home", "name", "user"), [("relative", None, None), ('/a"b', None, None), ("/a", "n 1", None), ("/a", None, "a;b")]
)
def test_what_can_not_be_rendered(home: str, name: str | None, user: str | None) -> None:
    """A path or name that systemd would read otherwise is refused."""
    with pytest.raises(ValueError, match=r"home|name"):
        units.render(PROGRAM, home, name=name, user=user)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The units are written, and their paths told."""
    assert units.main(["--out", str(tmp_path / "u")]) == 0
    assert {Path(line).name for line in capsys.readouterr().out.splitlines()} == NAMES
    assert units.main(["--out", str(tmp_path), "--name", "a b"]) == 2


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can limit its capabilities")
def test_the_broker_starts_with_what_its_unit_leaves_it(home: Home) -> None:
    """With two capabilities, no new privileges and a core limit of 1 the broker comes up and gives up root."""
    words = ["setpriv", "--bounding-set=-all,+setuid,+setgid", "--inh-caps=-all", "--no-new-privs"]
    limited = ["prlimit", "--core=1:1", *words, *brokers.program(home).words]
    with subprocess.Popen(limited, env=environment(), stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: answers(home), "the broker answers")
            owner = home.vault.stat().st_uid
            assert f"\nUid:\t{owner}\t" in Path(f"/proc/{process.pid}/status").read_text()
        finally:
            process.terminate()
    assert process.returncode == 0
