"""``reuse=N``: who may ask for it, what must be equal, and a real agent that keeps to it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from node_agent import sandbox
from node_agent.admission import Enforcement, _enforceable, asked_of
from node_agent.containment.promises import Facts, promises
from node_agent.output import Capture, Chunk
from node_agent.pipes import Pipes
from node_agent.policy import decide, parse
from node_agent.sandbox import Defaults, terms_of
from runner import Grants, UsageError
from runner.cli import ceiling
from runner.cli.ceiling import Import
from runner.cli.commands import run_words
from runner.request import JobOptions, build
from runner.wire.errors import WireError
from runner.wire.grants import Grants as WireGrants
from runner.wire.grants import NetGrant, PathGrant, SecretGrant
from runner.wire.spec import MAX_REUSE
from tests.agent.build import job
from tests.containment.rig import TASKS
from tests.support.rig import Rig, rigged

NODE = Defaults("A", memory_bytes=1 << 30)
WHO = "again_tasks:who"


def test_the_api_signs_what_was_asked() -> None:
    """reuse is a number from 1 to 10,000, and the opposite of fresh."""
    assert build(JobOptions(reuse=7), task=WHO).reuse == 7
    assert build(JobOptions(reuse=MAX_REUSE), task=WHO).profile == "reuse=10000"
    assert build(JobOptions(), task=WHO).reuse == 0
    wrong: Sequence[JobOptions] = (JobOptions(reuse=0), JobOptions(reuse=MAX_REUSE + 1), JobOptions(reuse=True))
    for options in (*wrong, JobOptions(reuse=2, fresh=True)):
        with pytest.raises(UsageError, match="reuse"):
            build(options, task=WHO)
    with pytest.raises(WireError, match="at most 10000"):
        job(profile="reuse=10001")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"argv": ("true",)}, "command"),
        ({"grants": WireGrants(paths=(PathGrant("/srv", "read"),))}, "path"),
        ({"grants": WireGrants(net=(NetGrant("example.com", 443),))}, "door"),
        ({"grants": WireGrants(secrets=(SecretGrant("KEY", "get"),))}, "secrets"),
        ({"grants": WireGrants(service=True)}, "services"),
        ({"at_most_once": True}, "at-most-once"),
    ],
)
def test_what_is_made_for_one_attempt_is_refused(changes: dict[str, object], word: str) -> None:
    """Commands, paths, net, secrets and at-most-once jobs: the node says why, and what to leave out."""
    spec = job(**{**({} if "argv" in changes else {"task": WHO}), "profile": "reuse=5", **changes})
    denial = _enforceable(spec, Enforcement("A"))
    assert denial is not None
    assert denial.reason == "unenforceable"
    assert word in denial.message
    assert "leave reuse out" in denial.message
    assert _enforceable(job(**{**({} if "argv" in changes else {"task": WHO}), **changes}), Enforcement("A")) is None


def test_totals_may_be_shared_and_weak_levels_may_not() -> None:
    """Memory, CPU and sizes are limits of the worker; without a sandbox of its own there is none to share."""
    spec = job(task=WHO, profile="reuse=5", grants=WireGrants(memory_bytes=1 << 26, cpus=0.5, disk_bytes=1 << 20))
    for level in ("A", "B"):
        assert _enforceable(spec, Enforcement(level)) is None
    for level in ("C", "F"):
        denial = _enforceable(spec, Enforcement(level))
        assert denial is not None
        assert "level A or B" in denial.message
    for level in ("A", "B", "C", "D", "E", "F", "none"):
        found = {each.name: each for each in promises(Facts(level))}["reuse"]
        assert (found.kept, found.asked) == (level in ("A", "B"), True)
    assert ("reuse" in asked_of(spec), "reuse" in asked_of(job(task=WHO))) == (True, False)


def test_attack_38_the_terms_name_all_that_must_be_equal() -> None:
    """Tenant, task, key, N, every grant and every limit that shapes the sandbox."""
    base = {"task": WHO, "profile": "reuse=5"}
    terms = terms_of(job(**base), "key", NODE)
    assert terms == terms_of(job(**base, env={"A": "b"}, args=(1,), tags={"a": "b"}), "key", NODE)
    assert terms is not None
    assert terms.most == 5
    others = [
        job(**{**base, "task": "again_tasks:other"}),
        job(**{**base, "profile": "reuse=6"}),
        job(**base, grants=WireGrants(memory_bytes=1 << 26)),
        job(**base, grants=WireGrants(disk_bytes=1 << 26)),
        job(**base, grants=WireGrants(no_exec=True)),
        job(**base, cwd="/tmp"),
    ]
    other = job(**base)
    object.__setattr__(other, "tenant", "other")
    found = [terms_of(spec, "key", NODE) for spec in (*others, other)]
    found.append(terms_of(job(**base), "another key", NODE))
    assert terms not in found
    assert all(found.count(each) == 1 for each in found)
    assert terms_of(job(task=WHO), "key", NODE) is None


def test_policy_must_allow_it() -> None:
    """A rule says reuse = true; the one that `up` writes does."""
    spec = job(task=WHO, profile="reuse=5")
    refused = decide(parse('version = 1\n[[allow]]\ntasks = ["*"]\n'), spec, "k")
    assert not refused.allowed
    assert "--reuse" in refused.message
    assert decide(parse('version = 1\n[[allow]]\ntasks = ["*"]\nreuse = true\n'), spec, "k").allowed
    assert decide(parse(ceiling.policy_text([], [Import("again_tasks", None)])), spec, "k").allowed


def test_a_writer_that_lives_on_holds_nobody_up() -> None:
    """Draining the pipes of a job whose worker goes on ends, however fast it writes."""

    async def drained() -> int:
        async def forget(chunks: Sequence[Chunk]) -> None:
            del chunks

        (out, write), (err, other) = os.pipe2(os.O_NONBLOCK), os.pipe2(os.O_NONBLOCK)
        os.set_blocking(write, True)
        capture = Capture((out, err), forget, limit_bytes=1 << 30, on_limit=lambda: None, watch=Pipes())

        def flood() -> None:
            try:
                while True:
                    os.write(write, b"x" * 65536)
            except OSError:
                os.close(write)

        thread = threading.Thread(target=flood)
        thread.start()
        capture.drain()
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
        os.close(other)
        await capture.finish()
        return capture.total_bytes

    assert asyncio.run(drained()) <= 512 << 16


@pytest.fixture(scope="module")
def served() -> Iterator[Rig]:
    """One agent with one slot, which serves again_tasks."""
    with rigged(slots=1, heartbeat_s=10.0, imports=(Import("again_tasks", Path(TASKS)),)) as found:
        found.start("a")
        yield found


@pytest.fixture
def rig(served: Rig) -> Iterator[Rig]:
    """The agent for one test; its client is closed afterwards."""
    yield served
    served.app.close()


def looked(rig: Rig, count: int, **options: object) -> list[dict[str, object]]:
    """Run so many `who` jobs, enqueued together; return what they saw."""
    given = cast("JobOptions", options)
    jobs = [rig.app.call(WHO, [str(number)], **given) for number in range(count)]
    return [cast("dict[str, object]", each.result(timeout=30)) for each in jobs]


def test_one_worker_for_n_jobs_and_a_new_one_for_the_next(rig: Rig) -> None:
    """Of five jobs with reuse=3, three share a process and two another one; each has its own output and result."""
    jobs = [rig.app.call(WHO, [str(number)], reuse=3) for number in range(5)]
    seen = [cast("dict[str, object]", each.result(timeout=30)) for each in jobs]
    assert [each["served"] for each in seen] == [1, 2, 3, 1, 2]
    assert len({each["born"] for each in seen}) == 2
    assert [each["word"] for each in seen] == list("01234")
    for number, each in enumerate(jobs):
        assert sorted(rig.logs(each).splitlines()) == [f"err {number}", f"out {number}"]
        assert rig.state(each) == "finished"


def test_the_command_line_asks_for_it(rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    """`call --reuse N` signs what the API does; a command has no such option, and N has a bound."""

    def words(*line: str) -> int:
        return run_words(["--home", str(rig.home), *line])

    assert [words("call", WHO, "--reuse", "40", "--detach") for _ in range(2)] == [0, 0]
    jobs = [rig.app.job(line) for line in capfd.readouterr().out.split()]
    seen = [cast("dict[str, object]", each.result(timeout=30))["served"] for each in jobs]
    assert seen in ([1, 2], [1, 1])  # a slow machine may have ended the worker in between
    assert words("call", WHO, "--reuse", "10001") == 2
    assert words("run", "--reuse", "2", "--", "true") == 2


def test_jobs_that_did_not_ask_never_share(rig: Rig) -> None:
    """A default job, one with another grant and one of a kind each have a process of their own."""
    first = looked(rig, 1, reuse=50)[0]
    others = [looked(rig, 1), looked(rig, 1, reuse=50, grants=Grants(disk="1M")), looked(rig, 1, reuse=51)]
    assert [each["served"] for (each,) in others] == [1, 1, 1]
    assert first["born"] not in {each["born"] for (each,) in others}


def test_a_kill_ends_the_worker_and_proves_it(rig: Rig) -> None:
    """The receipt of a job in a worker that others used is the receipt of any job; the next one has a new process."""
    started = [rig.app.call("again_tasks:sleep", [0], reuse=50) for _ in range(2)]
    for each in started:
        each.result(timeout=30)
    running = rig.app.call("again_tasks:sleep", [30], reuse=50)
    rig.wait_output(running, "up")
    receipt = running.kill()
    assert (receipt.outcome, receipt.survivors, receipt.processes) == ("killed", 0, 1)
    assert rig.app.call("again_tasks:sleep", [0], reuse=50).result(timeout=30) is None


def test_any_kill_ends_the_workers_that_wait(rig: Rig) -> None:
    """What an ended job left in a worker is gone once a kill has reached the node, whatever that names."""
    (first,) = looked(rig, 1, reuse=50)
    (again,) = looked(rig, 1, reuse=50)
    assert again["served"] in (1, 2)  # a slow machine may have ended the worker in between
    rig.app.kill(tag="nobody:has-it")
    (after,) = looked(rig, 1, reuse=50)
    assert after["served"] == 1
    assert after["born"] != first["born"]


def test_a_job_that_is_too_long_in_it_meets_its_own_limit(rig: Rig) -> None:
    """Wall time counts for each job; the limit ends the worker."""
    (first,) = looked(rig, 1, reuse=50)
    late = rig.app.call("again_tasks:sleep", [30], reuse=50, timeout=0.3)
    rig.wait_state(late, "failed")
    (after,) = looked(rig, 1, reuse=50)
    assert (after["served"], after["born"] != first["born"]) == (1, True)


def test_the_payload_says_nothing_of_it() -> None:
    """What a job is handed is the same with reuse and without."""
    one, other = job(task=WHO, profile="reuse=5"), job(task=WHO)
    object.__setattr__(other, "id", one.id)
    assert sandbox.payload_of(one, 1) == sandbox.payload_of(other, 1)
