"""A host that can't isolate runs nothing: refused with reason and fix, never without the walls (A-I01)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runner import JobRefused
from tests.support import without
from tests.support.fleet import CLI
from tests.support.rig import Rig, rigged

WITHOUT = (sys.executable, "-I", without.__file__, "unshare")


def _crippled(rig: Rig) -> None:
    """Start a node whose kernel refuses new namespaces."""
    rig.start("weak", under=WITHOUT)


def test_i01_without_namespaces_a_job_is_refused_and_never_runs_bare() -> None:
    """No marker, reason and fix in the record, and the node says what it can't do."""
    with rigged() as rig:
        _crippled(rig)
        job, marker = rig.pulse("marker")
        with pytest.raises(JobRefused) as refused:
            job.result(timeout=20)
        assert refused.value.reason == "level"
        assert "Fix: " in str(refused.value)
        assert marker.read_text() == ""
        record = rig.record(rig.nodes["weak"])
        assert str(record["level"]) > "B"
        assert record["enforcement"]["missing"]  # type: ignore[index]  # a JSON object
        rig.wait_idle()


def test_i01_an_untrusted_job_that_asks_for_less_is_refused_too() -> None:
    """Naming a lower level is no way around the walls."""
    with rigged() as rig:
        _crippled(rig)
        with pytest.raises(JobRefused) as refused:
            rig.command("true", min_level="F").result(timeout=20)
        assert refused.value.reason == "level"
        with pytest.raises(JobRefused):
            rig.command("true", min_level="F", trusted=True).result(timeout=20)


def test_doctor_tells_what_is_missing_and_how_to_get_it(home: Path) -> None:
    """On such a host doctor ends with 1 and names the fix."""
    done = subprocess.run(
        [*WITHOUT, *CLI, "doctor", "--json", "--home", str(home)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    host = json.loads(done.stdout)["host"]
    assert host["level"] > "B"
    assert host["fix"]
    assert all(missing["fix"] for missing in host["missing"])
