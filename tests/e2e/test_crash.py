"""Agents killed, stopped and cut off in the middle of everything: nothing outlives its job, and every job ends once.

Acceptance 5, scenario A-L01, attack 36.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import App, Grants
from runner.job import Job
from tests.support import fleet as fleets
from tests.support.fleet import processes_with
from tests.support.rig import HEARTBEAT_S, PROGRAMS, Node, Rig, ends_of, rigged
from tests.support.wait import wait_until

#: DESIGN §4: a lost agent's jobs have their next attempt or their end within this.
TAKEOVER_BEATS = 3
UP_HEARTBEAT_S = 5.0
TREES = 5
#: Crashes at each step; `make endurance` has ten, fifty in all.
CRASHES = 10 if os.environ.get("RINGFENCE_TEST_FULL") else 3


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store and a home; each test starts its own agents."""
    with rigged() as found:
        yield found
        found.app.close()


def alive(marker: Path) -> list[int]:
    """Return the host's processes that name this marker file."""
    return [pid for pid in processes_with(str(marker)) if not zombie(pid)]


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def spans(marker: Path) -> dict[str, tuple[float, float]]:
    """Return first and last pulse of each process that wrote whole lines to the marker."""
    found: dict[str, tuple[float, float]] = {}
    for line in marker.read_text().splitlines():
        name, _, at = line.partition(" ")
        if at:
            first = found.get(name, (float(at), 0.0))[0]
            found[name] = (first, float(at))
    return found


def attempts(marker: Path) -> list[tuple[float, float]]:
    """Return the spans of a marker in order of time; each job here has one pulsing process an attempt."""
    return sorted(spans(marker).values())


@pytest.mark.timeout(120)
def test_an_agent_that_is_killed_takes_its_trees_with_it() -> None:
    """Acceptance 5: five trees are gone within 1 s, `up` starts the agent again, each job ends or goes on in time."""
    options = ("--nodes", "1", "--slots", str(TREES), "--allow", str(PROGRAMS))
    with fleets.running(*options) as fleet, App(home=fleet.home) as app:
        trees = [start_tree(app, fleet.work, f"tree-{number}", number % 2) for number in range(TREES)]
        for _, marker in trees:
            wait_pulsing(marker)
        (agent,) = app.nodes()
        os.kill(agent.pid, signal.SIGKILL)
        wait_until(lambda: not any(alive(marker) for _, marker in trees), "every tree to be gone", 1.0)
        wait_until(lambda: settled(trees), "each job to end or go on", TAKEOVER_BEATS * UP_HEARTBEAT_S)
        for job, _ in trees:
            job.kill()
        assert app.nodes()[0].pid != agent.pid
        assert {job.outcome(10).state for job, _ in trees} == {"lost", "killed"}


def wait_pulsing(marker: Path) -> None:
    """Wait until all four processes of a tree have written to the marker."""
    wait_until(lambda: len(spans(marker)) == 4, "the whole tree to pulse", 30)


def start_tree(app: App, work: Path, name: str, retries: int) -> tuple[Job[None], Path]:
    marker = work / name
    marker.touch()
    grants = Grants(read=[str(PROGRAMS)], write=[str(work)])
    argv = ["python3", str(PROGRAMS / "pulse.py"), str(marker), "tree"]
    return app.command(argv, grants=grants, retries=retries), marker


def settled(trees: list[tuple[Job[None], Path]]) -> bool:
    views = [job.status() for job, _ in trees]
    return all(view.state == "lost" or (view.state == "running" and view.attempt == 2) for view in views)


def two_nodes(rig: Rig) -> tuple[Node, Node]:
    return rig.start("a"), rig.start("b")


def holder(rig: Rig, job: Job[None], nodes: tuple[Node, Node]) -> tuple[Node, Node]:
    """Return the node that runs the job, and the other."""
    name = job.status().node
    first, second = nodes
    return (first, second) if first.name == name else (second, first)


def test_a_stopped_agent_loses_its_jobs_before_another_has_them(rig: Rig) -> None:
    """Acceptance 5: past the lease its jobs die, the next attempt runs elsewhere, without overlap; SIGCONT heals it."""
    nodes = two_nodes(rig)
    job, marker = rig.pulse("stopped", "chatty", retries=3)
    rig.wait_output(job, "up")
    stopped, other = holder(rig, job, nodes)
    boot = rig.boot(stopped)
    stopped.signal(signal.SIGSTOP)
    wait_until(lambda: not alive(marker), "the job to die with the lease", 2 * HEARTBEAT_S)
    wait_until(lambda: len(attempts(marker)) == 2, "the next attempt", 2 * TAKEOVER_BEATS * HEARTBEAT_S)
    assert (rig.attempt(job), job.status().node) == (2, other.name)
    (_, last), (first, _) = attempts(marker)
    assert last < first, "two attempts at one time"
    late = sorted(spans(marker), key=lambda name: spans(marker)[name])[0]
    before = rig.logs(job).count(late)
    stopped.signal(signal.SIGCONT)
    wait_until(lambda: rig.boot(stopped) not in {"", boot}, "a new boot of the stopped agent", 10)
    wait_until(lambda: rig.record(stopped).get("state") == "ready", "it to serve again", 10)
    assert (rig.state(job), rig.attempt(job), job.status().node) == ("running", 2, other.name)
    assert rig.logs(job).count(late) == before, "late lines of the first attempt"
    assert job.kill().outcome == "killed"
    assert ends_of(rig, [job]) == {job.id: ("killed", 1)}
    pinned = rig.command("true", node=stopped.name)
    assert pinned.outcome(20).state == "finished"


