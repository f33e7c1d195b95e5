"""Descriptors left in flight (attack 34): the kernel counts them per user, and no job may use up those of the agent."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tests.support import rig as rigs
from tests.support.rig import Rig

# Leaves as many descriptors in flight as it can: sent over pairs of sockets that nobody reads. Ends after 40 s.
HOARD = """
import array, os, signal, socket, time
signal.alarm(40)
sent, pairs = 0, []
try:
    while sent < 60_000:
        pairs.append(socket.socketpair())
        pairs[-1][0].setblocking(False)
        while True:
            try:
                pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))])
                sent += 200
            except BlockingIOError:
                break
except OSError as error:
    print("stopped by", os.strerror(error.errno), flush=True)
print("sent", sent, flush=True)
time.sleep(40)
"""


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store and a home, with the usual soft limit of 1,024 for what this process starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        with rigs.rigged(slots=3, real=True) as found:
            yield found
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_attack_34_what_a_job_leaves_in_flight_keeps_no_other_job_from_starting(rig: Rig) -> None:
    """Two hoarders run; the agent still hands descriptors to ten more jobs, and a fresh mould each."""
    node = rig.start("one")
    files = int(next(line for line in _limits(node.pid) if line.startswith("Max open files")).split()[3])
    assert files == resource.getrlimit(resource.RLIMIT_NOFILE)[1], "the agent raises its own soft limit"
    hoards = [rig.command("python3", "-c", HOARD) for _ in range(2)]
    for hoard in hoards:
        rig.wait_output(hoard, "sent")
        assert "Too many references" in rig.logs(hoard)
    # At level B the second finds the first one's in its way: jobs of one user share that count.
    assert 0 < sum(int(rig.logs(hoard).split()[-1]) for hoard in hoards) <= files // 2
    more = [rig.command("true", fresh=True) for _ in range(10)]
    assert {job.outcome(30).state for job in more} == {"finished"}
    assert {hoard.kill().outcome for hoard in hoards} == {"killed"}


def test_attack_34_too_many_in_flight_all_the_same_costs_the_job_with_most_sockets(rig: Rig) -> None:
    """Injected ETOOMANYREFS: the node says degraded, the job with most sockets is killed by it, the next one starts."""
    rig.start("one", faulty=True)
    few = rig.command("python3", "-c", "import time; print('up', flush=True); time.sleep(40)")
    pairs = "import socket, time; s = [socket.socketpair() for _ in range(20)]; print('up', flush=True); time.sleep(40)"
    many = rig.command("python3", "-c", pairs)
    for job in (few, many):
        rig.wait_output(job, "up")
    rig.fault.write_text("crowded")
    assert rig.command("true").outcome(30).state == "finished"
    rig.wait_state(many, "killed")
    assert rig.state(few) == "running"
    ended = next(event for event in many.events() if event.type == "job.ended")
    assert str(ended.detail["by"]).startswith("node ")
    assert "descriptors in flight" in str(ended.detail["kill_reason"])
    told = [event for event in rig.app.events() if event.type == "node.degraded"]
    assert told[0].detail["what"] == "descriptors in flight"
    assert few.kill().outcome == "killed"


def _limits(pid: int) -> list[str]:
    with open(f"/proc/{pid}/limits", encoding="ascii") as file:
        return file.read().splitlines()
