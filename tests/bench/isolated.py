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
from tests.bench.load import own_cpu_s, pss_kib, tree_of
from tests.support import fleet as fleets
from tests.support.fleet import Fleet
from tests.support.wait import wait_until

JOBS = Path(__file__).resolve().parent / "jobs"
TASK = "bench_tasks:noop"
ANSWER_S = 30.0
BURST_S = 90.0
FINISHED, QUEUE = "rq:finished:agents", "rq:queue:agents"


class Side:
    """A running fleet and its client."""

    def __init__(self, fleet: Fleet, app: App, store: redis.Redis, options: JobOptions) -> None:
        self._fleet = fleet
        self._app = app
        self._store = store
        self._options = options
        self.roots = [fleet.process.pid]

    def one(self) -> None:
        """Enqueue one job and wait for its result."""
        self._app.call(TASK, **self._options).result(timeout=ANSWER_S)

    def burst(self, count: int) -> float:
        """Enqueue ``count`` jobs, wait until all are done, return the seconds."""
        before = self._store.zcard(FINISHED)
        specs = [build(self._options, task=TASK) for _ in range(count)]
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

    def costs(self, count: int) -> dict[str, object]:
        """Have ``count`` jobs run; return what agent and store spent on each, and how often the store was called."""
        (node,) = self._fleet.json("nodes")
        agent = int(str(node["pid"]))
        self._app.client().enqueue([build(self._options, task=TASK) for _ in range(count)])
        # From here on: what enqueueing cost the store is not counted, though the first of the jobs run by then.
        before, waiting = self._spent(agent), self._store.llen(QUEUE)
        wait_until(lambda: self._store.llen(QUEUE) == 0, "our burst", BURST_S)
        after = self._spent(agent)
        names = ("agent_ms", "store_ms", "calls")
        return {name: (late - early) / waiting for name, early, late in zip(names, before, after, strict=True)}

    def _spent(self, agent: int) -> tuple[float, float, float]:
        spent, stats = self._store.info("cpu"), self._store.info("commandstats")
        store_s = spent["used_cpu_user_main_thread"] + spent["used_cpu_sys_main_thread"]
        calls = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))
        return 1000 * own_cpu_s(agent), 1000 * store_s, calls

    def pss(self, _: int) -> dict[str, object]:
        """Return the proportional memory of the agent and all processes below it."""
        (node,) = self._fleet.json("nodes")
        return {"kib": sum(pss_kib(pid) for pid in tree_of([int(str(node["pid"]))])), "level": node["level"]}


@contextmanager
def running(slots: int, reuse: int = 0) -> Iterator[Side]:
    """Yield a fleet of one node with so many slots. ``reuse``: one worker runs so many jobs; 0: each has its own."""
    with (
        fleets.running("--slots", str(slots), "--import", f"bench_tasks:{JOBS}") as fleet,
        App(home=fleet.home) as app,
        redis.Redis.from_url(json.loads((fleet.home / "client.json").read_text())["redis_url"]) as store,
    ):
        yield Side(fleet, app, store, JobOptions(reuse=reuse) if reuse else JobOptions())
