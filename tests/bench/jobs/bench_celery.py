"""Celery's side: the same nothing in `celery worker --pool prefork -c 2`. Standard library and celery alone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ANSWER_S = 30.0

# Celery may be of another environment than the one that is checked.
app: Any = import_module("celery").Celery("bench_celery")
app.conf.update(result_expires=3600, worker_prefetch_multiplier=4, broker_connection_retry_on_startup=True)


def nothing() -> int:
    """Return 1."""
    return 1


noop = app.task(name="noop")(nothing)


class Side:
    """A running worker and its client."""

    def __init__(self, pid: int) -> None:
        self.roots = [pid]

    def one(self) -> None:
        """Enqueue one job and wait for its result."""
        noop.delay().get(timeout=ANSWER_S)

    def burst(self, count: int) -> float:
        """Enqueue ``count`` jobs, wait until all are done, return the seconds."""
        start = time.perf_counter()
        waiting = [noop.delay() for _ in range(count)]
        for each in waiting:
            each.get(timeout=ANSWER_S)
        return time.perf_counter() - start


@contextmanager
def running(socket: str) -> Iterator[Side]:
    """Yield a worker on the store behind ``socket``."""
    url = f"redis+socket://{socket}"
    app.conf.update(broker_url=url, result_backend=url)
    words = [sys.executable, "-m", "celery", "-b", url, "--result-backend", url, "-A", "bench_celery", "worker"]
    more = ["--pool", "prefork", "-c", "2", "-l", "ERROR", "--without-gossip", "--without-mingle"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen([*words, *more], cwd=Path(__file__).parent, stdout=quiet, stderr=quiet) as worker:
        try:
            yield Side(worker.pid)
        finally:
            worker.terminate()
            worker.wait(ANSWER_S)
