"""Flows on a real fleet, which is the one that `runner.testing` offers to applications."""

from __future__ import annotations

import asyncio
import subprocess

import pytest
import redis

from runner import (
    Failure,
    JobFailed,
    JobKilled,
    JobRefused,
    ResultTimeoutError,
    UsageError,
    chain,
    chord,
    group,
    keyring,
)
from runner.cli import joboptions
from runner.home import Home
from runner.testing import PrivateFleet
from runner.wire.keys import Keys
from runner.wire.states import State
from tests.flow_shape.jobs import flow_jobs as jobs
from tests.support.fleet import CLI
from tests.support.wait import apause, wait_until

STEP_S = 30.0


@pytest.mark.usefixtures("fleet")
def test_a_chain_hands_each_result_to_the_next_call() -> None:
    """The result is the first argument of a `.s` call, and of no `.si` call."""
    flow = chain(jobs.add.s(1, 2), jobs.add.s(10), jobs.add.s(b=100)).delay()
    assert flow.result(STEP_S) == 113
    assert chain(jobs.add.s(1), jobs.add.si(5)).delay().results(STEP_S) == [6]
    assert flow.status() == {"finished": 3}


@pytest.mark.usefixtures("fleet")
def test_a_chord_hands_all_results_of_its_group_to_the_body() -> None:
    """They come in the order of the group, not in that of their ends, also through a flow inside a flow."""
    flow = chord(group(jobs.add.s(number) for number in range(6)), jobs.total.s()).delay()
    assert flow.result(STEP_S) == 21
    inner = chain(jobs.add.s(1), group(jobs.add.s(10), chain(jobs.add.s(20), jobs.add.s(30))), jobs.total.s())
    assert inner.delay().result(STEP_S) == 12 + 52


@pytest.mark.usefixtures("fleet")
def test_a_map_returns_a_list_in_the_order_of_its_inputs() -> None:
    """One batch for all; starmap spreads each input."""
    flow = jobs.add.map(range(5)).delay()
    assert flow.result(STEP_S) == [1, 2, 3, 4, 5]
    assert jobs.add.starmap([(1, 2), (3, 4)]).delay().result(STEP_S) == [3, 7]
    assert len({job.id for job in flow}) == len(flow) == 5


def test_many_calls_are_enqueued_in_one_round_trip(fleet: PrivateFleet) -> None:
    """Each gets a handle of its own, in order."""
    handles = fleet.app.enqueue_many([jobs.add.s(1), jobs.here.s().set(tags={"a": "b"}), jobs.fail.s()])
    assert handles[0].result(STEP_S) == 2
    job_id, task, attempt, tag = handles[1].result(STEP_S)
    assert (job_id, task, attempt, tag) == (handles[1].id, f"{jobs.__name__}:here", "1", "b")
    with pytest.raises(JobFailed, match="on purpose"):
        handles[2].result(STEP_S)


@pytest.mark.usefixtures("fleet")
def test_a_body_is_refused_as_soon_as_a_member_has_failed() -> None:
    """It does not wait for the others, and what comes after it is refused, too, each with one signed end."""
    flow = chain(group(jobs.fail.s(), jobs.wait.s(20)), jobs.total.s(), jobs.add.s(1)).delay()
    failed, slow, body, last = flow.jobs
    with pytest.raises(JobRefused, match=f"job {failed.id}, which this one waited for, ended failed") as refused:
        body.result(STEP_S)
    assert refused.value.reason == "dependency_failed"
    with pytest.raises(JobRefused, match=f"job {body.id}"):
        last.result(STEP_S)
    assert slow.status().state in {State.QUEUED, State.RUNNING, State.CLAIMED}
    assert [event.type for event in last.events() if event.type == "job.ended"] == ["job.ended"]


@pytest.mark.usefixtures("fleet")
def test_a_body_that_runs_on_failure_gets_a_failure_in_each_missing_place() -> None:
    """It sees state and reason of what is missing, in the order of the group."""
    flow = chord([jobs.add.s(1), jobs.fail.s(), jobs.add.s(2)], jobs.tell.s().set(on_failure="run")).delay()
    assert flow.result(STEP_S) == ["2", "failed(exception)", "3"]
    assert [outcome.state for outcome in flow.wait(STEP_S)] == ["finished", "failed", "finished", "finished"]


def test_a_kill_of_the_whole_takes_what_runs_what_waits_and_what_is_deferred(fleet: PrivateFleet) -> None:
    """One receipt for each, and nothing of it runs afterwards."""
    flow = chain(group(jobs.wait.s(60), jobs.wait.s(60), jobs.wait.s(60)), jobs.total.s()).delay()
    wait_until(lambda: flow.status().get("running") == 2, "two of the three to run", STEP_S)
    assert flow.status() == {"running": 2, "queued": 1, "deferred": 1}
    receipts = flow.kill("enough")
    assert {receipt.job for receipt in receipts} == {job.id for job in flow}
    assert all(receipt.outcome in {"killed", "killed_before_start"} for receipt in receipts)
    assert flow.status() == {"killed": 4}
    assert fleet.app.jobs(limit=1)[0].state == "killed"


def test_a_kill_of_a_deferred_job_refuses_what_waits_for_it(fleet: PrivateFleet) -> None:
    """Commands wait for jobs, too, and a kill by id is answered with a receipt."""
    first = fleet.app.command(["sleep", "60"])
    second = fleet.app.command(["true"], after=first)
    third = fleet.app.command(["true"], after=[second.id], on_failure="run")
    assert (second.status().state, second.status().waiting) == (
        "deferred",
        f"it waits for 1 of 1 jobs to end: {first.id}",
    )
    assert second.kill().outcome == "killed_before_start"
    assert third.outcome(STEP_S).state == "finished"
    assert first.kill().outcome in {"killed", "killed_before_start"}


