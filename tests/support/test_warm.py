"""What tests start from loaded processes does as what starts from nothing, and ends with who started it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import agents, shell
from tests.support.fleet import CLI
from tests.support.rig import rigged
from tests.support.wait import wait_until


@pytest.mark.parametrize("words", [["kill", "--help"], ["kill", "main-1"], ["no-such-command"]])
def test_a_command_says_and_ends_as_one_from_nothing(home: Path, words: list[str]) -> None:
    """Exit code, output and complaints of the shell's commands are those of the real command line."""
    whole = ["--home", str(home / "h"), *words]
    cold = subprocess.run(
        [*CLI, *whole], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
    )
    warm = shell.shared().run(whole, 30)
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)


def test_an_agent_s_end_is_told(home: Path) -> None:
    """One that can't start ends with its own exit code and words; one that has ended is sent no signal."""
    log = home / "log"
    with log.open("ab") as file:
        found = agents.start(["--home", str(home / "none"), "--name", "a"], {"PATH": os.defpath}, file.fileno())
    assert found.wait(20) == 78
    assert "ringfence: agent: " in log.read_text()
    found.send_signal(signal.SIGKILL)
    assert found.poll() == 78


def test_no_agent_outlives_the_nursery(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end when its socket is closed, as it is when this process ends, whatever they are doing."""
    monkeypatch.setattr(agents, "_nursery", None)
    with rigged() as rig:
        node = rig.start("a")
        agents.close()
        wait_until(node.dead, "the agent to end")
        assert node.wait() == -signal.SIGKILL
        wait_until(lambda: not Path(f"/proc/{node.pid}").exists(), "its process to be gone")
