"""Whatever ends a job, the reason is told: by `run`'s last line, in `show`, and in the one job.ended event."""

from __future__ import annotations

import dataclasses
import os
import secrets
from dataclasses import dataclass
from typing import cast

import pytest

from runner import App
from tests.support.fleet import Fleet, processes_with

TOTALS = os.geteuid() == 0
needs_totals = pytest.mark.skipif(not TOTALS, reason="a memory or cpu total needs a cgroup, which this user has not")
NO_TOTALS = pytest.mark.skipif(TOTALS, reason="root has cgroups here; this is about hosts without")
TASK = "limit_tasks:"


@dataclass(frozen=True, slots=True)
class Told:
    """What everybody who looks is told of one job."""

    code: int
    last_line: str
    job: dict[str, object]
    event: dict[str, object]

    @property
    def usage(self) -> dict[str, float]:
        """The figures of the job."""
        return cast("dict[str, float]", self.job["usage"])


def told(fleet: Fleet, *words: str) -> Told:
    """Run a job with `run` or `call` and return all that is told of its end."""
    done = fleet.run(*words, timeout_s=90)
    lines = done.stderr.splitlines()
    job = next(line for line in lines if line.startswith("ringfence: job ")).split()[2]
    with App(home=fleet.home) as app:
        shown = dataclasses.asdict(app.job(job).status())
        events = [event for event in app.job(job).events() if event.type == "job.ended"]
    assert len(events) == 1, events
    assert events[0].verified
    return Told(done.returncode, lines[-1], shown, dict(events[0].detail))


def assert_reason(found: Told, state: str, reason: str) -> None:
    """Every place must name the same state and reason."""
    assert (found.job["state"], found.job["reason"]) == (state, reason), found
    assert (found.event["state"], found.event["reason"]) == (state, reason)
    assert f"{state}({reason})" in found.last_line


SHELL = [
    ("exit", ["--", "sh", "-c", "echo last words; exit 7"], 7, "exit code 7"),
    ("signal", ["--", "sh", "-c", "echo last words; kill -SEGV $$"], 139, "SIGSEGV"),
    ("exit", ["--", "sh", "-c", "echo last words; sh -c 'kill -TERM $$'; exit 143"], 143, "SIGTERM"),
    ("time_limit", ["--timeout", "1", "--", "sh", "-c", "echo last words; trap '' TERM; sleep 60 & wait"], 124, "time"),
    (
        "pids_limit",
        ["--pids", "16", "--", "sh", "-c", "echo last words; for i in $(seq 60); do sleep 20 & done; wait"],
        2,
        "--pids",
    ),
    ("disk_limit", ["--disk", "2M", "--", "sh", "-c", "echo last words; head -c 9M /dev/zero > /work/f"], 1, "--disk"),
    (
        "disk_limit",
        ["--", "python3", "-c", "print('last words')\nfor n in range(10**6): open(f'/tmp/{n}', 'w').close()"],
        1,
        "/tmp",
    ),
]


@pytest.mark.parametrize(
    ("reason", "words", "code", "detail"), SHELL, ids=[f"{n}-{row[0]}" for n, row in enumerate(SHELL)]
)
def test_a_command_s_end_is_told_with_its_reason_and_last_lines(
    fleet: Fleet, reason: str, words: list[str], code: int, detail: str
) -> None:
    """Reason, exit code, a sentence that names the cause, the last output, CPU time and peak memory."""
    found = told(fleet, "run", *words)
    assert_reason(found, "failed", reason)
    assert found.code == code
    assert detail in str(found.job["detail"])
    assert detail in found.last_line
    assert "last words" in str(found.job["tail"])
    assert found.usage["max_rss_bytes"] > 0
    # Where no cgroup counts, a killed job is looked at in clock ticks.
    assert found.usage["cpu_s"] > 0 or reason == "time_limit"
    assert cast("float", found.event["max_rss_bytes"]) == found.usage["max_rss_bytes"]


def test_show_ends_with_the_last_output(fleet: Fleet) -> None:
    """For people: figures in words, and the job's last lines last, one a line, made harmless."""
    job = str(told(fleet, "run", "--", "sh", "-c", "printf 'one\\ntwo \\033[2J\\n'; exit 1").job["job"])
    lines = fleet.run("show", job).stdout.splitlines()
    assert lines[-2].split() == ["tail", "one"]
    assert lines[-1].strip().startswith("two")
    assert "\033" not in lines[-1]
    assert any(line.startswith("usage") and "peak memory" in line for line in lines)


HUNG = {
    "in C": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)",
    "endless thread": (
        "import threading, time\n"
        "def go():\n    while True: time.sleep(1)\n"
        "t = threading.Thread(target=go); t.start(); t.join()"
    ),
    "deaf": (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    ),
    "children": "import subprocess; subprocess.run(['sh', '-c', 'sleep 600 & wait'])",
}


@pytest.mark.parametrize("code", HUNG.values(), ids=HUNG.keys())
def test_the_time_limit_acts_from_outside(fleet: Fleet, code: str) -> None:
    """Scenario A-K09: whatever the job hangs in, each of two attempts ends by its limit, as such; nothing is left."""
    mark = secrets.token_hex(8)
    found = told(fleet, "run", "--timeout", "1.5", "--retries", "1", "--", "python3", "-c", code, mark)
    assert_reason(found, "failed", "time_limit")
    assert (found.code, found.job["attempt"], processes_with(mark)) == (124, 2, [])
    assert found.usage["wall_s"] <= 1.5 + 2
    events = [str(event["type"]) for event in fleet.json_lines("events", "--job", str(found.job["job"]))]
    assert events.count("job.retried") == 1


