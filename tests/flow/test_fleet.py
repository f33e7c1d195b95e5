"""Retries, limits and priorities on a real agent with one slot, and on agents that die."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from runner import Backoff, Concurrency, DuplicateJobError, Grants, JobFailed, JobRefused, Rate
from runner.cli.ceiling import Import
from runner.cli.commands import run_words
from runner.errors import EnqueueError, UsageError
from runner.job import Job
from tests.support.rig import Rig, rigged
from tests.support.wait import wait_until

TASKS = Import("flow_tasks", Path(__file__).parent / "programs")
LONG = ("sleep", "60")


@pytest.fixture(scope="module")
def served() -> Iterator[Rig]:
    """One agent with one slot."""
    with rigged(slots=1, imports=(TASKS,)) as found:
        found.start("a")
        yield found


@pytest.fixture
def rig(served: Rig) -> Iterator[Rig]:
    """The agent for one test; no job is left on it afterwards."""
    yield served
    served.app.kill(all=True)
    served.wait_idle()
    served.app.close()


def attempts(job: Job[object] | Job[None]) -> int:
    """How many attempts of a job really started."""
    return sum(event.type == "job.started" for event in job.events())


def call(rig: Rig, name: str, *args: object) -> Job[object]:
    """Enqueue a task with the options of its decorator: an app elsewhere does not know them."""
    options = {"third_time": {"retries": 3, "never_on": ["exception"]}, "always_again": {"retries": 2}}
    chosen = options.get(name, {"retries": 3, "never_on": ["exception:ValueError"]})
    return rig.app.call(f"flow_tasks:{name}", args, **chosen)  # type: ignore[arg-type]  # options by name


def test_a_task_asks_for_its_next_attempt(rig: Rig) -> None:
    """Retry(in_s=…) ends the attempt, the next one comes so much later, and its result is the job's."""
    job = call(rig, "third_time", 0.3)
    assert job.result(timeout=20) == 3
    retried = [event for event in job.events() if event.type == "job.retried"]
    assert [event.detail["delay_s"] for event in retried] == [0.3, 0.3]
    assert all(event.verified for event in retried)


def test_asking_for_ever_ends_with_the_signed_count(rig: Rig) -> None:
    """Retry is bounded by the job's retries; the last one is its end."""
    job = call(rig, "always_again")
    with pytest.raises(JobFailed, match=r"exception.*Retry") as caught:
        job.result(timeout=20)
    assert caught.value.error["type"] == "Retry"
    assert attempts(job) == 3


def test_a_hopeless_exception_is_not_tried_again(rig: Rig) -> None:
    """never_on names an exception's class."""
    job = call(rig, "hopeless")
    with pytest.raises(JobFailed, match="ValueError"):
        job.result(timeout=20)
    assert attempts(job) == 1


def test_a_command_waits_its_backoff(rig: Rig) -> None:
    """Between attempts the job is scheduled, says why, and leaves its slot to others."""
    job = rig.command("false", retries=1, backoff=Backoff(1.0))
    rig.wait_state(job, "scheduled")
    assert "its next attempt is due" in (job.status().waiting or "")
    rig.command("true").result(timeout=10)
    assert job.outcome(timeout=10).reason == "exit"
    assert attempts(job) == 2


@pytest.mark.parametrize("words", [(), ("late", "0.1")])
def test_a_k06_a_killed_job_does_not_come_back(rig: Rig, words: tuple[str, ...]) -> None:
    """Also one that exits with 0 on SIGTERM: killed, one attempt, and nothing waits for another (scenario A-K06)."""
    job, _ = rig.pulse(f"k06-{len(words)}", *words, retries=5)
    rig.wait_output(job, "up")
    receipt = job.kill(reason="enough", grace=5 if words else 0)
    assert (receipt.outcome, job.status().state, job.status().attempt) == ("killed", "killed", 1)
    assert attempts(job) == 1
    assert rig.redis.zcard("rf:due") == 0
    assert not rig.redis.exists("rq:queue:agents")


def test_a_k06_a_kill_ends_a_job_between_its_attempts(rig: Rig) -> None:
    """By id and by tag: killed, signed by a node, no next attempt."""
    by_id, by_tag = (rig.command("false", retries=5, backoff=600.0, tags={"n": str(n)}) for n in range(2))
    for job in (by_id, by_tag):
        rig.wait_state(job, "scheduled")
    assert by_id.kill().outcome == "killed_before_start"
    assert [receipt.job for receipt in rig.app.kill(tag="n:1")] == [by_tag.id]
    assert {job.outcome(timeout=10).state for job in (by_id, by_tag)} == {"killed"}
    assert rig.redis.zcard("rf:due") == 0