def test_a_stopped_agent_that_comes_back_in_time_keeps_its_job(rig: Rig) -> None:
    """A pause shorter than lease minus margin changes nothing."""
    node = rig.start("a")
    job, marker = rig.pulse("short")
    rig.wait_output(job, "up")
    boot = rig.boot(node)
    node.signal(signal.SIGSTOP)
    size = marker.stat().st_size
    wait_until(lambda: marker.stat().st_size > size + 500, "a part of the lease to pass", 1.0)
    node.signal(signal.SIGCONT)
    size = marker.stat().st_size
    wait_until(lambda: marker.stat().st_size > size + 5000, "the job to go on past the old lease", 10)
    assert (rig.boot(node), rig.attempt(job), len(attempts(marker))) == (boot, 1, 1)
    assert job.kill().outcome == "killed"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("step", ["claim", "mark", "running", "before-finish", "after-finish"])
def test_a_crash_at_this_step_leaves_one_result(rig: Rig, step: str) -> None:
    """Acceptance 5: SIGKILL at one exact step, several times: one end state, one end event and one result each."""
    node = rig.start("a", faulty=True)
    jobs = []
    for _ in range(CRASHES):
        rig.fault.write_text(step)
        job = rig.command("sh", "-c", "sleep 0.1; echo ran", retries=1)
        jobs.append(job)
        assert node.wait() == -signal.SIGKILL
        rig.restart(node)
        outcome = job.outcome(20)
        # What never started is not counted; what the store knows as ended stays; anything else runs once more.
        expected = {"claim": 1, "after-finish": 1}.get(step, 2)
        assert (outcome.state, outcome.attempt) == ("finished", expected), outcome
        rig.wait_idle()
    assert set(ends_of(rig, jobs).values()) == {("finished", 1)}


@pytest.mark.parametrize("step", ["deaf-claim", "deaf-mark", "deaf-finish"])
def test_a_lost_answer_at_this_step_changes_nothing(rig: Rig, step: str) -> None:
    """The store carried a turn out but its answer got lost: the job still runs once and ends once."""
    rig.start("a", faulty=True)
    jobs = []
    for number in range(5):
        rig.fault.write_text(step)
        marker = rig.work / f"{step}-{number}"
        job, marker = rig.pulse(f"{step}-{number}", "once")
        jobs.append(job)
        assert job.outcome(20).attempt == 1
        assert len(attempts(marker)) == 1
        wait_until(lambda: not rig.fault.exists(), "the fault to strike")
        rig.wait_idle()
    assert set(ends_of(rig, jobs).values()) == {("finished", 1)}


def test_at_most_once_jobs_are_not_run_again(rig: Rig) -> None:
    """A crash after the mark of an at-most-once job makes it lost, although retries were asked for."""
    node = rig.start("a", faulty=True)
    rig.fault.write_text("mark")
    job, marker = rig.pulse("once", once=True)
    assert node.wait() == -signal.SIGKILL
    rig.restart(node)
    assert (job.outcome(20).state, len(attempts(marker))) == ("lost", 0)


def test_a_node_that_can_not_note_a_start_runs_nothing(rig: Rig) -> None:
    """The ledger's disk is full: the job goes back to its lane, uncounted and before a byte ran, and runs later."""
    rig.start("a", faulty=True)
    rig.fault.write_text("full-disk")
    job, marker = rig.pulse("full", "tree")
    wait_pulsing(marker)
    assert any(event.detail.get("what") == "own disk full" for event in rig.app.events())
    assert (rig.attempt(job), len(spans(marker))) == (1, 4)
    assert job.kill().outcome == "killed"
    after = [rig.command("true") for _ in range(2 * rig.slots)]
    assert {job.outcome(20).state for job in after} == {"finished"}
    rig.wait_idle()


