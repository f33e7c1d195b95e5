"""Our side: isolated jobs of a fleet with one node. Used by driver.py, as root (level A) or as an ordinary user (B)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from runner import App
from runner.request import JobOptions, build
from tests.bench.load import pss_kib, tree_of
from tests.support import fleet as fleets
from tests.support.fleet import Fleet
from tests.support.wait import wait_until

JOBS = Path(__file__).resolve().parent / "jobs"
TASK = "bench_tasks:noop"
ANSWER_S = 30.0
BURST_S = 90.0
FINISHED = "rq:finished:agents"


class Side:
    """A running fleet and its client."""

    def __init__(self, fleet: Fleet, app: App, store: redis.Redis) -> None:
        self._fleet = fleet
        self._app = app
        self._store = store
        self.roots = [fleet.process.pid]

    def one(self) -> None:
        """Enqueue one job and wait for its result."""
        self._app.call(TASK).result(timeout=ANSWER_S)

    def burst(self, count: int) -> float:
        """Enqueue ``count`` jobs, wait until all are done, return the seconds."""
        before = self._store.zcard(FINISHED)
        specs = [build(JobOptions(), task=TASK) for _ in range(count)]
        start = time.perf_counter()
        self._app.client().enqueue(specs)
        wait_until(lambda: self._store.zcard(FINISHED) >= before + count, "our burst", BURST_S)
        return time.perf_counter() - start

    def kill(self, count: int) -> dict[str, object]:
        """Kill running jobs; return the times of the calls, the times that the receipts tell, and the survivors."""
        walls, totals, survivors = [], [], 0
        for _ in range(count):
            job = self._app.command(["sh", "-c", "sleep 60 & setsid sleep 60 & echo up; wait"])
            next(job.logs(follow=True))
            start = time.perf_counter()
            receipt = job.kill()
            walls.append(1000 * (time.perf_counter() - start))
            totals.append(receipt.total_ms)
            if receipt.outcome != "killed" or receipt.survivors is None:
                raise SystemExit(f"a kill was not confirmed: {receipt}")
            survivors += receipt.survivors
        return {"wall_ms": walls, "total_ms": totals, "survivors": survivors}

    def pss(self, _: int) -> dict[str, object]:
        """Return the proportional memory of the agent and all processes below it."""
        (node,) = self._fleet.json("nodes")
        return {"kib": sum(pss_kib(pid) for pid in tree_of([int(str(node["pid"]))])), "level": node["level"]}


@contextmanager
def running(slots: int) -> Iterator[Side]:
    """Yield a fleet of one node with so many slots."""
    with (
        fleets.running("--slots", str(slots), "--import", f"bench_tasks:{JOBS}") as fleet,
        App(home=fleet.home) as app,
        redis.Redis.from_url(json.loads((fleet.home / "client.json").read_text())["redis_url"]) as store,
    ):
        yield Side(fleet, app, store)