def test_a_l06_leaving_by_137_ends_after_the_signed_attempts(rig: Rig) -> None:
    """os._exit(137) looks like a kill and is none: three attempts, failed(exit), and others run (scenario A-L06)."""
    poison = rig.command("python3", "-c", "import os; os._exit(137)", retries=2)
    others = [rig.command("true") for _ in range(3)]
    assert poison.outcome(timeout=20).reason == "exit"
    assert attempts(poison) == 3
    assert {job.outcome(timeout=20).state for job in others} == {"finished"}


def test_a_l08_the_next_one_runs_after_every_end(rig: Rig) -> None:
    """A kill, the time limit and a SIGKILL of the worker free the name at once (scenario A-L08)."""
    killed = rig.command(*LONG, unique="k")
    rig.wait_state(killed, "running")
    killed.kill()
    late = rig.command(*LONG, unique="k", timeout=0.2)
    assert late.outcome(timeout=10).reason == "time_limit"
    shot = rig.command("sh", "-c", "kill -9 $$", unique="k")
    assert shot.outcome(timeout=10).state == "failed"
    assert rig.command("true", unique="k").outcome(timeout=10).state == "finished"


def test_a_l08_twenty_at_once_get_the_same_holder(rig: Rig) -> None:
    """While K is alive everyone gets the same id, as an error that names it or as its handle."""
    holder = rig.command(*LONG, unique="k")

    def try_one(number: int) -> str:
        if number % 2:
            return rig.command("true", unique="k", on_duplicate="return").id
        with pytest.raises(DuplicateJobError, match="already queued") as caught:
            rig.command("true", unique="k")
        return caught.value.holder

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(try_one, range(20))) == {holder.id}


def test_a_f05_the_next_start_is_a_high_one(rig: Rig) -> None:
    """One slot, low jobs that wait, a high one that comes later: it is next, and its lane is new (scenario A-F05)."""
    low = [rig.command("sleep", "0.1") for _ in range(6)]
    rig.wait_state(low[0], "finished")
    high = rig.command("true", priority=10)
    job = high.outcome(timeout=20)
    started = [one.outcome(timeout=20).started_at_ms or 0 for one in low]
    assert sum(at < (job.started_at_ms or 0) for at in started) <= 3, "at most the one that ran, and one on its way"
    unfit = rig.command("true", labels={"gpu": "yes"}, priority=10)
    assert "meets gpu=yes" in (unfit.status().waiting or "")


def test_a_rate_holds_for_real_jobs(rig: Rig) -> None:
    """Two starts a second, a third that waits aside and says so, while a job without the key passes it."""
    jobs = [rig.command("true", rate=Rate("r", 2, 1.0)) for _ in range(3)]
    rig.wait_state(jobs[2], "scheduled")
    assert "its rate" in (jobs[2].status().waiting or "")
    rig.command("true").outcome(timeout=10)
    starts = [job.outcome(timeout=10).started_at_ms or 0 for job in jobs]
    assert starts[2] - starts[0] > 900


@pytest.mark.parametrize("forged", ["", "u end 0 other", "c 1 k"])
def test_attack_22_other_limits_than_the_signed_ones_are_refused(rig: Rig, forged: str) -> None:
    """A store writer who takes a job's limit away, or gives it another, gets it refused: bad_hash."""
    blocker = rig.command(*LONG)
    rig.wait_state(blocker, "running")
    job = rig.command("true", unique="k", concurrency=Concurrency("k", 1))
    if forged:
        rig.redis.hset(f"rq:job:{job.id}", "rf_flow", forged)
    else:
        rig.redis.hdel(f"rq:job:{job.id}", "rf_flow")
    blocker.kill()
    with pytest.raises(JobRefused, match="bad_hash"):
        job.result(timeout=10)


def test_a_dead_letter_runs_again_as_a_new_job(rig: Rig) -> None:
    """retry makes one new job with a fresh id and nonce that names the old; a second one needs force."""
    marker = rig.work / "again"
    grants = Grants(read=(str(rig.work),))
    argv = ("sh", "-c", f"test -e {marker} || exit 3")
    old = rig.app.command(argv, grants=grants, unique="k", tags={"a": "b"})
    assert old.outcome(timeout=10).exit_code == 3
    with pytest.raises(UsageError, match="has not ended"):
        rig.command(*LONG).retry()
    rig.app.kill(queue="agents")
    marker.touch()
    new = old.retry()
    assert new.outcome(timeout=10).state == "finished"
    assert new.status().tags == {"a": "b", "retry_of": old.id}
    assert old.status().repeated_as == new.id
    with pytest.raises(UsageError, match="finished"):
        new.retry()


