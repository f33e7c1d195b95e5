"""`pause` and `resume`: signed orders that stop a job where it stands and let it go on, told to everybody who looks."""

from __future__ import annotations

import secrets
import time
from typing import cast

from runner import App
from tests.support.fleet import Fleet, processes_with
from tests.support.wait import pause as moment
from tests.support.wait import wait_until

TICKS = 'import sys, time\nprint("up", flush=True)\nwhile True: time.sleep(0.01); print("tick", flush=True)'


def ticking(fleet: Fleet, *words: str) -> tuple[str, str]:
    """Start a job that prints until it dies, and wait for its first line; return the job and its mark."""
    mark = secrets.token_hex(8)
    job = fleet.detach(*words, "--", "python3", "-c", TICKS, mark)
    fleet.wait_output(job, "up")
    return job, mark


def written(fleet: Fleet, job: str) -> str:
    """Return what the job has written so far."""
    with App(home=fleet.home) as app:
        return b"".join(data for _, data in app.job(job).logs()).decode()


def grows(fleet: Fleet, job: str) -> bool:
    """Return whether the job's output gets longer within a moment."""
    before = len(written(fleet, job))
    moment(0.3)
    return len(written(fleet, job)) > before


def types_of(fleet: Fleet, job: str) -> list[str]:
    """Return the types of the job's verified events of pauses, in order."""
    events = fleet.json_lines("events", "--job", job)
    return [str(event["type"]) for event in events if event["verified"] and "d" in str(event["type"])]


def test_a_paused_job_stands_still_until_it_is_resumed(fleet: Fleet) -> None:
    """Paused with a signed receipt, shown as paused, no line more; resumed, it goes on; each is told once."""
    job, _ = ticking(fleet)
    receipt = fleet.json("pause", job, "--reason", "look at it")[0]
    assert (receipt["outcome"], receipt["state"], receipt["signature"] != "") == ("paused", "paused", True)
    assert cast("int", receipt["processes"]) >= 1
    fleet.wait_state(job, "paused")
    moment(0.1)  # what was written before the pause is on its way to the store
    assert not grows(fleet, job)
    assert fleet.run("pause", job).returncode == 0, "a second pause is no error"
    assert fleet.json("resume", job)[0]["outcome"] == "resumed"
    fleet.wait_state(job, "running")
    wait_until(lambda: grows(fleet, job), "the output to grow again", 20)
    assert fleet.run("resume", job).returncode == 0, "a second resume is no error"
    told = [kind for kind in types_of(fleet, job) if kind in {"job.paused", "job.resumed"}]
    assert told == ["job.paused", "job.resumed"]
    assert fleet.run("kill", job).returncode == 0


def test_a_paused_job_is_killed_with_proof(fleet: Fleet) -> None:
    """A kill, even with a grace that a stopped job could never use, ends it at once and completely."""
    job, mark = ticking(fleet)
    assert fleet.run("pause", job).returncode == 0
    begun = time.monotonic()
    receipt = fleet.json("kill", job, "--grace", "20")[0]
    assert time.monotonic() - begun < 10
    assert (receipt["outcome"], receipt["survivors"], processes_with(mark)) == ("killed", 0, [])
    assert fleet.run("pause", job).returncode == 5, "an ended job is not paused"


def test_the_clock_of_the_time_limit_stands_still(fleet: Fleet) -> None:
    """A job of 3 s that is paused for 4 s does not end then; resumed, it ends by its time limit."""
    job, _ = ticking(fleet, "--timeout", "3")
    assert fleet.run("pause", job).returncode == 0
    moment(4)
    assert fleet.state(job) == "paused"
    assert fleet.run("resume", job).returncode == 0
    fleet.wait_state(job, "failed")
    shown = fleet.json("show", job)[0]
    assert shown["reason"] == "time_limit"
    assert cast("dict[str, float]", shown["usage"])["wall_s"] >= 6


def test_a_selector_pauses_and_resumes_its_jobs_alone(fleet: Fleet) -> None:
    """All jobs of the tag on all nodes stand still, others do not notice; nothing matching is no error."""
    team = f"p{secrets.token_hex(4)}"
    chosen = [ticking(fleet, "--tag", f"team={team}", "--node", node)[0] for node in ("node-1", "node-2")]
    other, _ = ticking(fleet)
    receipts = fleet.json("pause", "--tag", f"team={team}")
    assert {(str(one["job"]), one["outcome"]) for one in receipts} == {(job, "paused") for job in chosen}
    for job in chosen:
        fleet.wait_state(job, "paused")
    assert fleet.state(other) == "running"
    assert grows(fleet, other)
    assert {one["outcome"] for one in fleet.json("resume", "--tag", f"team={team}")} == {"resumed"}
    assert fleet.json("pause", "--tag", "team=nobody") == []
    assert fleet.run("pause", "--tag", "team=nobody").returncode == 0


def test_what_does_not_run_is_said_to_be_so(fleet: Fleet) -> None:
    """A waiting job is not running, an unknown one unknown; nothing is paused in secret for later."""
    waiting = fleet.detach("--label", "nowhere=yes", "--", "true")
    receipt = fleet.json("pause", waiting)[0]
    assert (receipt["outcome"], fleet.run("pause", waiting).returncode) == ("not_running", 5)
    assert fleet.run("pause", "main-01j00000000000000000000000").returncode == 4


# Waits for a lock that another job holds, and leaves a mark when that job is gone.
HEIR = """
import fcntl, sys, time
lock = open(sys.argv[1] + "/lock", "w")
print("up", flush=True)
fcntl.flock(lock, fcntl.LOCK_EX)
open(f"{sys.argv[1]}/{sys.argv[2]}", "w").close()
print("held", flush=True)
time.sleep(60)
"""


def test_none_of_a_selector_sees_another_die(fleet: Fleet) -> None:
    """A job that waits for another's lock gets it when that one is killed alone, and never in a kill of all.

    That all are frozen first is shown in test_kill_many.py: three kills take too little time to lose this race.
    """
    team = f"k{secrets.token_hex(4)}"
    folder = fleet.work / team
    folder.mkdir()
    words = ["--tag", f"team={team}", "--node", "node-1", "--write", str(folder), "--", "python3", "-c", HEIR]

    def heir(name: str) -> str:
        job = fleet.detach(*words, str(folder), name)
        wait_until(lambda: "up" in written(fleet, job), f"{name} to be up", 30)
        return job

    first = heir("first")
    wait_until((folder / "first").exists, "the first to hold the lock")
    heir("second")
    assert fleet.run("kill", first).returncode == 0
    wait_until((folder / "second").exists, "the second to notice the first one's death")
    heir("third")
    heir("fourth")
    receipts = fleet.json("kill", "--tag", f"team={team}")
    assert sorted(str(one["outcome"]) for one in receipts) == ["killed"] * 3
    assert sorted(path.name for path in folder.iterdir()) == ["first", "lock", "second"]