def test_jobs_end_when_the_store_is_gone_past_the_lease(rig: Rig) -> None:
    """The store is stopped: jobs die before others could run them; when it is back, the same agent runs the retry."""
    node = rig.start("a")
    kept, marker = rig.pulse("gone", "tree", retries=1)
    single, _ = rig.pulse("single")
    wait_pulsing(marker)
    rig.wait_output(single, "up")
    os.kill(rig.store.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: not alive(marker), "the tree to die with the lease", 2 * HEARTBEAT_S)
    finally:
        os.kill(rig.store.pid, signal.SIGCONT)
    assert single.outcome(20).state == "lost"
    wait_until(lambda: (rig.state(kept), rig.attempt(kept)) == ("running", 2), "the next attempt", 20)
    assert not node.dead()
    assert kept.kill().outcome == "killed"
    assert ends_of(rig, [kept, single]) == {kept.id: ("killed", 1), single.id: ("lost", 1)}


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("pause", ["freeze", "sigstop"])
def test_attack_36_a_paused_job_does_not_outlive_its_agent(rig: Rig, way: str, pause: str) -> None:
    """The agent is killed, or stopped past its lease, while its job is frozen or stopped: nothing is left."""
    node = rig.start("a")
    job, marker = rig.pulse("paused", "tree")
    wait_pulsing(marker)
    pids = alive(marker)
    if pause == "freeze":
        freeze(pids[0])
    else:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    node.signal(signal.Signals[way])
    wait_until(lambda: not alive(marker), "the paused tree to be gone", 2 * HEARTBEAT_S)
    if way == "SIGKILL":
        node.wait()
        rig.restart(node)
    else:
        node.signal(signal.SIGCONT)
    assert job.outcome(10 * HEARTBEAT_S).state == "lost"


def freeze(pid: int) -> None:
    """Freeze the v2 group of a job's process; skip where the jobs have none."""
    lines = dict(line.split("::", 1) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if "::" in line)
    group = lines.get("0", "/")
    roots = [Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
    found = [root / group.lstrip("/") / "cgroup.freeze" for root in roots]
    files = [path for path in found if "ringfence" in group and path.exists()]
    if not files:
        pytest.skip("jobs have no cgroup v2 of their own here (needs root or a delegated group)")
    files[0].write_text("1")


@pytest.mark.parametrize("victims", ["worker", "agent", "both"])
def test_l01_the_system_kills_in_mid_job(rig: Rig, victims: str) -> None:
    """Killed worker: noticed at once, no user's kill, retried. Killed agent: lost and retried on the other node."""
    nodes = two_nodes(rig)
    job, marker = rig.pulse("system", retries=2)
    rig.wait_output(job, "up")
    hit, other = holder(rig, job, nodes)
    worker = alive(marker)[0]
    if victims != "worker":
        hit.signal(signal.SIGKILL)
    if victims != "agent" and not zombie(worker):
        os.kill(worker, signal.SIGKILL)
    limit_s = 2.0 if victims == "worker" else 4 * HEARTBEAT_S
    wait_until(lambda: len(attempts(marker)) == 2, "the next attempt", limit_s + 1)
    (_, last), (first, _) = attempts(marker)
    assert last < first
    retried = [event.detail for event in job.events() if event.type == "job.retried"]
    wanted = ("failed", "signal") if victims == "worker" else ("lost", "node_lost")
    assert [(detail["state"], detail["reason"]) for detail in retried] == [wanted]
    if victims != "worker":
        assert job.status().node == other.name
        assert hit.name not in {view.name for view in rig.app.nodes() if view.state == "ready"}
    assert job.kill().outcome == "killed"
    assert ends_of(rig, [job]) == {job.id: ("killed", 1)}


@pytest.mark.parametrize("started", [True, False])
def test_a_job_pinned_to_a_node_that_is_gone_ends_as_lost_or_waits(rig: Rig, started: bool) -> None:
    """Another node tells of the loss and readers believe it; what never started waits for its node, and runs there."""
    node, _ = rig.start("a", faulty=True), rig.start("b")
    rig.fault.write_text("running" if started else "claim")
    job = rig.command("sleep", "0.2", node=node.name)
    assert node.wait() == -signal.SIGKILL
    if started:
        assert job.outcome(10 * HEARTBEAT_S).state == "lost"
    else:
        rig.wait_state(job, "queued")
    rig.restart(node)
    assert job.outcome(20).state == ("lost" if started else "finished")


def test_a_kill_of_what_a_dead_node_had_claimed_waits_for_its_signature(rig: Rig) -> None:
    """Claimed, never started, killed while its node was dead: that node signs it when it is back, and it never runs."""
    node, _ = rig.start("a", faulty=True), rig.start("b")
    rig.fault.write_text("claim")
    job, marker = rig.pulse("claimed", node=node.name)
    assert node.wait() == -signal.SIGKILL
    assert job.kill(wait=0.5).outcome == "unconfirmed"
    rig.wait_state(job, "killing")
    rig.restart(node)
    assert (job.outcome(20).state, marker.stat().st_size) == ("killed", 0)
    assert ends_of(rig, [job]) == {job.id: ("killed", 1)}
