"""Jobs on a real node whose calls a person decides on: frozen over an agent's restart, or put aside without a slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from runner import Job
from runner.client import disconnect_all
from runner.errors import UsageError
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

RULES = """
[[call]]
effect = "ask"
actions = ["progress.set"]
queues = ["freeze"]
on_ask = "freeze"
[[call]]
effect = "ask"
actions = ["progress.set"]
queues = ["requeue"]
on_ask = "requeue"
[[call]]
effect = "ask"
actions = ["progress.set"]
queues = ["short"]
on_ask = "requeue"
timeout_s = 1.5
"""
CALLS = ("sh", "-c", "echo begun; ringfence-guest progress 0.5 half && echo went on")


@contextmanager
def asking() -> Iterator[Rig]:
    """One node with one slot, whose policy asks."""
    with rigged(slots=1, heartbeat_s=1.0) as found:
        policy = found.home / "policy.toml"
        policy.write_text(policy.read_text() + RULES)
        found.start("a")
        yield found
    disconnect_all()


@pytest.fixture(scope="module")
def agents() -> Iterator[Rig]:
    """A node for the tests that leave it as it is."""
    with asking() as found:
        yield found


def _forged_questions_are_not_shown(rig: Rig, job: Job[None]) -> None:
    """Whoever writes the store says that something harmless is asked: nobody is shown that, nor says yes to it."""
    key, (asked,) = rig.keys.ask(job.id), rig.app.waiting()
    field = f"a:{asked.ask}"
    true = cast("bytes", rig.redis.hget(key, field))
    for forged in (true.replace(b"progress.set", b"file.read"), true.replace(job.id.encode(), b"x"), b"{", b"[]", b""):
        rig.redis.hset(key, field, forged)
        (shown,) = rig.app.waiting()
        assert (shown.action, shown.resource) == ("", "")
        assert "no node" in shown.why
        with pytest.raises(UsageError, match="no node"):
            job.answer(True, wait=0.0)
    rig.redis.hset(key, field, true)
    assert rig.app.waiting() == [asked]


def _asked(rig: Rig, job: Job[None]) -> None:
    wait_until(lambda: [view for view in rig.app.waiting() if view.job == job.id], f"{job.id} to ask", 20)


def test_e5_approval_of_a_frozen_job_resumes_it_after_an_agent_restart() -> None:
    """The question outlives the agent: the next attempt asks the same, and one word lets it go on."""
    with asking() as rig:
        job = rig.app.command(CALLS, queue="freeze", retries=1)
        rig.wait_state(job, "paused")
        (asked,) = rig.app.waiting()
        assert (asked.job, asked.action, asked.how) == (job.id, "progress.set", "freeze")
        node = rig.nodes["a"]
        node.crash()
        rig.restart(node)
        wait_until(lambda: rig.attempt(job) == 2, "the next attempt", 30)
        rig.wait_state(job, "paused")
        assert [view.ask for view in rig.app.waiting()] == [asked.ask]
        assert "a person decides on progress.set" in str(job.status().waiting)
        assert job.answer(True, wait=10).outcome == "approved"
        job.result(timeout=20)
        assert job.answer(True).outcome == "already_ended"
        other = rig.app.command(CALLS, queue="freeze")
        rig.wait_state(other, "paused")
        _asked(rig, other)
        other.kill()
        assert not rig.app.waiting()
        assert rig.logs(job).count("went on") == 1


def test_e5_a_job_that_parks_gives_its_slot_free_and_comes_back_without_a_retry(rig: Rig) -> None:
    """While nobody has decided, the node's one slot is free; after the word the job's next attempt makes the call."""
    job = rig.app.command(CALLS, queue="requeue")
    rig.wait_state(job, "scheduled")
    _asked(rig, job)
    rig.command("true").result(timeout=20)
    assert rig.state(job) == "scheduled"
    _forged_questions_are_not_shown(rig, job)
    assert job.answer(True, wait=0.0).outcome == "stored"
    job.result(timeout=20)
    assert rig.attempt(job) == 2
    assert rig.logs(job).count("begun") == 2
    assert rig.logs(job).count("went on") == 1
    assert not rig.app.waiting()


def test_e5_a_parked_job_learns_of_a_no_and_one_that_nobody_decides_on_is_refused(rig: Rig) -> None:
    """A no is answered to its next attempt; without a word there is none."""
    late = rig.app.command(CALLS, queue="short")
    job = rig.app.command(CALLS, queue="requeue")
    rig.wait_state(job, "scheduled")
    job.answer(False, reason="no", wait=0.0)
    rig.wait_state(job, "failed")
    assert "denied" in rig.logs(job)
    rig.wait_state(late, "refused")
    assert "nobody decided in time" in str(late.status().detail)
