"""A kill without proof is told as such, keeps the slot, drains the node, and is settled by the proof, however late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from runner import Grants
from tests.support import rig as rigs
from tests.support import silent
from tests.support.rig import Rig
from tests.support.wait import wait_until


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store and a home; the test starts the agent."""
    with rigs.rigged(slots=2) as found:
        yield found


def node_events(rig: Rig) -> list[str]:
    """Return the types of the nodes' verified events, in order."""
    return [event.type for event in rig.app.events() if event.verified and event.type.startswith("node.")]


def node_state(rig: Rig) -> str:
    """Return the state that the node publishes."""
    return next(node.state for node in rig.app.nodes())


@silent.needed
@pytest.mark.timeout(120)
def test_a_process_that_cannot_die_makes_the_kill_unconfirmed_and_the_node_unhealthy(rig: Rig) -> None:
    """A process in a request to a silent FUSE server: unconfirmed after 10 s, node drained; proved once it is cut."""
    point = rig.work / "hung"
    point.mkdir()
    rig.start("one")
    with ExitStack() as mounted:
        server = mounted.enter_context(silent.stuck(point))
        stuck = rig.command("sh", "-c", f"echo up; ls {point}/{silent.HANG}", grants=Grants(read=(str(point),)))
        rig.wait_output(stuck, "up")
        wait_until(lambda: server.caught, "the job to stand in the kernel")
        receipt = stuck.kill(wait=12)
        assert (receipt.outcome, receipt.survivors, receipt.signature != "") == ("unconfirmed", None, True)
        assert receipt.kill_ms >= 10_000
        assert node_state(rig) == "unhealthy" or wait_until(lambda: node_state(rig) == "unhealthy", "the state")
        waiting = rig.command("true")
        again = stuck.kill(wait=1)
        assert (again.outcome, rig.state(stuck)) == ("unconfirmed", "killing"), "asked again: the same honest answer"
        assert rig.state(waiting) == "queued", "an unhealthy node takes no work, though a slot is free"
        assert "node.unhealthy" in node_events(rig)
        assert [event.type for event in stuck.events()].count("kill.unconfirmed") == 1
        mounted.close()
        rig.wait_state(stuck, "killed")
        rig.wait_state(waiting, "finished")
    ended = [event for event in stuck.events() if event.type == "job.ended"]
    assert len(ended) == 1
    assert float(ended[0].detail["kill_ms"]) > 10_000, "the late proof says how long it took"
    assert node_events(rig)[-1] == "node.healthy"
    wait_until(lambda: node_state(rig) == "ready", "the node to be ready again")
    assert stuck.kill().outcome == "already_ended"


@silent.needed
@pytest.mark.timeout(180)
def test_an_agent_does_not_register_over_what_it_can_not_prove_gone(rig: Rig) -> None:
    """Agent killed with such a process: its next start says so and ends; after the cut it starts as ever."""
    point = rig.work / "hung"
    point.mkdir()
    node = rig.start("one")
    with ExitStack() as mounted:
        server = mounted.enter_context(silent.stuck(point))
        stuck = rig.command("sh", "-c", f"echo up; ls {point}/{silent.HANG}", grants=Grants(read=(str(point),)))
        rig.wait_output(stuck, "up")
        wait_until(lambda: server.caught, "the job to stand in the kernel")
        node.crash()
        node.start()
        wait_until(node.dead, "the second start to give up", 60)
        assert node.wait() == 75
        assert "NOT PROVED GONE" in node.tail()
    rig.restart(node)
    rig.wait_state(stuck, "lost")
    assert rig.command("true").outcome(timeout=20).state == "finished"


@pytest.mark.timeout(60)
def test_a_proof_that_does_not_come_is_told_at_every_level_simulated(rig: Rig) -> None:
    """Simulated for users who can mount nothing: the proof source never fires until it is let; the rest is real."""
    rig.start("one", faulty=True)
    job = rig.command("sh", "-c", "echo up; sleep 60")
    rig.wait_output(job, "up")
    rig.fault.write_text("unproved")
    receipt = job.kill(wait=3)
    assert (receipt.outcome, receipt.survivors, rig.state(job)) == ("unconfirmed", None, "killing")
    wait_until(lambda: node_state(rig) == "unhealthy", "the node to say so")
    waiting = rig.command("true")
    assert job.kill(wait=0.5).outcome == "unconfirmed"
    assert rig.state(waiting) == "queued"
    rig.fault.unlink()
    rig.wait_state(job, "killed")
    rig.wait_state(waiting, "finished")
    assert [kind for kind in node_events(rig) if kind.endswith("healthy")] == ["node.unhealthy", "node.healthy"]
