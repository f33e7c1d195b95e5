"""An agent that is killed in the middle of a start leaves nothing: no process and no group (acceptance 2).

Ended by the lifeline and the parent-death signal, which hold from the first instruction of zygote and mould on.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_agent.containment.cgroup import NodeGroups
from tests.containment.rig import marked
from tests.security.jobs import FULL
from tests.support import leaks
from tests.support.wait import pause, wait_until

ROOT = Path(__file__).parents[2]
KILLS = 200 if FULL else 30
LATEST_MS = 14
GONE_S = 3.0


@contextmanager
def nursery(node: str, mark: str) -> Iterator[subprocess.Popen[str]]:
    """Run the stand-ins' parent; whatever is left below it at the end is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.security.nursery", node, mark],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        yield process
    finally:
        left = below(process.pid)
        process.kill()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def below(pid: int) -> list[int]:
    """Return every process below one, zombies included."""
    found, todo = [], [pid]
    while todo:
        try:
            each = todo.pop()
            children = Path(f"/proc/{each}/task/{each}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(child) for child in children]
        todo += [int(child) for child in children]
    return found


@pytest.mark.endurance
@pytest.mark.timeout(600 if FULL else 60)
def test_an_agent_killed_in_a_start_leaves_nothing(node_name: str) -> None:
    """SIGKILL 0 to 14 ms after the request for a mould and a worker: within moments nothing of it runs."""
    mark = f"rfmark{secrets.token_hex(8)}"
    moments = random.Random(5)
    with nursery(node_name, mark) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(KILLS):
            process.stdin.write("go\n")
            agent = int(process.stdout.readline())
            assert below(agent), "the zygote was not there before the kill"
            delay_ms = moments.uniform(0, LATEST_MS)
            pause(delay_ms / 1000)
            os.kill(agent, signal.SIGKILL)
            what = f"kill {number}, {delay_ms:.1f} ms after the request: nothing to be left"
            wait_until(lambda: not below(process.pid), what, GONE_S)
            assert [pid for pid in marked(mark) if pid != process.pid] == []
    sweep(node_name)
    assert [group for group in leaks.cgroups() if node_name in group] == []


def sweep(node: str) -> None:
    """Remove the groups, as the next start of an agent of this name does."""
    for number in (0, 1):
        groups = NodeGroups.open(f"{node}-{number}")
        if groups is not None:
            groups.sweep()
            groups.close()


@pytest.mark.endurance
def test_a_tree_without_a_lifeline_would_be_left() -> None:
    """Counter-check: a plain runner that is killed leaves its tree, and the search below its parent finds it."""
    mark = f"rfmark{secrets.token_hex(8)}"
    runner = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    code = "import ctypes, os, signal, subprocess, sys\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    code += "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    code += (
        f"print(subprocess.Popen([sys.executable, '-c', {runner!r}, 'sleep', '30']).pid, flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"MARK": mark}
    ) as process:
        assert process.stdout is not None
        agent = int(process.stdout.readline())
        wait_until(lambda: below(agent), "the tree to stand")
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: agent not in below(process.pid), "the runner to be gone")
        left = below(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    assert len(left) == 1
