"""A node that runs thousands of short jobs holds at the end what it held at the start (acceptance 5, scenario A-F04).

16 slots and 400 jobs as part of the tests; `make endurance` makes it 64 slots and 5,000 jobs and prints the figures.
"""

from __future__ import annotations

from collections import Counter

import pytest

from runner import Grants
from runner.job import Job
from tests.security.jobs import FULL
from tests.support.holdings import Holdings, look
from tests.support.rig import Node, Rig, rigged
from tests.support.wait import wait_until

SLOTS, JOBS = (64, 5000) if FULL else (16, 400)
ENOUGH_S = 600.0 if FULL else 90.0
#: Descriptors come and go with connections; a leak of one a job would be hundreds.
SLACK_DESCRIPTORS = 8
SLACK_AGENT_KB = 8_000
#: A mould grows a little with its first attempts, once.
SLACK_SLOT_KB = 600


@pytest.mark.alone
@pytest.mark.endurance
@pytest.mark.timeout(900 if FULL else 150)
def test_many_jobs_leave_the_node_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """After the series: no more descriptors, processes, groups, mounts or uids than before, and hardly more memory."""
    with rigged(slots=SLOTS, heartbeat_s=5.0, real=True) as rig:
        node = rig.start("a")
        fill(rig)
        before = look(node.pid, node.name)
        series(rig, [rig.command(*words(number)) for number in range(JOBS)])
        fill(rig)
        after = settled(node, before)
        rig.app.close()
    with capsys.disabled():
        print(f"\n{JOBS} jobs on {SLOTS} slots\n  before: {before}\n  after:  {after}")  # noqa: T201 - what it is run for
    assert after.descriptors <= before.descriptors + SLACK_DESCRIPTORS
    # A mould for each slot and the worker that waits in it, the zygote, and openers of paths: some may have come late.
    assert after.processes <= max(before.processes, 2 * SLOTS + 6)
    assert (after.groups, after.mounts, after.uid_locks) == (before.groups, before.mounts, before.uid_locks)
    assert after.agent_kb <= before.agent_kb + SLACK_AGENT_KB
    assert after.tree_kb <= before.tree_kb + SLACK_SLOT_KB * SLOTS


def words(number: int) -> list[str]:
    """Return a short command: most end at once, some with an error, a signal, or with children left behind."""
    odd = {7: "exit 3", 13: "kill -9 $$", 17: "setsid sleep 30 & sleep 30 & exit 0", 19: "echo x >/tmp/f; echo out"}
    script = odd.get(number % 20)
    return ["true"] if script is None else ["sh", "-c", script]


def fill(rig: Rig) -> None:
    """Have every slot serve one job at the same time, so that all are in the same state afterwards."""
    go = rig.work / "go"
    script = f"while [ ! -e {go} ]; do sleep 1; done"
    jobs = [rig.command("sh", "-c", script, grants=Grants(read=(str(rig.work),))) for _ in range(SLOTS)]
    wait_until(lambda: all(rig.state(job) == "running" for job in jobs), "every slot to be busy", ENOUGH_S)
    go.touch()
    series(rig, jobs)
    go.unlink()
    rig.wait_idle()


def series(rig: Rig, jobs: list[Job[None]]) -> None:
    """Wait until all of these have ended."""
    left = {job.id: job for job in jobs}

    def done() -> bool:
        for job in list(left.values()):
            if rig.state(job) not in ("finished", "failed"):
                return False
            del left[job.id]
        return True

    try:
        wait_until(done, "all jobs to end", ENOUGH_S)
    except AssertionError:
        states = Counter(rig.state(job) for job in left.values())
        raise AssertionError(f"{states}; the agent's last words: {next(iter(rig.nodes.values())).tail()}") from None


def settled(node: Node, before: Holdings) -> Holdings:
    """Return a look at the agent once what is just going away is gone, or the last look if it does not go."""
    seen = [look(node.pid, node.name)]

    def calm() -> bool:
        seen.append(look(node.pid, node.name))
        return seen[-1].processes <= before.processes and seen[-1].uid_locks == before.uid_locks

    try:
        wait_until(calm, "the node to be as before")
    except AssertionError:
        return seen[-1]
    return seen[-1]
