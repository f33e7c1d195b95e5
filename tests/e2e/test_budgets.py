"""One budget over two nodes: its jobs stand still together, an approval lets them go on, a no kills them with proof."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner import App, Budget, Grants, Job
from runner.wire.view import EventView
from tests.support.fleet import Fleet
from tests.support.wait import wait_until

LOOP = ("sh", "-c", "while :; do :; done")


@pytest.fixture
def app(fleet: Fleet) -> Iterator[App]:
    """The fleet's API."""
    with App(home=fleet.home) as found:
        yield found


def _events(app: App, kind: str) -> list[EventView]:
    return [event for event in app.events() if event.type == kind]


def _is(job: Job[None], state: str) -> None:
    wait_until(lambda: job.status().state == state, f"{job.id} to be {state}", 20)


def test_e4_one_budget_stops_jobs_on_both_nodes_and_one_word_lets_them_go_on(fleet: Fleet, app: App) -> None:
    """Wall time of both counts together; nothing of them runs until it is approved, and then both do."""
    budget = Budget("e2e-wall", wall_s=0.6)
    jobs = [app.command(LOOP, budget=budget, node=node) for node in ("node-1", "node-2")]
    for job in jobs:
        _is(job, "paused")
    waits = [row for row in app.waiting() if row.budget == "e2e-wall"]
    assert len(waits) == 1
    assert "wall_s" in waits[0].why
    assert "its budget e2e-wall is used up" in str(jobs[0].status().waiting)
    done = fleet.run("approve", "--budget", "e2e-wall", "--add", "wall=3600", "--reason", "go on")
    assert done.returncode == 0, done.stderr
    assert all(job.id in done.stdout for job in jobs)
    for job in jobs:
        _is(job, "running")
    assert not [row for row in app.waiting() if row.budget == "e2e-wall"]
    assert len([event for event in _events(app, "budget.hit") if event.detail["key"] == "e2e-wall"]) == 1


def test_e4_a_used_up_budget_is_approved_once_and_then_its_job_is_killed_with_proof(fleet: Fleet, app: App) -> None:
    """By the job's id; after the no nothing of it is left, no retry follows, and no other job of the key begins."""
    job = app.command(LOOP, budget=Budget("e2e-cpu", cpu_s=1.0), node="node-1", retries=3)
    _is(job, "paused")
    assert [receipt.outcome for receipt in app.budget("e2e-cpu").approve()] == ["approved"]
    wait_until(
        lambda: sum(event.job == job.id for event in _events(app, "job.paused")) == 2, "as much again to be used up", 20
    )
    denied = fleet.run("deny", job.id, "--reason", "enough")
    assert denied.returncode == 0, denied.stderr
    _is(job, "killed")
    ends = [event for event in _events(app, "job.ended") if event.job == job.id]
    assert len(ends) == 1
    assert "budget e2e-cpu: cpu_s" in str(ends[0].detail["kill_reason"])
    _is(app.command(LOOP, budget=Budget("e2e-cpu", cpu_s=1.0), node="node-2"), "killed")
    assert not [row for row in app.waiting() if row.budget == "e2e-cpu"]


def test_e4_a_job_begins_only_while_its_budget_has_room(fleet: Fleet, app: App) -> None:
    """Used up by others, it waits before anything of it ran; a node without prices lets no cost bound in."""
    budget = Budget("e2e-room", wall_s=0.3)
    _is(app.command(LOOP, budget=budget, node="node-1"), "paused")
    mark = fleet.work / "begun"
    late = app.command(("touch", str(mark)), budget=budget, grants=Grants(write=(str(fleet.work),)), node="node-2")
    _is(late, "claimed")
    assert not mark.exists()
    app.budget("e2e-room").approve({"wall_s": 60.0})
    _is(late, "finished")
    assert mark.exists()
    refused = app.command(("true",), budget=Budget("e2e-usd", cost_usd=1.0))
    _is(refused, "refused")
    assert "price table" in str(refused.status().detail)
