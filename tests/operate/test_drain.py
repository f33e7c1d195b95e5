"""A drained node starts nothing more, finishes what runs, and stays drained until it is undrained (A-F03, A-L03)."""

from __future__ import annotations

import os
import signal

from runner import Grants
from runner.job import Job
from runner.request import JobOptions
from runner.wire.receipt import NodeReceipt
from tests.support.rig import Rig, ends_of, rigged
from tests.support.wait import wait_until

#: Drains at a random moment; `make endurance` has the scenario's hundred.
ROUNDS = 100 if os.environ.get("RINGFENCE_TEST_FULL") else 6


def drain(rig: Rig, name: str, *, grace: float | None = None, checkpoint: float = 0.0, wait: float = 20) -> NodeReceipt:
    """Drain a node of the rig by its short name."""
    return rig.app.drain(rig.nodes[name].name, grace=grace, checkpoint=checkpoint, wait=wait)


def undrain(rig: Rig, *names: str) -> None:
    """Undrain nodes of the rig."""
    for name in names:
        assert rig.app.undrain(rig.nodes[name].name).outcome == "done"


def states(rig: Rig) -> dict[str, str]:
    """Return what each node last published, by its short name."""
    shown = {view.name: view.state for view in rig.app.nodes()}
    return {name: shown[node.name] for name, node in rig.nodes.items()}


def sleeper(rig: Rig, text: str, *, node: str | None = None, retries: int = 0) -> Job[None]:
    """Enqueue a shell line, pinned to a node if one is named, and wait until it runs."""
    options = JobOptions(retries=retries)
    if node is not None:
        options["node"] = rig.nodes[node].name
    job = rig.command("sh", "-c", f"echo up; {text}", **options)
    rig.wait_output(job, "up")
    return job


def test_what_runs_ends_and_what_waits_stays(pair: Rig) -> None:
    """Running jobs finish on the draining node; pinned ones stay queued, say why, and run once it is undrained."""
    running = sleeper(pair, "while [ ! -e /tmp/never ]; do sleep 0.05; done & sleep 0.8; kill $!", node="a")
    receipt = drain(pair, "a", wait=0.5)
    assert (receipt.outcome, receipt.state, receipt.busy) == ("done", "draining", 1)
    pinned = pair.command("true", node=pair.nodes["a"].name)
    free = pair.command("true")
    assert free.outcome(20).node == pair.nodes["b"].name
    assert running.outcome(20).state == "finished"
    assert drain(pair, "a").state == "drained"
    wait_until(lambda: states(pair)["a"] == "drained", "the node to publish that it is drained", 5)
    why = pinned.status().waiting or ""
    assert "drained" in why, why
    assert pair.state(pinned) == "queued"
    undrain(pair, "a")
    assert pinned.outcome(20).state == "finished"
    kinds = [event.type for event in pair.app.events() if event.node == pair.nodes["a"].name]
    assert {"node.draining", "node.drained", "node.undrained"} <= set(kinds)


def test_at_the_end_of_its_grace_a_job_goes_on_elsewhere_or_is_lost(pair: Rig) -> None:
    """What never ends is ended: the next attempt runs on another node, a job without one is lost(drain)."""
    again = sleeper(pair, 'test "$RINGFENCE_ATTEMPT" = 2 || sleep 600', node=None, retries=1)
    name = "a" if again.status().node == pair.nodes["a"].name else "b"
    last = sleeper(pair, "sleep 600", node=name)
    receipt = drain(pair, name, grace=0.2)
    assert (receipt.outcome, receipt.state, receipt.busy) == ("done", "drained", 0)
    lost, finished = last.outcome(20), again.outcome(20)
    assert (lost.state, lost.reason) == ("lost", "drain")
    assert (finished.state, finished.attempt) == ("finished", 2)
    assert finished.node != pair.nodes[name].name
    undrain(pair, name)


def test_a_checkpoint_is_a_sigterm_and_some_time(pair: Rig) -> None:
    """Told by SIGTERM, a job that ends by itself with 0 has finished; one that does not is ended in time."""
    saves = sleeper(pair, "trap 'echo saved; exit 0' TERM; while :; do sleep 0.05; done", node="a")
    stays = sleeper(pair, "trap '' TERM; while :; do sleep 0.05; done", node="a")
    assert drain(pair, "a", grace=0.0, checkpoint=0.6).state == "drained"
    assert (saves.outcome(20).state, stays.outcome(20).state) == ("finished", "lost")
    assert "saved" in pair.logs(saves)
    undrain(pair, "a")


def test_after_the_answer_nothing_starts(pair: Rig) -> None:
    """Whenever the drain comes: no job of 4 begins on that node after the receipt; none is lost or run twice."""
    node = pair.nodes["a"].name
    late: list[str] = []
    for _ in range(ROUNDS):
        jobs = [pair.command("true") for _ in range(4)]
        receipt = drain(pair, "a")
        assert receipt.state == "drained", receipt
        count = sum(event.type == "job.started" and event.node == node for event in pair.app.events())
        more = [pair.command("true") for _ in range(2)]
        ended = [job.outcome(20) for job in [*jobs, *more]]
        assert {end.state for end in ended} == {"finished"}
        after = sum(event.type == "job.started" and event.node == node for event in pair.app.events())
        late += [node] * (after - count)
        undrain(pair, "a")
    assert late == []


def test_a_rolling_restart_loses_and_doubles_nothing() -> None:
    """Drain, restart, undrain, one node after the other, under load: a drained node stays so; every job ran once."""
    with rigged() as rig:
        rig.start("a")
        rig.start("b")
        marker = rig.work / "rolling"
        marker.touch()
        line = f'echo "$RINGFENCE_JOB" >> {marker}; sleep 0.1'
        jobs = [rig.command("sh", "-c", line, grants=Grants(write=[str(rig.work)])) for _ in range(16)]
        for name, node in rig.nodes.items():
            assert drain(rig, name).state == "drained"
            node.signal(signal.SIGTERM)
            assert node.wait() == 0
            rig.restart(node)
            assert states(rig)[name] == "drained"
            undrain(rig, name)
        for job in jobs:
            assert job.outcome(30).state == "finished"
        ran = marker.read_text().split()
        assert sorted(ran) == sorted(job.id for job in jobs)
        assert set(ends_of(rig, jobs).values()) == {("finished", 1)}
