"""What holds between two jobs in one worker (``reuse=N``): the promise is smaller than for all others, and is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import pytest

from node_agent.containment import reused
from node_agent.containment.errors import SpawnError
from node_agent.containment.plan import Plan
from node_agent.containment.reused import ReusedAttempt, Terms
from node_agent.containment.slots import Attempt
from runner.wire import codec
from tests.containment.rig import PROFILE, TASKS, Outcome, Rig, in_rig
from tests.support.wait import await_until

T = TypeVar("T")
MOST = 6


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker ends because it waited: what ends one here is what the test is about."""
    monkeypatch.setattr(reused, "IDLE_S", 60.0)


class Turns:
    """Jobs on one slot, as the supervisor runs them: in the worker that waits, or in a new one."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.terms = Terms("key", MOST)
        self.released = 0
        self._new = True

    async def start(self, task: str, *args: object) -> ReusedAttempt:
        """Start a task of again_tasks."""
        plan = self.plan()
        payload = codec.dump(
            {"env": {}, "job": "main-job", "attempt": plan.attempt, "tags": {}, "task": f"again_tasks:{task}"}
            | {"args": list(args), "kwargs": {}}
        )
        found: Attempt | None = self.rig.slot.again(plan, self.terms, payload)
        self._new = found is None
        if found is None:
            await self.rig.slot.prepare(PROFILE)
            found = await self.rig.slot.begin(plan, [])
            cast("ReusedAttempt", found).keep(self.terms, self.release, plan.uid, plan.gid)
            await found.release(payload)
        return cast("ReusedAttempt", found)

    def was_new(self) -> bool:
        """Whether the last job was started in a new worker."""
        return self._new

    async def run(self, task: str, *args: object) -> Outcome:
        """Run one to its end."""
        return await self.rig.finish(await self.start(task, *args))

    async def look(self, word: str = "") -> dict[str, object]:
        """Return what `who` returns."""
        outcome = await self.run("who", word)
        assert (outcome.out, outcome.err) == (f"out {word}\n".encode(), f"err {word}\n".encode())
        return cast("dict[str, dict[str, object]]", outcome.result)["ok"]

    def plan(self) -> Plan:
        """Return the plan of one job."""
        return self.rig.plan(kind="task", task_paths=(TASKS,), reuse=True)

    def release(self) -> None:
        """What the worker held on the host is free."""
        self.released += 1

    async def gone(self, count: int) -> None:
        """Wait until so many workers are proved gone."""
        await await_until(lambda: self.released == count, f"{count} workers to be proved gone")


def turns(node: str, scenario: Callable[[Turns], Awaitable[T]]) -> T:
    """Run ``scenario`` on a slot of its own."""
    return in_rig(node, lambda rig: scenario(Turns(rig)))


def test_a_worker_serves_its_number_of_jobs_and_no_more(node_name: str) -> None:
    """The first N jobs share one process, each with its own output and result; job N+1 gets another one."""

    async def scenario(all_: Turns) -> None:
        first = await all_.look("0")
        for number in range(1, MOST):
            seen = await all_.look(str(number))
            assert not all_.was_new()
            assert (seen["born"], seen["served"], seen["word"]) == (first["born"], number + 1, str(number))
            assert seen["attempt"] != first["attempt"]
            assert seen["files"] == first["files"]
        await all_.gone(1)
        seen = await all_.look("next")
        assert all_.was_new()
        assert seen["served"] == 1
        assert seen["born"] != first["born"]

    turns(node_name, scenario)


def test_attack_38_files_variables_and_folders_do_not_stay(node_name: str) -> None:
    """The next job finds /work, /tmp and /dev/shm empty, and neither a variable, a path nor a folder of the last."""

    async def scenario(all_: Turns) -> None:
        first = await all_.look()
        assert (await all_.run("litter", "files")).verdict.code == 0
        seen = await all_.look()
        assert not all_.was_new()
        for name in ("born", "files", "env", "path", "cwd"):
            assert seen[name] == first[name], name

    turns(node_name, scenario)


def test_attack_38_what_cannot_be_made_new_ends_the_worker(node_name: str) -> None:
    """A file without a name, a changed folder, words on the channel, an exit: the next job gets another process."""

    async def scenario(all_: Turns) -> None:
        seen = await all_.look()
        for number, how in enumerate(("held", "mode", "words", "forged", "exit"), 1):
            first = seen
            outcome = await all_.run("litter", how)
            assert not all_.was_new(), how
            assert (outcome.verdict.kind, outcome.verdict.code) == ("exit", 0), how
            assert outcome.result == (None if how == "exit" else {"ok": how})
            await all_.gone(number)
            seen = await all_.look()
            assert all_.was_new(), how
            assert seen["born"] != first["born"], how

    turns(node_name, scenario)


def test_an_exception_is_a_plain_end(node_name: str) -> None:
    """A job that raises fails alone: its worker goes on."""

    async def scenario(all_: Turns) -> None:
        first = await all_.look()
        outcome = await all_.run("litter", "raise")
        assert outcome.verdict.code == 1
        assert "on purpose" in str(outcome.result)
        assert (await all_.look())["born"] == first["born"]

    turns(node_name, scenario)


def test_attack_38_nothing_goes_on_beside_a_worker_that_is_reused(node_name: str) -> None:
    """No process, no thread, no other program: by every call that could make one."""

    async def scenario(all_: Turns) -> None:
        outcome = await all_.run("others")
        found = cast("dict[str, dict[str, str]]", outcome.result)["ok"]
        assert set(found) == {"fork", "thread", "program", "exec", "spawn", "clone3"}
        assert "done" not in found.values()

    turns(node_name, scenario)


def test_a_late_write_reaches_no_other_job(node_name: str) -> None:
    """Pipes and result of the job before are closed and sealed; what a kept descriptor writes is nobody's."""

    async def scenario(all_: Turns) -> None:
        assert (await all_.run("litter", "out")).result == {"ok": "out"}
        outcome = await all_.run("late")
        assert not all_.was_new()
        assert outcome.result == {"ok": "BrokenPipeError PermissionError"}
        assert (outcome.out, outcome.err) == (b"", b"")

    turns(node_name, scenario)


