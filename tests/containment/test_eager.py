"""A worker that stands gets plan and payload at once: nothing of the job runs in less than its sandbox all the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from node_agent.containment import slots
from node_agent.containment.errors import SetupError, SpawnError
from node_agent.containment.plan import Profile, Verdict
from node_agent.containment.slots import Attempt
from runner.wire import codec
from tests.containment.rig import PROFILE, Rig, in_rig
from tests.support.wait import await_until


async def standing(rig: Rig) -> int:
    """Have a worker stand that was forked ahead; return its pid on the host."""
    await rig.run(["true"])
    await await_until(lambda: rig.slot.waits_for(rig.plan(), PROFILE), "a worker to stand")
    mould = rig.slot.mould_pid
    path = Path(f"/proc/{mould}/task/{mould}/children")
    return int((await await_until(lambda: path.read_text().split(), "the worker that was forked ahead"))[0])


def hurry(rig: Rig, script: str, **changes: object) -> Attempt:
    """Start a shell job in the worker that stands."""
    payload = {"argv": ["sh", "-c", script], "env": {}, "job": "main-job", "attempt": 1, "tags": {}}
    attempt = rig.slot.eager(rig.plan(**changes), codec.dump(payload))
    assert attempt is not None
    return attempt


async def ended(rig: Rig, attempt: Attempt) -> tuple[Verdict, SetupError | SpawnError | None, bytes]:
    """Return the verdict, why nothing of the job ran, and what it wrote."""
    verdict = await attempt.verdict
    problem = attempt.unready(verdict)
    return verdict, problem, (await rig.finish(attempt)).out


@pytest.mark.parametrize("code", [0, 3])
def test_a_hurried_job_runs(node_name: str, code: int) -> None:
    """It runs in the worker that stood, and its end is its own, also a bad one."""

    async def scenario(rig: Rig) -> None:
        pid = await standing(rig)
        attempt = hurry(rig, f"echo $$ $PPID; grep -c . /proc/self/status >/dev/null; exit {code}")
        verdict, problem, out = await ended(rig, attempt)
        assert (verdict.kind, verdict.code, problem) == ("exit", code, None)
        assert out.split()[1:] == [b"1"]
        assert not Path(f"/proc/{pid}").exists()

    in_rig(node_name, scenario)


def test_a_sandbox_that_fails_never_sees_the_payload(node_name: str) -> None:
    """A step that fails is told with its name, and nothing of the job ran."""

    async def scenario(rig: Rig) -> None:
        await standing(rig)
        _, problem, out = await ended(rig, hurry(rig, "echo ran", cwd="/nowhere"))
        assert isinstance(problem, SetupError)
        assert (problem.step, out) == ("cwd", b"")
        assert (await rig.run(["echo", "next"])).out == b"next\n"

    in_rig(node_name, scenario)


def test_a_worker_that_died_early_is_told_apart(node_name: str) -> None:
    """Its end before the plan is no end of the job: another worker may be tried, and runs."""

    async def scenario(rig: Rig) -> None:
        pid = await standing(rig)
        os.kill(pid, signal.SIGSTOP)
        attempt = hurry(rig, "echo ran")
        os.kill(pid, signal.SIGKILL)
        _, problem, out = await ended(rig, attempt)
        assert isinstance(problem, SpawnError)
        assert not isinstance(problem, SetupError)
        assert out == b""
        assert (await rig.run(["echo", "next"])).out == b"next\n"

    in_rig(node_name, scenario)


def test_a_worker_that_hangs_is_killed(node_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without READY in time everything of the attempt is killed, and the reason is the set-up."""
    monkeypatch.setattr(slots, "SETUP_TIMEOUT_S", 0.2)

    async def scenario(rig: Rig) -> None:
        os.kill(await standing(rig), signal.SIGSTOP)
        verdict, problem, out = await ended(rig, hurry(rig, "echo ran"))
        assert (verdict.kind, verdict.proved, out) == ("killed", True, b"")
        assert isinstance(problem, SetupError)
        assert "in time" in str(problem)

    in_rig(node_name, scenario)


def test_a_kill_before_ready_is_a_kill(node_name: str) -> None:
    """An order that comes while the worker restricts itself ends it, proved."""

    async def scenario(rig: Rig) -> None:
        os.kill(await standing(rig), signal.SIGSTOP)
        attempt = hurry(rig, "echo ran")
        attempt.kill()
        verdict, problem, out = await ended(rig, attempt)
        assert (verdict.kind, verdict.proved, problem, out) == ("killed", True, None, b"")

    in_rig(node_name, scenario)


def test_who_must_not_hurry(node_name: str) -> None:
    """Another profile, other paths, a lease that has run out and a slot in use ask for a worker in the usual way."""

    async def scenario(rig: Rig) -> None:
        await standing(rig)
        assert not rig.slot.waits_for(rig.plan(), Profile("other", "key-1"))
        assert not rig.slot.waits_for(rig.plan(), Profile("main", "key-1", secrets=("S",)))
        assert not rig.slot.waits_for(rig.plan(python_paths=("/opt/elsewhere",)), PROFILE)
        rig.slot.renew(1)
        assert rig.slot.eager(rig.plan(), b"{}") is None

    in_rig(node_name, scenario)
