"""Stock RQ's side: `rq worker-pool -n 2` on a store without persistence. Used by driver.py."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rq import Queue

from tests.bench.jobs import bench_stock
from tests.support import valkey as stores
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 30.0
BURST_S = 90.0
FINISHED = "rq:finished:default"


class Side:
    """A running pool and its client."""

    def __init__(self, queue: Queue, roots: list[int]) -> None:
        self._queue = queue
        self.roots = roots

    def one(self) -> None:
        """Enqueue one job and wait for its result."""
        if self._queue.enqueue(bench_stock.noop).latest_result(timeout=int(ANSWER_S)) is None:
            raise SystemExit("stock rq gave no result in 30 s")

    def burst(self, count: int) -> float:
        """Enqueue ``count`` jobs, wait until all are done, return the seconds."""
        client = self._queue.connection
        before = client.zcard(FINISHED)
        start = time.perf_counter()
        for _ in range(count):
            self._queue.enqueue(bench_stock.noop)
        wait_until(lambda: client.zcard(FINISHED) >= before + count, "stock's burst", BURST_S)
        return time.perf_counter() - start


@contextmanager
def running(kind: str) -> Iterator[Side]:
    """Yield a pool of two workers, its store as durable as ours; ``kind``: Worker or SimpleWorker."""
    rq = str(Path(sys.executable).with_name("rq"))
    with stores.running(stores.DURABLE) as store, store.client() as client:
        words = [rq, "worker-pool", "-n", "2", "-u", store.url, "-q", "-w", f"rq.worker.{kind}", "--path", str(ROOT)]
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as pool:
            try:
                yield Side(Queue(connection=client), [pool.pid, store.pid])
            finally:
                pool.terminate()
