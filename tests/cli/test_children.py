"""The daemons of `up`: restarted, ended in order, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cli.children import Child, Children, Program
from tests.support.wait import wait_until

SLEEPER = "import signal, sys, time; {} open(sys.argv[1], 'a').write('.'); time.sleep(60)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN);"


def program(mark: Path, before: str = "", *, stage: int = 0, stop_s: float = 5.0) -> Program:
    """Return a Python program that writes a dot to ``mark`` at each start and stays."""
    words = (sys.executable, "-I", "-S", "-c", SLEEPER.format(before), str(mark))
    return Program(mark.name, words, signal.SIGKILL, stop_s, stage)


@pytest.fixture
def children() -> Iterator[Children]:
    """A supervisor that is closed afterwards."""
    lines: list[str] = []
    found = Children(lines.append)
    yield found
    found.close()


def started(children: Children, program_: Program, mark: Path) -> Child:
    """Start a program and wait for its first dot."""
    child = children.start(program_)
    wait_until(lambda: mark.exists() and mark.read_text(), f"{mark} to be written")
    return child


def watched(children: Children) -> bool:
    """Let the supervisor look at its children once."""
    children.watch(0.05)
    return True


def test_a_dead_child_starts_again_after_a_growing_pause(children: Children, home: Path) -> None:
    """kill -9 brings a new process, and quick deaths double the pause."""
    mark = home / "mark"
    child = started(children, program(mark), mark)
    first, pause_s = child.pid, child.pause_s
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: watched(children) and mark.read_text() == "..", "the second start")
    assert child.pid not in (0, first)
    assert child.pause_s == 2 * pause_s


def test_stop_ends_even_a_deaf_child(children: Children, home: Path) -> None:
    """SIGKILL follows where SIGTERM is ignored; stopping twice is fine."""
    mark = home / "mark"
    child = started(children, program(mark, DEAF, stop_s=0.2), mark)
    pid = child.pid
    children.stop()
    children.stop()
    assert not Path(f"/proc/{pid}").exists()


def test_a_child_ends_with_its_parent(home: Path) -> None:
    """If `up` is killed with SIGKILL, the kernel ends its children."""
    mark = home / "mark"
    code = (
        "import signal, sys, time; from pathlib import Path; from runner.cli.children import Children, Program;"
        "c = Children(print); p = Program('x', tuple(sys.argv[1:]), signal.SIGKILL, 5.0);"
        "print(c.start(p).pid, flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-I", "-c", code, *program(mark).words]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(mark.exists, "the child to run")
        parent.kill()
    wait_until(lambda: not _runs(pid), "the child to end with its parent")


def test_a_wrong_set_up_is_not_tried_again(children: Children) -> None:
    """Exit code 78 ends everything, with that code."""
    words = (sys.executable, "-I", "-S", "-c", "raise SystemExit(78)")
    children.start(Program("x", words, signal.SIGKILL, 1.0))
    wait_until(lambda: watched(children) and children.over(), "the end of all")
    assert children.exit_code == 78


def test_children_see_nothing_of_the_environment(
    children: Children, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable of ours reaches a daemon but time zone, home and heartbeat (attack 18)."""
    monkeypatch.setenv("PYTHONPATH", "/tmp")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("RINGFENCE_HEARTBEAT_S", "2")
    mark = home / "mark"
    child = started(children, program(mark), mark)
    environ = Path(f"/proc/{child.pid}/environ").read_bytes()
    found = dict(entry.split(b"=", 1) for entry in environ.split(b"\0") if entry)
    assert found.pop(b"RINGFENCE_HEARTBEAT_S") == b"2"
    assert found.keys() <= {b"PATH", b"LANG", b"TZ", b"HOME"}


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