def test_results_reach_across_queues_and_calls(fleet: PrivateFleet) -> None:
    """The output of any job of the tenant is an argument of another, which then waits for it."""
    first = jobs.same.apply_async([{"$": "mine", "deep": [1]}], queue="other")
    second = jobs.same.delay({"from": [first.output], "kept": {"$": "result", "v": first.id}})
    assert second.result(STEP_S) == {
        "from": [{"$": "mine", "deep": [1]}],
        "kept": {"$": "result", "v": first.id},
    }
    assert fleet.app.job(second.id).status().queue == "agents"


@pytest.mark.usefixtures("fleet")
def test_classes_of_the_annotations_arrive_as_themselves() -> None:
    """Dataclasses and enums are built where the task's own annotations name them, on both sides."""
    drawing = jobs.Drawing([jobs.Point(1, 2.5), jobs.Point(3, 4.5)])
    found = jobs.turn.delay(drawing, jobs.Colour.BLUE).result(STEP_S)
    assert found == jobs.Drawing([jobs.Point(2, 1), jobs.Point(4, 3)], jobs.Colour.BLUE)
    assert jobs.kinds.delay([jobs.Point(1, 2.0), jobs.Colour.RED]).result(STEP_S) == ["dict", "str"]


def test_every_call_has_a_twin_that_does_not_block_the_loop(fleet: PrivateFleet) -> None:
    """The asynchronous twins return the same, and the loop goes on while they wait."""

    async def all_of_them() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await apause(0.01)

        ticking = asyncio.create_task(tick())
        slow = await fleet.app.acommand(["sleep", "0.3"])
        job = await jobs.add.adelay(1)
        other = await jobs.add.aapply_async([5], tags={"a": "b"})
        assert list(await asyncio.gather(job.aresult(STEP_S), other.aresult(STEP_S))) == [2, 6]
        flow = await jobs.add.map([1, 2]).adelay()
        assert await flow.aresult(STEP_S) == [2, 3]
        assert await flow.astatus() == {"finished": 2}
        assert [outcome.state for outcome in await flow.await_(STEP_S)] == ["finished", "finished"]
        await slow.aresult(STEP_S)
        assert (await slow.astatus()).state == "finished"
        assert [event.type async for event in slow.aevents()][-1] == "job.ended"
        handles = await fleet.app.aenqueue_many([jobs.add.s(1)])
        called = await fleet.app.acall(f"{jobs.__name__}:add", [1])
        assert await handles[0].aresult(STEP_S) == await called.aresult(STEP_S) == 2
        assert {view.job for view in await fleet.app.ajobs()} >= {slow.id, job.id}
        assert [node.state for node in await fleet.app.anodes()] == ["ready"]
        doomed = await fleet.app.acommand(["sleep", "60"], tags={"doomed": "yes"})
        assert [receipt.job for receipt in await fleet.app.akill(tag="doomed:yes")] == [doomed.id]
        ticking.cancel()
        assert ticks > 10

    asyncio.run(all_of_them())


def test_a_failure_says_what_it_stands_for() -> None:
    """It is plain data: no exception, nothing to rebuild."""
    assert Failure("main-1", "failed", "exit").detail is None


def test_a_hundred_may_wait_at_once(fleet: PrivateFleet) -> None:
    """Waiting takes no thread of the loop's pool: other calls are answered meanwhile; one end reaches all who wait."""

    async def all_of_them() -> None:
        slow = await fleet.app.acommand(["sleep", "60"])
        waiting = [asyncio.create_task(slow.aresult(STEP_S)) for _ in range(100)]
        await asyncio.sleep(0)
        assert await (await jobs.add.adelay(1)).aresult(STEP_S) == 2
        with pytest.raises(ResultTimeoutError):
            await slow.aresult(0.05)
        assert not any(task.done() for task in waiting)
        waiting[0].cancel()
        await slow.akill()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in done] == [asyncio.CancelledError, *[JobKilled] * 99]

    asyncio.run(all_of_them())


def test_the_command_line_lets_jobs_wait_for_others(fleet: PrivateFleet) -> None:
    """`run --after` waits, and exits as a refused job does if the other one failed; `show` says for whom it waits."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*CLI, "--home", str(fleet.home), "run", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=STEP_S, check=False)

    first = fleet.app.command(["sh", "-c", "sleep 0.3; exit 7"]).id
    refused = run("--after", first, "--", "true")
    assert refused.returncode == 125
    assert f"refused(dependency_failed) on node-1: job {first}" in refused.stderr
    assert run("--after", first, "--on-failure", "run", "--", "echo", "all the same").stdout == "all the same\n"
    for text, after in (("run", None), ("perhaps", [first])):
        with pytest.raises(UsageError, match="goes with --after JOB"):
            joboptions.on_failure_of(text, after)


def test_attack_04_a_job_pushed_into_its_lane_by_hand_is_refused_by_the_node(fleet: PrivateFleet) -> None:
    """Whoever writes the store can hand a waiting job out early, and gains a refusal."""
    first = fleet.app.command(["sleep", "60"])
    job = jobs.add.apply_async([1], after=first)
    keys = Keys()
    with redis.Redis.from_url(keyring.load_client(Home(fleet.home)).redis_url) as store:
        store.hset(keys.job(job.id), "rf_state", "queued")
        store.rpush(keys.queue("agents"), job.id)
        store.lpush(keys.wake("agents"), "1")
    with pytest.raises(JobRefused, match=f"no node that may serve job {first.id}, .* has signed its end") as refused:
        job.result(STEP_S)
    assert refused.value.reason == "dependency_failed"
    assert first.kill().outcome in {"killed", "killed_before_start"}
