"""An agent starts on no ground that others could change, and shows its jobs none of its secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node_agent import ground as grounds
from node_agent.errors import PolicyError, SetupError
from node_agent.settings import AgentSettings
from runner import keyring
from runner.errors import RingfenceError, UnsafeFileError
from runner.home import Home
from tests.support import scratch

STRANGER = 30_000
POLICY = "version = 1\n"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which takes root")


@pytest.fixture
def ready(home: Path) -> Home:
    """A home with keys, a card for node n1 and a policy."""
    found = Home(home / "h")
    keyring.init(found)
    keyring.issue_card(found, "n1")
    (found.path / "policy.toml").write_text(POLICY)
    return found


def start(home: Home, **changes: object) -> None:
    """Prepare the ground of an agent, and give it back."""
    grounds.prepare(AgentSettings(home=home.path, name="n1", **changes)).close()  # type: ignore[arg-type]  # real fields


def test_a_proper_home_is_taken(ready: Home) -> None:
    """The other tests of this file refuse for their own reason, not for another."""
    start(ready)


def test_attack_01_no_task_path_holds_the_home(ready: Home) -> None:
    """Jobs see task paths: with the keys below one, a level B job would read them, its uid being the agent's."""
    inside = ready.path / "tasks"
    inside.mkdir()
    start(ready, task_path=(str(inside),))
    for path in (ready.path, ready.path.parent):
        with pytest.raises(SetupError, match="which jobs can read"):
            start(ready, task_path=(str(path),))
    link = ready.path.parent / "link"
    link.symlink_to(ready.path.parent)
    with pytest.raises(SetupError, match="which jobs can read"):
        start(ready, task_path=(str(link),))


def test_attack_01_the_home_is_in_no_folder_that_every_job_sees(ready: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the environment that the agent runs from nor in a folder of the system."""
    monkeypatch.setattr(grounds, "python_paths", lambda: (str(ready.path.parent),))
    with pytest.raises(SetupError, match="which jobs can read"):
        start(ready)
    monkeypatch.setattr(grounds, "python_paths", lambda: ())
    monkeypatch.setattr(grounds, "SYSTEM_TREES", (str(ready.path.parent),))
    with pytest.raises(SetupError, match="which jobs can read"):
        start(ready)


def test_attack_01_the_usual_homes_of_other_fleets_are_fenced(ready: Home) -> None:
    """A job can be granted no path at or above a home of this host, whichever fleet's it is."""
    ground = grounds.prepare(AgentSettings(home=ready.path, name="n1"))
    try:
        fence = ground.protected.closed
        assert {"/var/lib/ringfence", str(ready.path)} <= {*fence.objects.values(), *fence.around.values()}
    finally:
        ground.close()


@ROOT
@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_attack_18_root_refuses_a_policy_that_others_can_write(ready: Home, mode: int) -> None:
    """The file's own mode and owner count."""
    (ready.path / "policy.toml").chmod(mode)
    with pytest.raises(UnsafeFileError, match="open to other users"):
        start(ready)
    (ready.path / "policy.toml").chmod(0o644)
    os.chown(ready.path / "policy.toml", STRANGER, STRANGER)
    with pytest.raises(UnsafeFileError, match="belongs to user 30000"):
        start(ready)


@ROOT
def test_attack_18_root_refuses_a_policy_in_another_users_folder(ready: Home) -> None:
    """A file of root's is no use where another user can put his own in its place."""
    with scratch.folder(mode=0o755) as folder:
        policy = folder / "policy.toml"
        policy.write_text(POLICY)
        start(ready, policy=policy)
        os.chown(folder, STRANGER, STRANGER)
        with pytest.raises(UnsafeFileError, match="belongs to user 30000"):
            start(ready, policy=policy)


@ROOT
def test_attack_18_root_refuses_code_that_others_can_write(ready: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreter, environment and packages, and each folder above them, are root's alone."""
    with scratch.folder(mode=0o755) as folder:
        monkeypatch.setattr("sys.prefix", str(folder / "venv"))
        (folder / "venv").mkdir()
        start(ready)
        os.chown(folder, STRANGER, STRANGER)
        with pytest.raises(UnsafeFileError, match="belongs to user 30000"):
            start(ready)


def test_a_missing_policy_is_told(ready: Home) -> None:
    """Fail closed, with the way out."""
    (ready.path / "policy.toml").unlink()
    with pytest.raises((PolicyError, RingfenceError), match="no policy at"):
        start(ready)