def test_jobs_on_other_terms_never_share(node_name: str) -> None:
    """Another tenant, task, key, grant or number is another key: its job gets another process."""

    async def scenario(all_: Turns) -> None:
        first = await all_.look()
        for key, most in (("other", MOST), ("key", MOST + 1)):
            all_.terms = Terms(key, most)
            assert all_.rig.slot.keeper.serves(all_.terms) is None
            assert (await all_.look())["born"] != first["born"]
            assert all_.was_new()
        assert all_.released == 2

    turns(node_name, scenario)


def test_what_hits_one_job_ends_the_worker(node_name: str) -> None:
    """A kill is proved by the end of all; after SIGTERM or a pause the job ends as it does, and the worker with it."""

    async def hit(all_: Turns, how: str) -> str:
        attempt = await all_.start("sleep", 0.2 if how == "freeze" else 30)
        assert not all_.was_new()
        await await_until(lambda: attempt.heard, "the job to run")
        if how == "kill":
            attempt.kill()
        elif how == "terminate":
            attempt.terminate()
        else:
            assert (await attempt.freeze(True)).done
            assert (await attempt.freeze(False)).done
        verdict = (await all_.rig.finish(attempt)).verdict
        assert verdict.proved
        return verdict.kind

    async def scenario(all_: Turns) -> None:
        seen = await all_.look()
        ends = (("kill", "killed"), ("terminate", "signal"), ("freeze", "exit"))
        for number, (how, kind) in enumerate(ends, 1):
            first = seen
            assert await hit(all_, how) == kind
            await all_.gone(number)
            seen = await all_.look()
            assert seen["born"] != first["born"], how

    turns(node_name, scenario)


def test_a_worker_that_dies_while_it_waits_costs_its_next_job_nothing(node_name: str) -> None:
    """A timer of the last job ends the process: a job that was handed to it has not begun, and runs in another one."""

    async def scenario(all_: Turns) -> None:
        await all_.run("alarmed")
        assert all_.rig.slot.keeper.holds
        await all_.gone(1)
        await all_.run("stay", "sleep")
        attempt = await all_.start("who")
        assert not all_.was_new()
        all_.rig.slot._mould.kill()  # type: ignore[union-attr] # as if it had died with the job on its way
        verdict = (await all_.rig.finish(attempt)).verdict
        assert isinstance(attempt.unready(verdict), SpawnError)
        assert (await all_.look())["served"] == 1
        assert all_.was_new()

    turns(node_name, scenario)


@pytest.mark.parametrize("how", ["sleep", "write"])
def test_a_worker_that_will_not_leave_is_killed(node_name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took its guest over and stays, or writes on, is gone soon after it was last needed."""
    monkeypatch.setattr(reused, "IDLE_S", 0.05)

    async def scenario(all_: Turns) -> None:
        assert (await asyncio.wait_for(all_.run("stay", how), 20)).verdict.code == 0
        await all_.gone(1)
        assert not all_.rig.slot.keeper.holds
        assert (await all_.look())["served"] == 1

    turns(node_name, scenario)


@pytest.mark.parametrize("how", ["file", "word"])
def test_attack_38_what_comes_after_the_end_ends_the_worker(node_name: str, how: str) -> None:
    """A file made, or a word said, while the worker waits: it gets no other job."""

    async def scenario(all_: Turns) -> None:
        first = await all_.look()
        assert (await all_.run("stay", how)).verdict.code == 0
        worker = all_.rig.slot.keeper._worker
        # On a slow machine it comes before the agent has looked: then no worker waits.
        if worker is not None:
            await await_until(lambda: not (worker.tidy() and reused._silent(worker.channel)), "the worker to go on")
        seen = await all_.look()
        assert all_.was_new()
        assert seen["born"] != first["born"]
        assert all_.released == 1

    turns(node_name, scenario)


def test_a_worker_is_not_taken_without_the_supervisors_word(node_name: str) -> None:
    """An attempt whose terms were never told is the only one of its worker."""

    async def scenario(all_: Turns) -> None:
        plan = all_.plan()
        await all_.rig.slot.prepare(PROFILE)
        attempt = await all_.rig.slot.begin(plan, [])
        payload = {"env": {}, "job": "main-job", "attempt": plan.attempt, "tags": {}, "task": "again_tasks:who"}
        await attempt.release(codec.dump(payload | {"args": [], "kwargs": {}}))
        assert (await all_.rig.finish(attempt)).verdict.code == 0
        assert not all_.rig.slot.keeper.holds
        assert (await all_.rig.run(["true"])).verdict.code == 0

    turns(node_name, scenario)


def test_attack_41_asks_beyond_the_rate_are_heard_slowly(node_name: str) -> None:
    """A job that asks for sessions without end has its words read as seldom as it is answered "not now"."""

    async def scenario(all_: Turns) -> None:
        began_s = time.monotonic()
        attempt = await all_.start("asks", 8)
        attempt.on_open = lambda: False
        await all_.rig.finish(attempt)
        assert time.monotonic() - began_s >= 8 * reused._REST_S

    turns(node_name, scenario)
