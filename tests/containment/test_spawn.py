"""Jobs of both kinds start, run and end as they should."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from node_agent.containment.errors import ResultTooLarge, SetupError, SpawnError
from node_agent.containment.plan import Plan
from node_agent.containment.slots import Slot
from tests.containment.rig import LEVEL, PROFILE, Rig, in_rig, python
from tests.support.wait import await_until


def test_a_command_ends_with_its_code(node_name: str) -> None:
    """The verdict holds the command's exit code; both streams arrive apart."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
        assert (seen.verdict.kind, seen.verdict.code) == ("exit", 3)
        assert (seen.out, seen.err) == (b"out\n", b"err\n")
        assert seen.verdict.usage.wall_s > 0
        assert seen.verdict.usage.cpu_s > 0

    in_rig(node_name, scenario)


def test_a_signal_is_told_apart(node_name: str) -> None:
    """A command that dies of a signal is no exit and no kill of ours."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(["sh", "-c", "kill -9 $$"])
        assert (seen.verdict.kind, seen.verdict.signal, seen.verdict.forced) == ("signal", signal.SIGKILL, False)

    in_rig(node_name, scenario)


def test_the_environment_is_the_allow_list(node_name: str) -> None:
    """A job sees the base environment and what was asked for it, and can't be given a RINGFENCE_ name."""

    async def scenario(rig: Rig) -> None:
        code = "import os, json; print(json.dumps(sorted(os.environ)), os.getcwd(), os.environ['RINGFENCE_JOB'])"
        seen = await rig.run(python(code), env={"MINE": "1", "RINGFENCE_JOB": "forged"})
        own = ["RINGFENCE_ATTEMPT", "RINGFENCE_FDS", "RINGFENCE_JOB", "RINGFENCE_PYTHON"]
        names = ["HOME", "LANG", "LOGNAME", "MINE", "PATH", *own, "TMPDIR", "TZ", "USER"]
        listed = ", ".join(f'"{name}"' for name in names)
        assert seen.out.decode() == f"[{listed}] /work main-job\n"

    in_rig(node_name, scenario)


@pytest.mark.parametrize(("argv", "code"), [(["no-such-command"], 127), (["/etc/hosts"], 126), ([], 126)])
def test_what_can_not_run_says_so(node_name: str, argv: list[str], code: int) -> None:
    """A command that is missing or no program ends with the shell's codes and a line of ours."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(argv)
        assert (seen.verdict.kind, seen.verdict.code) == ("exit", code)
        assert seen.err.startswith(b"ringfence: ")

    in_rig(node_name, scenario)


def test_a_large_payload_arrives_whole(node_name: str) -> None:
    """Arguments far over one record and over the socket's buffer reach the job unchanged."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(task="sample_tasks:add", args=["a" * 3_000_000, "b"])
        assert seen.result == {"ok": "a" * 3_000_000 + "b"}

    in_rig(node_name, scenario)


def test_a_task_returns_its_value(node_name: str) -> None:
    """A task's value comes back on its own descriptor, its prints on its output."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(task="sample_tasks:add", args=[2, 3])
        assert seen.result == {"ok": 5}, seen
        assert seen.out == b"adding 2 3\n"
        assert seen.verdict.code == 0

    in_rig(node_name, scenario)


@pytest.mark.parametrize(
    ("task", "args", "kind", "words"),
    [
        ("fail", ["the moon is full"], "ValueError", "the moon is full"),
        ("leave", [], "SystemExit", "7"),
        ("odd", [], "ResultNotStorable", "result"),
        ("large", [200_000], "ResultTooLarge", "limit"),
        ("_double", [], "UnknownTaskError", "no task"),
    ],
)
def test_what_goes_wrong_in_a_task_is_its_result(
    node_name: str, task: str, args: list[object], kind: str, words: str
) -> None:
    """Exceptions, SystemExit, unknown tasks and unfit values are recorded by type, and the code is 1."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(task=f"sample_tasks:{task}", args=args, result_bytes=100_000)
        assert isinstance(seen.result, dict)
        error = seen.result["error"]
        assert (error["type"], seen.verdict.code) == (kind, 1)
        assert words in error["message"]

    in_rig(node_name, scenario)


