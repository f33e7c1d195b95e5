"""Jobs on a real node call it: tasks, commands and their children; what they cause stays in their own stream."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from runner import ArtifactError
from runner.cli import commands
from runner.cli.ceiling import Import
from runner.wire.calls import ErrorCode
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

PROGRAMS = Path(__file__).parent / "programs"
#: What the tenant's stream may hold of a job, whatever that does.
LIFE = {"job.queued", "job.claimed", "job.started", "job.ended"}


@pytest.fixture(scope="module")
def agents() -> Iterator[Rig]:
    """One node with two slots."""
    with rigged(slots=2, heartbeat_s=5.0, imports=(Import("calling_tasks", PROGRAMS),)) as found:
        with (found.home / "policy.toml").open("a") as file:
            file.write('[[allow]]\ntrusted = true\ncommands = ["*"]\n')
        found.start("a")
        yield found


def test_k2_a_task_and_its_forked_child_call_and_a_program_of_theirs_does_not(rig: Rig) -> None:
    """Each process has a session of its own; the descriptor does not reach a program that a task starts."""
    body = "x" * 100_000
    job = rig.app.call("calling_tasks:talk", [body])
    digest = hashlib.sha256(body.encode()).hexdigest()
    assert job.result(timeout=40) == {"digest": digest, "child": ErrorCode.UNKNOWN_OP, "other": ErrorCode.ENDED}
    last = (1.0, "the child says all", 1)
    wait_until(
        lambda: (said := job.progress()) is not None and (said.value, said.note, said.attempt) == last,
        "the last word of its progress",
    )
    (given,) = job.artifacts()
    assert (given.name, given.bytes, given.sha256) == ("report.txt", len(body), digest)
    assert job.artifact("report.txt") == body.encode()
    with pytest.raises(ArtifactError, match="no artifact 'other'"):
        job.artifact("other")


def test_a_command_and_its_children_call_with_the_guest_command(
    rig: Rig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is on the PATH of every job, and what it gave can be read with the command line, to a new file only."""
    line = "ringfence-guest progress 0.5 half; echo hello | ringfence-guest artifact put out.txt -"
    job = rig.app.command(["sh", "-c", f"{line}; (ringfence-guest progress 1 done)"])
    assert job.result(timeout=40) is None, b"".join(data for _, data in job.logs())
    home, file = ["--home", str(rig.home)], tmp_path / "out"
    get = [*home, "artifact", "get", job.id, "out.txt", "--out", str(file)]
    assert (commands.run_words(get), commands.run_words(get)) == (0, 1)
    assert file.read_text() == "hello\n"
    assert commands.run_words([*home, "show", job.id]) == 0
    shown = capfd.readouterr().out
    assert "progress     100% done\n" in shown
    assert "artifacts    out.txt (6 B)\n" in shown


def test_a_job_without_namespaces_calls_like_any_other(rig: Rig) -> None:
    """Levels D to F: the same descriptor, the same command, for a job that is trusted to run there."""
    low = rig.start("low", RINGFENCE_MAX_LEVEL="D" if os.geteuid() == 0 else "E")
    try:
        level = str(rig.record(low)["level"])
        assert level in {"D", "E", "F"}
        line = "echo hello | ringfence-guest artifact put out.txt -"
        job = rig.app.command(["sh", "-c", line], min_level=level, trusted=True, node=low.name)
        assert job.result(timeout=40) is None, b"".join(data for _, data in job.logs())
        assert job.artifact("out.txt") == b"hello\n"
    finally:
        low.stop()
        rig.sweep(low)


def test_what_the_store_changes_in_an_artifact_is_found(rig: Rig) -> None:
    """Bytes that the node did not sign for are never returned, nor is an artifact under another name or job."""
    job = rig.app.command(["sh", "-c", "echo hello | ringfence-guest artifact put a -"])
    job.result(timeout=40)
    key = rig.keys.artifacts(job.id)
    (given,) = job.artifacts()
    word = cast("bytes", rig.redis.hget(key, "m:a"))
    rig.redis.hset(key, "m:b", word)
    assert [one.name for one in job.artifacts()] == ["a"]
    rig.redis.hset(key, f"{given.transfer}:0", b"hellO\n")
    with pytest.raises(ArtifactError, match="not what its node signed"):
        job.artifact("a")
    rig.redis.hset(key, "m:a", word.replace(b'"bytes":6', b'"bytes":5'))
    assert job.artifacts() == ()


def test_attack_32_what_a_job_causes_stays_in_its_own_stream(rig: Rig) -> None:
    """A job that breaks its channel again and again is told of there, three times, and runs on."""
    job = rig.app.call("calling_tasks:junk", [60])
    assert job.result(timeout=40) == ErrorCode.ENDED
    of_job = [event for event in rig.app.events() if event.job == job.id]
    assert {event.type for event in of_job} == LIFE
    caused = [event for event in rig.app.events(job=job.id) if event.type not in LIFE]
    assert [event.type for event in caused] == ["channel.violation"] * 3
    assert all(event.verified for event in caused)
    assert rig.redis.ttl(rig.keys.job_events(job.id)) > 0


def test_attempts_in_one_worker_have_sessions_of_their_own(rig: Rig) -> None:
    """A session ends with its attempt, also where the process goes on."""
    found, notes = [], []
    for number in range(3):
        job = rig.app.call("calling_tasks:again", [number], reuse=5)
        found.append(cast("dict[str, object]", job.result(timeout=40)))
        said = wait_until(job.progress, "its progress")
        notes.append("" if said is None else said.note)
    assert [one["before"] for one in found] == [None, ErrorCode.ENDED, ErrorCode.ENDED]
    assert [one["now"] for one in found] == ["ok"] * 3
    assert len({(one["pid"], one["worker"]) for one in found}) == 1
    assert notes == ["number 0", "number 1", "number 2"]


def test_a_neighbour_sees_no_process_whose_channel_it_could_take(rig: Rig) -> None:
    """Another job of the same tenant runs beside; nothing of it is in sight."""
    other = rig.app.command(["sleep", "30"])
    wait_until(lambda: rig.state(other) == "running", "the other job to run")
    seen = cast("list[str]", rig.app.call("calling_tasks:neighbours", []).result(timeout=40))
    assert set(seen) <= {"1"}


def test_asks_that_nobody_waits_for_leave_nothing(rig: Rig) -> None:
    """Forty OPENs and an end: the job ends as ever, and the node goes on."""
    assert rig.app.call("calling_tasks:deaf", []).result(timeout=40) == "asked"
    assert rig.app.command([sys.executable, "-c", "print(1)"]).result(timeout=40) is None


def test_sessions_leave_no_descriptor_with_the_agent_however_their_jobs_end(rig: Rig) -> None:
    """Jobs with sessions end by themselves, with asks that nobody took, or by a kill in the middle of it all."""
    pid = rig.nodes["a"].pid

    def held() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    rig.app.call("calling_tasks:deaf", []).result(timeout=40)
    before = held()
    jobs = [rig.app.call("calling_tasks:deaf", []) for _ in range(14)]
    jobs += [rig.app.call("calling_tasks:wait", []) for _ in range(2)]
    for job in jobs[:14]:
        assert job.result(timeout=40) == "asked"
    for job in jobs[14:]:
        wait_until(job.progress, "the job to have called")
        assert job.kill(wait=20).outcome == "killed"
    wait_until(lambda: held() <= before, "the agent to hold no more than before")
