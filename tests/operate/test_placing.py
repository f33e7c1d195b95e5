"""Jobs are placed by what they ask for: never more than a node has, and no heavy one waits for ever (A-F05)."""

from __future__ import annotations

import os

import pytest

from node_agent.placing import Placing
from runner import Grants
from runner.wire.grants import Grants as Asked
from runner.wire.spec import JobSpec
from tests.support.rig import Rig
from tests.support.wait import wait_until

GIB = 1 << 30


def job(memory: int | None = None, cpus: float | None = None) -> JobSpec:
    """Return a job that asks for so much."""
    grants = Asked(memory_bytes=memory, cpus=cpus)
    name = "main-01j00000000000000000000000"
    return JobSpec(name, "main", "agents", "n" * 32, 0, 1, argv=("true",), grants=grants)


def test_memory_and_processors_are_counted() -> None:
    """A job without room takes none and blocks until one ends; what asks for nothing weighs a slot's share."""
    node = Placing(memory_bytes=4 * GIB, cpus=2.0, share_bytes=GIB)
    assert node.place("a", job())
    assert node.place("b", job(memory=2 * GIB, cpus=1.5))
    assert node.free == {"memory_bytes": GIB, "cpus": 0.5}
    assert not node.place("c", job(cpus=1.0))
    assert (node.blocked, node.sparing) == (True, True)
    node.leave("c")
    assert node.blocked, "it took nothing, so nothing has ended"
    node.leave("b")
    assert (node.blocked, node.sparing) == (False, True)
    assert node.place("c", job(cpus=1.0))
    assert not node.sparing
    assert not node.place("d", job(memory=3 * GIB))


def test_what_weighs_more_than_the_node_runs_alone() -> None:
    """It finds room on an empty node and nowhere else, and what is not counted never stands in the way."""
    node = Placing(memory_bytes=4 * GIB, cpus=2.0, share_bytes=GIB)
    assert node.place("a", job(memory=9 * GIB, cpus=64))
    assert not node.place("b", job())
    assert node.free == {"memory_bytes": 0, "cpus": 0.0}
    free = Placing()
    assert all(free.place(str(number), job(9 * GIB, 64)) for number in range(3))
    assert free.free == {}


def test_a_node_takes_what_it_has_room_for(pair: Rig) -> None:
    """Two jobs that ask for most of the processors: on one node one after the other, with two nodes side by side."""
    first = next(view for view in pair.app.nodes() if view.name == pair.nodes["a"].name)
    if "cpu" not in first.enforcement["totals"]:
        pytest.skip("no cpu controller here: jobs that ask for processors are refused")
    most = Grants(cpus=0.75 * len(os.sched_getaffinity(0)))
    line = ("sh", "-c", "echo up; while :; do sleep 0.05; done")
    name = pair.nodes["a"].name
    runs = pair.command(*line, node=name, grants=most)
    pair.wait_output(runs, "up")
    waits = pair.command("true", node=name, grants=most)
    wait_until(lambda: "cpus" in (waits.status().waiting or ""), "the waiting job to say why", 5)
    elsewhere = pair.command("true", grants=most)
    assert elsewhere.outcome(20).node == pair.nodes["b"].name
    assert pair.state(waits) == "queued"
    assert runs.kill(wait=20).outcome == "killed"
    assert waits.outcome(20).state == "finished"
    assert waits.outcome(0).attempt == 1
    after = [pair.command("true", node=name) for _ in range(4)]
    assert {one.outcome(20).state for one in after} == {"finished"}
