"""Attack 16: a socket of a host's daemon in a tree that jobs see is a way out, mounted read-only or not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from node_agent import ground as grounds
from node_agent import trees
from node_agent.errors import SetupError
from node_agent.sandbox import Defaults, plan_of
from node_agent.settings import AgentSettings
from runner import keyring
from runner.home import Home
from runner.request import build

STRANGER = 30_000
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user, which takes root")


@pytest.fixture
def tree(home: Path) -> Path:
    """A task path with a module and a folder."""
    found = home / "t"
    (found / "inner").mkdir(parents=True)
    (found / "tasks.py").write_text("")
    return found


def prepared(home: Path, task_path: Path) -> grounds.Ground:
    """Return the ground of an agent whose tasks lie in ``task_path``."""
    where = Home(home / "h")
    keyring.init(where)
    keyring.issue_card(where, "n1")
    (where.path / "policy.toml").write_text("version = 1\n")
    return grounds.prepare(AgentSettings(home=where.path, name="n1", task_path=(str(task_path),)))


def test_attack_16_a_node_with_a_socket_in_a_task_path_does_not_start(home: Path, tree: Path) -> None:
    """The agent names the socket and refuses, however deep it lies and whoever may connect to it."""
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tree / "inner" / "x.sock"))
        (tree / "inner" / "x.sock").chmod(0o777)
        with pytest.raises(SetupError, match=r"inner/x\.sock is a socket"):
            prepared(home, tree)
    (tree / "inner" / "x.sock").unlink()
    ground = prepared(home, tree)
    assert ground.loose == ()
    ground.close()


@pytest.mark.parametrize(("mode", "is_loose"), [(0o755, False), (0o700, False), (0o757, True), (0o1777, True)])
def test_attack_16_folders_that_others_can_write_are_found(tree: Path, mode: int, *, is_loose: bool) -> None:
    """One folder in a tree, into which others could put a socket later, makes the tree a loose one."""
    (tree / "inner").chmod(mode)
    assert trees.look([str(tree)]).loose == ({str(tree): str(tree / "inner")} if is_loose else {})


@ROOT
def test_attack_16_a_strangers_folder_is_loose(tree: Path) -> None:
    """So is a folder of another user than root and the agent's, and one that a group with others can write."""
    os.chown(tree / "inner", STRANGER, -1)
    assert list(trees.look([str(tree)]).loose) == [str(tree)]
    os.chown(tree / "inner", 0, STRANGER)
    assert trees.look([str(tree)]).loose == {}
    (tree / "inner").chmod(0o775)
    assert list(trees.look([str(tree)]).loose) == [str(tree)]


def test_a_link_is_not_followed(tree: Path, home: Path) -> None:
    """What a link leads to lies elsewhere, and is in no view because of it; a missing tree holds nothing."""
    other = home / "other"
    other.mkdir()
    other.chmod(0o777)
    (tree / "link").symlink_to(other)
    assert trees.look([str(tree), str(home / "missing")]) == trees.Look((), {})


def test_attack_16_a_job_that_sees_a_loose_tree_gets_no_unix_sockets() -> None:
    """The environment is seen by all jobs, a task path by tasks alone."""
    command, task = build({}, argv=["true"]), build({}, task="m:f")

    def allowed(*loose: str) -> list[bool]:
        node = Defaults("B", python_paths=("/py",), task_paths=("/tasks",), loose_paths=loose)
        return [plan_of(spec, 1, (), 1, 1, node).allow_unix for spec in (command, task)]

    assert [allowed(), allowed("/tasks"), allowed("/py")] == [[True, True], [True, False], [False, False]]