def test_a_task_may_use_threads_and_processes(node_name: str) -> None:
    """After the raw clone the C library and Python are whole: threads, subprocess and multiprocessing work."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(task="sample_tasks:many_ways")
        assert isinstance(seen.result, dict), seen
        value = seen.result["ok"]
        assert value.pop("pid") == value.pop("native"), "the C library's cached thread id is stale"
        assert value == {
            "threads": list(range(8)),
            "said": "main-job",
            "doubled": [2, 4, 6],
            "cwd": "/work",
            "modules": [],
        }

    in_rig(node_name, scenario)


def test_a_result_over_the_limit_is_not_read(node_name: str) -> None:
    """The agent looks at the size before it reads what a job wrote."""

    async def scenario(rig: Rig) -> None:
        attempt = await rig.start(task="sample_tasks:large", args=[5000])
        await attempt.verdict
        with pytest.raises(ResultTooLarge):
            attempt.result(100)
        await rig.finish(attempt)

    in_rig(node_name, scenario)


def test_a_failed_step_is_named_and_leaves_the_slot_usable(node_name: str) -> None:
    """A plan that can't be carried out raises with its step and errno, and the next attempt runs."""

    async def scenario(rig: Rig) -> None:
        with pytest.raises(SetupError) as caught:
            await rig.run(["true"], cwd="/nowhere")
        assert (caught.value.step, caught.value.errno) == ("cwd", 2)
        with pytest.raises(SetupError) as caught:
            await rig.run(["true"], uid=0, gid=0)
        assert caught.value.step == "plan"
        assert (await rig.run(["true"])).verdict.code == 0

    in_rig(node_name, scenario)


def test_no_attempt_begins_on_a_lapsed_lease(node_name: str) -> None:
    """A deadline that has passed on the slot's clock refuses the next attempt before anything is started."""

    async def scenario(rig: Rig) -> None:
        late = Slot(1, rig.zygote, None, clock=lambda: 2**62)
        await late.prepare(PROFILE)
        late._deadline_ns = 1
        with pytest.raises(SpawnError, match="lease"):
            await late.begin(rig.plan(), [])
        await late.close()

    in_rig(node_name, scenario)


def test_an_end_is_proved_by_the_mould(node_name: str) -> None:
    """What a command leaves in the background is gone at its verdict, and the mould serves on."""

    async def scenario(rig: Rig) -> None:
        await rig.slot.prepare(PROFILE)
        first = rig.slot.mould_pid
        seen = await rig.run(["sh", "-c", "setsid sleep 30 & (sleep 30 &) ; exec true"])
        assert seen.verdict.kind == "exit"
        assert seen.verdict.usage.processes >= 3
        assert seen.verdict.usage.wall_s < 5, "the mould waited for what it should have killed"
        assert rig.slot.mould_pid == first
        seen = await rig.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"])
        assert int(seen.out) <= 4

    in_rig(node_name, scenario)


def test_root_needs_no_job_uid_zero() -> None:
    """A plan names its uid; the suite itself runs at the level that its own uid allows."""
    assert Plan("j.1", "command", LEVEL, 5, 5).uid == 5
    assert (os.geteuid() == 0) == (LEVEL == "A")


def test_a_worker_waits_only_while_no_job_runs(node_name: str) -> None:
    """The next worker is forked after the proof, serves the next attempt, and its own death costs nobody anything."""

    async def scenario(rig: Rig) -> None:
        def workers() -> list[int]:
            mould = rig.slot.mould_pid
            return [int(pid) for pid in Path(f"/proc/{mould}/task/{mould}/children").read_text().split()]

        await rig.run(["true"])
        await await_until(lambda: len(workers()) == 1, "a worker to wait")
        mould, waiting = rig.slot.mould_pid, workers()
        attempt = await rig.start(["sleep", "60"])
        assert (rig.slot.mould_pid, workers()) == (mould, waiting), "the worker that waited serves, and no other waits"
        attempt.kill()
        assert (await rig.finish(attempt)).verdict.kind == "killed"
        await rig.run(["true"])
        await await_until(lambda: len(workers()) == 1, "a worker to wait again")
        os.kill(workers()[0], signal.SIGKILL)
        assert (await rig.run(["echo", "fine"])).out == b"fine\n"

    in_rig(node_name, scenario)