def test_a_flood_of_output_ends_the_job_and_is_kept_bounded(fleet: Fleet) -> None:
    """Scenario A-P04: the limit (64 MiB) kills; the log keeps the first 4 MiB, the last 256 KiB and the cut's size."""
    found = told(fleet, "run", "--", "sh", "-c", "yes a-line-without-end")
    assert_reason(found, "failed", "output_limit")
    assert found.code == 137
    assert 64 << 20 < found.usage["output_bytes"] < 80 << 20
    log = fleet.run("logs", str(found.job["job"])).stdout
    assert 4 << 20 <= len(log) <= 5 << 20
    assert "a-line-without-end" in str(found.job["tail"])


@needs_totals
def test_memory_is_a_total_of_the_tree(fleet: Fleet) -> None:
    """Scenario A-I08: children of 60 MB each end a job of 128 MB, also where the shell itself lives on and says 137."""
    eat = "x = bytearray(b'x') * (60 << 20); import time; time.sleep(4)"
    script = (
        f'for i in 1 2 3 4; do python3 -c "{eat}" & all="$all $!"; done; for i in $all; do wait $i || exit $?; done'
    )
    found = told(fleet, "run", "--memory", "128M", "--", "sh", "-c", script)
    assert_reason(found, "failed", "memory_limit")
    assert "--memory" in found.last_line
    assert 100 << 20 <= found.usage["max_rss_bytes"] <= 140 << 20


@needs_totals
def test_a_job_without_any_option_has_a_memory_limit(fleet: Fleet) -> None:
    """Attack 33: memory, also as files of a tmpfs, ends at the default limit; the agent lives and serves on."""
    found = told(fleet, "run", "--", "python3", "-c", "x = [bytearray(b'x') * (64 << 20) for _ in range(64)]")
    assert_reason(found, "failed", "memory_limit")
    assert fleet.run("run", "--", "true").returncode == 0


@needs_totals
def test_cpus_are_a_total_of_the_tree(fleet: Fleet) -> None:
    """Two burners below --cpus 0.2 get a fifth of a CPU together."""
    burn = "import os, time\nos.fork()\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    found = told(fleet, "run", "--cpus", "0.2", "--", "python3", "-c", burn + "\nraise SystemExit(3)")
    assert_reason(found, "failed", "exit")
    assert found.usage["cpu_s"] <= 0.2 * found.usage["wall_s"] + 0.2


@NO_TOTALS
@pytest.mark.parametrize("words", [["--memory", "64M"], ["--cpus", "0.5"]])
def test_an_asked_total_without_a_cgroup_is_refused(fleet: Fleet, words: list[str]) -> None:
    """Level B without delegation: never run without the limit, and the message names what to do."""
    found = told(fleet, "run", *words, "--", "true")
    assert_reason(found, "refused", "unenforceable")
    assert "ringfence doctor" in found.last_line


@NO_TOTALS
def test_attack_33_at_level_b_a_process_has_a_limit_and_the_tmpfs_fit_in_memory(fleet: Fleet) -> None:
    """Memory ends at the process's own limit, and told so for a task; bytes and inodes end at the tmpfs's."""
    found = told(fleet, "call", f"{TASK}swallow", "--arg", str(6 << 30))
    assert_reason(found, "failed", "memory_limit")
    assert "MiB" in found.last_line
    report = (
        "import os\n"
        "for place in ('/work', '/tmp', '/dev/shm'):\n"
        "    info = os.statvfs(place)\n"
        "    print(info.f_blocks * info.f_frsize, info.f_files)\n"
    )
    done = fleet.run("run", "--", "python3", "-c", report)
    rows = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    slots = 3
    assert slots * sum(size for size, _ in rows) <= ram // 2
    assert all(0 < files <= 65_536 for _, files in rows)


def test_a_task_s_end_is_told_with_its_reason(fleet: Fleet) -> None:
    """An exception, a full workspace and a result that is too large are three reasons."""
    broken = told(fleet, "call", f"{TASK}fill", "--arg", '"/nowhere/f"', "--arg", "1048576")
    assert_reason(broken, "failed", "exception")
    full = told(fleet, "call", f"{TASK}fill", "--arg", '"/work/f"', "--arg", str(64 << 20), "--disk", "8M")
    assert_reason(full, "failed", "disk_limit")
    assert "No space left" in full.last_line
    large = told(fleet, "call", f"{TASK}answer", "--arg", str(9 << 20))
    assert_reason(large, "failed", "result_not_storable")


def test_an_end_without_fault_has_no_reason(fleet: Fleet) -> None:
    """A job that met limits and coped has finished: a limit is a reason for a bad end only."""
    script = "head -c 9M /dev/zero > /work/f || true; for i in $(seq 40); do sleep 1 & done; exit 0"
    done = fleet.run("run", "--disk", "1M", "--pids", "64", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr


def test_open_files_are_limited(fleet: Fleet) -> None:
    """A job gets at most 1,024 descriptors, hard."""
    code = "import os, resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE))\nwhile True: os.dup(0)"
    done = fleet.run("run", "--", "python3", "-c", code)
    soft, hard = (int(word) for word in done.stdout.strip("()\n").split(", "))
    assert soft == hard <= 1024
    assert "Too many open files" in done.stderr
