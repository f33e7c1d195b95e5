"""Asynchronous waiting without threads: who is told what, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal

import pytest

from runner import (
    App,
    Chain,
    Flow,
    Group,
    Job,
    JobFailed,
    JobNotFoundError,
    Signature,
    StoreError,
    Task,
    UnverifiedResultError,
)
from runner.wire import ids
from tests.client.paper import KEYS, Fleet, PaperNode
from tests.support import scratch
from tests.support.valkey import running
from tests.support.wait import apause, await_until

STEP_S = 20.0


async def started(job: Job[object], count: int) -> list[asyncio.Task[object]]:
    """Start calls that wait, and let each look once."""
    tasks = [asyncio.create_task(job.aresult(STEP_S)) for _ in range(count)]
    await apause(0.05)
    return tasks


def test_each_waiting_call_hears_of_its_own_job_alone(paper: Fleet, node: PaperNode) -> None:
    """One job's end wakes those who wait for it; a good end, a bad one and a vanished job are told apart."""
    good, bad, gone, slow = (paper.app.call("app:work") for _ in range(4))

    async def all_of_them() -> None:
        waits = {job.id: await started(job, 2) for job in (good, bad, gone, slow)}
        node.finish(good.id, value=7)
        node.finish(bad.id, "failed", reason="exit")
        paper.store.delete(KEYS.job(gone.id))
        assert await asyncio.gather(*waits[good.id]) == [7, 7]
        for error in await asyncio.gather(*waits[bad.id], return_exceptions=True):
            assert isinstance(error, JobFailed)
        for error in await asyncio.gather(*waits[gone.id], return_exceptions=True):
            assert isinstance(error, JobNotFoundError)
        assert not any(task.done() for task in waits[slow.id])
        node.finish(slow.id, value=None)
        assert await asyncio.gather(*waits[slow.id]) == [None, None]
        await await_until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, "the looks to end")

    asyncio.run(all_of_them())
    with pytest.raises(JobNotFoundError):
        asyncio.run(paper.app.job(ids.new_job_id()).aresult(1.0))


def test_a_forged_end_wakes_nobody_with_a_value(paper: Fleet, node: PaperNode) -> None:
    """The look is a hint; the job itself is read and verified as by any other reader."""
    job = paper.app.call("app:work")

    async def one() -> None:
        (task,) = await started(job, 1)
        paper.store.hset(KEYS.job(job.id), "rf_state", "finished")
        with pytest.raises(UnverifiedResultError, match="no node that may serve it signed that"):
            await task

    asyncio.run(one())
    node.finish(job.id)


def test_a_store_that_goes_away_is_told_to_all_who_wait() -> None:
    """None of them waits for ever."""
    with scratch.folder() as folder, running() as server:
        store = server.client()
        fleet = Fleet(folder, store, server.url)
        job = fleet.app.call("app:work")

        async def all_of_them() -> None:
            tasks = await started(job, 3)
            os.kill(server.pid, signal.SIGKILL)
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, StoreError)

        asyncio.run(all_of_them())
        store.close()
        fleet.app.close()


@pytest.mark.parametrize("kind", [App, Job, Task, Flow, Signature, Chain, Group])
def test_every_call_to_the_fleet_has_a_twin_with_its_signature(kind: type[object]) -> None:
    """What blocks has a counterpart that does not, with the same parameters; the rest asks the fleet nothing."""
    local = {"task", "job", "client", "close", "output", "s", "si", "map", "starmap", "launch", "set", "budget"}
    calls = {name for name, found in inspect.getmembers(kind) if callable(found) and not name.startswith("_")}
    twins = {
        "await_" if name == "wait" else f"a{name}": name
        for name in calls - local
        if f"a{name}" in calls or name == "wait"
    }
    assert calls - local - twins.keys() - set(twins.values()) == set()
    for twin, name in twins.items():
        found = [inspect.signature(getattr(kind, each)).parameters for each in (twin, name)]
        assert [*found[0].values()] == [*found[1].values()], twin
