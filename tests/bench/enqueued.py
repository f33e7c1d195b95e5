"""How fast jobs are enqueued: signed ones of ours, one by one and in batches, against `rq.enqueue`. Used by main.py.

Both write to one store that nobody works on. They alternate, and ratios are those within a round, so that a machine
that grows slower does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from rq import Queue

from runner import App, keyring
from runner.home import Home
from runner.request import JobOptions, build
from tests.bench.jobs import bench_stock
from tests.support import scratch
from tests.support import valkey as stores

ROUNDS = 5
SINGLES = 150
BATCHES, BATCH = 5, 100
TASK = "bench_tasks:noop"


@dataclass(frozen=True, slots=True)
class Rates:
    """Jobs per second, and how many times as many as `rq.enqueue` in the same round; medians."""

    stock: float
    single: float
    batch: float
    single_ratio: float
    batch_ratio: float


def measure() -> Rates:
    """Enqueue no-ops until the medians stand."""
    rounds: list[tuple[float, float, float]] = []
    with scratch.folder(mode=0o711) as folder, stores.running() as store, store.client() as client:
        home = folder / "h"
        keyring.init(Home(home), redis_url=store.url)
        queue = Queue(connection=client)
        with App(home=home) as app:
            for _ in range(ROUNDS):
                stock = _rate(lambda: queue.enqueue(bench_stock.noop), SINGLES)
                single = _rate(lambda: app.call(TASK), SINGLES)
                batch = BATCH * _rate(
                    lambda: app.client().enqueue([build(JobOptions(), task=TASK) for _ in range(BATCH)]), BATCHES
                )
                rounds.append((stock, single, batch))
    return Rates(
        stock=median(stock for stock, _, _ in rounds),
        single=median(single for _, single, _ in rounds),
        batch=median(batch for _, _, batch in rounds),
        single_ratio=median(single / stock for stock, single, _ in rounds),
        batch_ratio=median(batch / stock for stock, _, batch in rounds),
    )


def _rate(once: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        once()
    return count / (time.perf_counter() - start)
