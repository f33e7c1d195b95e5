"""Schedulers as processes that are stopped and killed (A-L07), and `ringfence scheduler` itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner import keyring
from runner.cli import launch
from runner.home import Home
from runner.wire import ids
from runner.wire import schedule as schedules
from tests.agent.build import signer
from tests.schedule.clock import KEYS, put, schedule
from tests.store.desk import Desk
from tests.support import scratch
from tests.support.fleet import CLI
from tests.support.valkey import Valkey
from tests.support.wait import wait_until

KEY = signer()
JOBS = 20_000 if os.environ.get("RINGFENCE_TEST_FULL") else 2000
LEASE_MS = 600
KEEPER = Path(__file__).with_name("keeper.py")


@contextmanager
def keepers(valkey: Valkey, *names: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Scheduler processes by name; they end with the block, and with this process."""
    head = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(signal.SIGKILL)), launch.NO_UID]
    words = [sys.executable, "-I", str(KEEPER), str(valkey.socket)]
    started = {name: subprocess.Popen([*head, *words, name, str(LEASE_MS)]) for name in names}
    try:
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def leader(desk: Desk) -> str:
    """Who leads now, or led last."""
    return (desk.redis.hget(KEYS.leader(), "member") or b"").decode()


def test_l07_three_schedulers_a_stopped_and_a_killed_leader(valkey: Valkey, desk: Desk) -> None:
    """Many jobs due at one instant and a time each second: each enqueued exactly once, whoever leads, none left out."""
    jobs = [ids.new_job_id() for _ in range(JOBS)]
    now_ms = int(desk.redis.time()[0]) * 1000
    for start in range(0, JOBS, 200):
        desk.enqueue_all([desk.row(job, due=now_ms + 3_600_000) for job in jobs[start : start + 200]])
    first_ms = int(desk.redis.time()[0]) * 1000 + 1000
    put(desk, KEY, schedule(missed="all"), first_ms)
    with keepers(valkey, "a", "b", "c") as processes:
        stopped = wait_until(lambda: leader(desk), "a leader")
        desk.redis.zadd(KEYS.due(), dict.fromkeys(jobs, first_ms))
        wait_until(lambda: desk.redis.zcard(KEYS.due()) < JOBS, "the first jobs to be moved")
        processes[stopped].send_signal(signal.SIGSTOP)
        killed = wait_until(lambda: leader(desk) != stopped and leader(desk), "another leader", 5)
        wait_until(lambda: desk.redis.zcard(KEYS.due()) == 0, "all jobs to be moved", 20)
        processes[stopped].send_signal(signal.SIGCONT)
        assert leader(desk) == killed
        processes[killed].kill()
        wait_until(lambda: leader(desk) != killed, "a third leadership", 5)
        seen = float(desk.redis.zscore(KEYS.ticks(), "main/tick"))
        wait_until(lambda: float(desk.redis.zscore(KEYS.ticks(), "main/tick")) > seen, "one more time", 5)
    next_ms = int(float(desk.redis.zscore(KEYS.ticks(), "main/tick")))
    ticks = [schedules.occurrence_id("main", "tick", due) for due in range(first_ms, next_ms, 1000)]
    queued = Counter(job for kind, job in desk.events() if kind == "job.queued")
    assert len(ticks) >= 2
    assert queued == Counter([*jobs, *ticks])
    waiting = desk.waiting()
    assert Counter(waiting) == Counter([*jobs, *ticks])
    assert [job for job in waiting if job in set(ticks)] == ticks


def test_the_command_serves_and_leaves_in_order(valkey: Valkey, desk: Desk) -> None:
    """`ringfence scheduler` enqueues what is due, holds no key to sign with, and hands over at SIGTERM."""
    due_ms = int(desk.redis.time()[0]) * 1000
    put(desk, KEY, schedule(end_ms=due_ms), due_ms)
    with scratch.folder(mode=0o711) as folder:
        home = Home(folder / "h")
        keyring.init(home, redis_url=valkey.url)
        for key in home.keys.iterdir():
            key.unlink()
        words = [*CLI, "--home", str(home.path), "scheduler"]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as process:
            try:
                wait_until(desk.waiting, "the occurrence to be enqueued", 15)
                assert leader(desk).startswith("scheduler/")
                process.send_signal(signal.SIGTERM)
                assert process.wait(10) == 0
            finally:
                process.kill()
    assert desk.waiting() == [schedules.occurrence_id("main", "tick", due_ms)]
    assert desk.redis.hget(KEYS.leader(), "until") == b"0"
