"""`kill`: whatever a job does, nothing of it is left, and the receipt says so.

Acceptance 3, scenarios A-K03 and A-K05.
"""

from __future__ import annotations

import secrets
import statistics
import time
from pathlib import Path
from typing import cast

import pytest

from tests.support.fleet import Fleet, processes_with
from tests.support.wait import wait_until

KILLS = 20
P50_MS = 15.0
GRACE_S = 1.0
PORT = "38211"
LISTENER = (
    "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', {port})); s.listen(); print('up', flush=True)"
)


def started(fleet: Fleet, programs: Path, *words: str) -> tuple[str, str]:
    """Start a program of this folder with a fresh mark as its last argument; return job and mark once it is up."""
    mark = secrets.token_hex(8)
    job = fleet.detach("--read", str(programs), "--", "python3", *words, mark)
    fleet.wait_output(job, "up")
    return job, mark


def test_a_hostile_tree_is_gone_with_proof(fleet: Fleet, programs: Path) -> None:
    """Acceptance 3: the receipt says 0 survivors, and an independent look through /proc agrees."""
    job, mark = started(fleet, programs, str(programs / "hostile.py"))
    assert len(processes_with(mark)) >= 6
    receipt = fleet.json("kill", job)[0]
    assert processes_with(mark) == []
    assert (receipt["outcome"], receipt["survivors"], receipt["job"]) == ("killed", 0, job)
    assert cast("int", receipt["processes"]) >= 6
    assert fleet.state(job) == "killed"


@pytest.mark.alone
@pytest.mark.timeout(180)
def test_a_kill_takes_milliseconds(fleet: Fleet, programs: Path) -> None:
    """Acceptance 3: p50 of total_ms over 20 kills of hostile trees."""
    times = []
    for _ in range(KILLS):
        job, mark = started(fleet, programs, str(programs / "hostile.py"))
        receipt = fleet.json("kill", job)[0]
        assert (receipt["outcome"], receipt["survivors"]) == ("killed", 0)
        assert processes_with(mark) == []
        times.append(cast("float", receipt["total_ms"]))
    assert statistics.median(times) <= P50_MS, sorted(times)


def test_children_do_not_survive_and_their_port_is_free(fleet: Fleet, programs: Path) -> None:
    """Scenario A-K03: child, session and daemon with a port die; the next job binds the port at its first try."""
    mark = secrets.token_hex(8)
    listener = LISTENER.format(port=PORT)
    sleeper = "import time; time.sleep(60)"
    script = (
        f'python3 -c "{sleeper}" {mark} & setsid python3 -c "{sleeper}" {mark} & '
        f'(setsid python3 -c "{listener}; {sleeper}" {mark} &) ; wait'
    )
    job = fleet.detach("--node", "node-1", "--", "sh", "-c", script, mark)
    fleet.wait_output(job, "up")
    assert fleet.run("kill", job).returncode == 0
    assert processes_with(mark) == []
    again = fleet.run("run", "--node", "node-1", "--", "python3", "-c", listener)
    assert (again.returncode, again.stdout) == (0, "up\n"), again.stderr


@pytest.mark.parametrize("kind", ["swallow", "deaf", "stopped", "stopped-child"])
def test_swallowed_and_ignored_signals_end_in_force(fleet: Fleet, programs: Path, kind: str) -> None:
    """Scenario A-K05: gone within the grace and 5 s, state killed, and the receipt says that force was needed."""
    job, mark = started(fleet, programs, str(programs / "stubborn.py"), kind)
    begun = time.monotonic()
    receipt = fleet.json("kill", job, "--grace", str(GRACE_S))[0]
    assert time.monotonic() - begun < GRACE_S + 5
    assert (receipt["outcome"], receipt["survivors"], receipt.get("forced")) == ("killed", 0, True)
    assert processes_with(mark) == []
    assert fleet.state(job) == "killed"


def test_a_polite_job_needs_no_force(fleet: Fleet) -> None:
    """With a grace, SIGTERM is enough for a program that listens."""
    mark = secrets.token_hex(8)
    job = fleet.detach("--", "python3", "-c", "import time; print('up', flush=True); time.sleep(60)", mark)
    fleet.wait_output(job, "up")
    receipt = fleet.json("kill", job, "--grace", "10")[0]
    assert (receipt["outcome"], receipt["survivors"], receipt.get("forced", False)) == ("killed", 0, False)
    assert fleet.state(job) == "killed"


def test_exit_codes_of_kill(fleet: Fleet) -> None:
    """0 confirmed or no match, 4 unknown, 5 already ended."""
    job = fleet.detach("--", "sleep", "60")
    assert fleet.run("kill", job).returncode == 0
    assert fleet.run("kill", job).returncode == 5
    assert fleet.run("kill", "main-" + "0" * 26).returncode == 4
    assert fleet.run("kill", "--tag", "no=body").returncode == 0
    assert fleet.run("kill").returncode == 2


def test_a_tag_kills_its_jobs_and_no_others(fleet: Fleet) -> None:
    """A selector reaches waiting and running jobs; others go on."""
    tag = secrets.token_hex(4)
    hit = [fleet.detach("--tag", f"run={tag}", "--", "sleep", "60") for _ in range(3)]
    other = fleet.detach("--", "sleep", "60")
    fleet.wait_state(other, "running")
    receipts = fleet.json("kill", "--tag", f"run={tag}")
    assert sorted(str(receipt["job"]) for receipt in receipts) == sorted(hit)
    assert {fleet.state(job) for job in hit} == {"killed"}
    assert fleet.state(other) == "running"
    assert fleet.run("kill", other).returncode == 0


def test_the_nodes_own_socket_kills_too(fleet: Fleet) -> None:
    """`agent kill` reaches a running job without the store."""
    mark = secrets.token_hex(8)
    job = fleet.detach("--", "python3", "-c", "import time; time.sleep(60)", mark)
    wait_until(lambda: processes_with(mark), "the job to run")
    done = fleet.run("agent", "kill", job, "--json")
    assert done.returncode == 0, done.stderr
    assert processes_with(mark) == []
    fleet.wait_state(job, "killed")
