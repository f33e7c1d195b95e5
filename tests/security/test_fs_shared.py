"""What the host mounts while a job runs stays out of the job's view, on hosts whose mounts are shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containment.rig import LEVEL

TREE = Path(__file__).parents[2]


def run(module: str, *words: str, user: bool) -> str:
    """Run a module as root, which may become an ordinary user; return what it printed."""
    words_of_user = ["setpriv", "--reuid", "65533", "--clear-groups", "--", sys.executable, "-c", "import pytest"]
    if user and subprocess.run(words_of_user, check=False, cwd=TREE).returncode:
        pytest.skip("an ordinary user can't run this checkout's environment")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.security.{module}", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=TREE,
        env={"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(LEVEL == "B", reason="needs root to mount for the host; level B is tried from there")
@pytest.mark.parametrize("level", ["A", "B"])
def test_a_later_mount_of_the_host_appears_in_no_job(node_name: str, home: Path, level: str) -> None:
    """Below a granted folder and below the node's own paths the job sees the folder that was there, nothing else."""
    for name in ("grant/sub", "tree/sub"):
        (home / name).mkdir(parents=True)
        (home / name).chmod(0o777)
    told = run("fs_shared", level, node_name, str(home), user=level == "B")
    lines = [line for line in told.splitlines() if line.strip() and line != "up"]
    assert [line.split()[0] for line in lines] == ["empty", "empty"], "private mounts: " + told


@pytest.mark.skipif(LEVEL == "B", reason="needs root to mount for the host; level B is tried from there")
def test_a_folder_with_mounts_in_it_is_refused_at_level_b(node_name: str, home: Path) -> None:
    """What a mount of the host covers is shown to nobody: the kernel refuses, and the message says what to grant."""
    (home / "sub").mkdir()
    told = run("fs_below", node_name, str(home), user=True)
    assert told.startswith("grant: "), told
    assert f"{home} holds mounts of the host" in told