def test_every_failed_job_is_repeated_once(rig: Rig) -> None:
    """--all-failed takes what failed and nobody repeated; at most once needs force, and no job is made twice."""
    failed = [rig.command("false", tags={"all": "x"}) for _ in range(2)]
    once = rig.command("false", at_most_once=True, tags={"all": "x"})
    for job in (*failed, once):
        job.outcome(timeout=10)
    found = {one.job: one for one in rig.app.retry(all_failed=True, since=30)}
    assert {job.id for job in failed} <= found.keys()
    assert all(found[job.id].repeated_as for job in failed)
    assert "at most once" in found[once.id].why
    assert failed[0].status().repeated_as == found[failed[0].id].repeated_as
    with pytest.raises(DuplicateJobError, match="repeated already"):
        failed[0].retry()
    again = rig.app.retry([failed[0], once.id])
    assert [one.repeated_as for one in again] == [None, None]
    assert once.retry(force=True).id != once.id


def test_attack_22_what_another_key_signed_is_never_repeated(rig: Rig) -> None:
    """An operator's key does not sign what a weaker key, or a store writer, put there."""
    job, other = rig.command("false"), rig.command("false")
    for one in (job, other):
        one.outcome(timeout=10)
    stolen = rig.redis.hget(f"rq:job:{other.id}", "data")
    rig.redis.hset(f"rq:job:{job.id}", "data", stolen or b"")
    with pytest.raises(EnqueueError, match="another job's"):
        job.retry()
    rig.redis.hset(f"rq:job:{job.id}", "data", b"no job")
    with pytest.raises(EnqueueError, match="not readable"):
        job.retry()


def _runs(rig: Rig, job: Job[None], attempt: int) -> bool:
    return (rig.attempt(job), rig.state(job)) == (attempt, "running")


def test_a_l06_a_job_whose_nodes_die_is_given_up(rig: Rig) -> None:
    """Three agents in a row are lost while they run it: lost(poison), one end, retries left (A-L06)."""
    node = rig.start("c")
    job = rig.command(*LONG, retries=10, node=node.name)
    for attempt in (1, 2, 3):
        wait_until(partial(_runs, rig, job, attempt), f"attempt {attempt}", 20)
        node.crash()
        rig.restart(node)
    end = job.outcome(timeout=20)
    node.stop()
    assert (end.state, end.reason, end.attempt) == ("lost", "poison", 3)
    assert [event.type for event in job.events()].count("job.ended") == 1


def test_a_place_is_freed_when_its_node_dies(rig: Rig, served: Rig) -> None:
    """A concurrency limit of one in the fleet: the next job runs once the lost attempt has ended, never beside it."""
    limit = Concurrency("one", 1)
    node = served.start("b")
    holder = served.app.command(LONG, concurrency=limit, node=node.name)
    served.wait_state(holder, "running")
    waiting = served.command("true", concurrency=limit)
    served.wait_state(waiting, "scheduled")
    assert "in line" in (waiting.status().waiting or "")
    node.crash()
    served.restart(node)
    assert waiting.outcome(timeout=20).state == "finished"
    assert holder.status().state == "lost"
    node.stop()
    wait_until(lambda: not served.redis.exists("rf:conc:main:one"), "the last place to be free")


def test_the_command_line_shows_and_repeats_dead_letters(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """`ps --failed` lists it, `retry` runs it again once and says how, a selection that matches nothing is no error."""
    job = rig.command("false", queue="letters")
    job.outcome(timeout=10)

    def words(*line: str) -> tuple[int, str]:
        code = run_words(["--home", str(rig.home), *line])
        told = capsys.readouterr()
        return code, told.out + told.err

    rig.command("true").outcome(timeout=10)
    listed = json.loads(words("ps", "--failed", "--json")[1])
    assert job.id in {view["job"] for view in listed}
    assert {view["state"] for view in listed} <= {"failed", "lost", "expired", "refused"}
    code, told = words("retry", job.id)
    assert code == 0
    assert f"{job.id} runs again as {job.status().repeated_as}" in told
    code, told = words("retry", job.id)
    assert code == 1
    assert "repeated already" in told
    assert words("retry", "--all-failed", "--since", "1h", "--queue", "nowhere") == (0, "no job matches\n")
