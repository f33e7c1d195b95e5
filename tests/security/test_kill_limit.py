"""The time limit ends a job from outside, whatever it does, and is told as what it is (scenario A-K09)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.containment.rig import marked
from tests.support.rig import Rig, rigged

LIMIT_S = 1.0
ATTEMPTS = 2
MARK = "rf-limit-mark"
FOREVER = {
    "c-code": ["python3", "-c", "import hashlib; hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)"],
    "thread": ["python3", "-c", "import threading as t; x = t.Thread(target=t.Event().wait); x.start(); x.join()"],
    "deaf": [
        "python3",
        "-c",
        "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)",
    ],
    "shell": ["sh", "-c", "sleep 600 & wait"],
    "stopped": ["sh", "-c", "setsid sleep 600 & kill -STOP $$; sleep 600"],
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A node with a slot for each."""
    with rigged(slots=len(FOREVER)) as found:
        found.start("limit")
        yield found


def test_k09_the_limit_ends_every_job_from_outside(rig: Rig) -> None:
    """C code, a joined thread, deaf, waiting and stopped processes: time_limit after each attempt, the tree gone."""
    begun = time.monotonic()
    jobs = {
        name: rig.command(*argv, timeout=LIMIT_S, retries=ATTEMPTS - 1, env={"MARK": MARK})
        for name, argv in FOREVER.items()
    }
    for job in jobs.values():
        rig.wait_state(job, "failed", "finished", "killed", "lost", timeout_s=30)
    took_s = time.monotonic() - begun
    views = {name: job.status() for name, job in jobs.items()}
    assert {name: (view.state, view.reason, view.attempt) for name, view in views.items()} == dict.fromkeys(
        jobs, ("failed", "time_limit", ATTEMPTS)
    )
    assert took_s < ATTEMPTS * (LIMIT_S + 2) + 3, "an attempt outlived its limit"
    assert marked(MARK) == []
    rig.app.close()
