"""Isolated jobs against `rq worker-pool -n 2` (fork, no isolation), in one run on this machine. Run by `make bench`.

Prints a table, and exits 1 when a target is missed. Needs no network and takes less than three minutes.
"""

from __future__ import annotations

import compileall
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

import redis  # noqa: E402 - the project's root comes first
from rq import Queue  # noqa: E402 - as above

from runner import App  # noqa: E402 - as above
from runner.request import JobOptions, build  # noqa: E402 - as above
from tests.bench.jobs import bench_stock  # noqa: E402 - as above
from tests.support import fleet as fleets  # noqa: E402 - as above
from tests.support import valkey as stores  # noqa: E402 - as above
from tests.support.fleet import Fleet  # noqa: E402 - as above
from tests.support.wait import wait_until  # noqa: E402 - as above

JOBS = HERE / "jobs"
WORKERS = 2
#: Slots of the throughput run: slots wait for round trips, cores do not (two slots are measured beside it).
SLOTS = 8
OUR_BURST = 600
STOCK_BURST = 150
WARM_UP = 20
LATENCIES = 150
KILLS = 20
BURST_S = 60.0
THROUGHPUT_TARGET = 3.0
LATENCY_TARGET = 0.7


@dataclass(frozen=True, slots=True)
class Numbers:
    """One side: jobs a second in a burst, and the time from enqueue to result of single jobs, in milliseconds."""

    jobs_per_s: float
    latencies_ms: Sequence[float]

    @property
    def p50(self) -> float:
        return statistics.median(self.latencies_ms)

    @property
    def p99(self) -> float:
        return sorted(self.latencies_ms)[int(0.99 * (len(self.latencies_ms) - 1))]


def main() -> int:
    """Measure both sides, print the table, return the exit code."""
    # Stock rq compiles its job's module once and keeps the result; a node's jobs can write none, so it is made here.
    compileall.compile_dir(JOBS, quiet=2)
    stock = measure_stock()
    with fleets.running("--slots", str(SLOTS), "--import", f"bench_tasks:{JOBS}") as fleet, App(home=fleet.home) as app:
        wide = burst(app, fleet)
    with (
        fleets.running("--slots", str(WORKERS), "--import", f"bench_tasks:{JOBS}") as fleet,
        App(home=fleet.home) as app,
    ):
        idle_mib = memory_mib(fleet)
        ours = measure_ours(app, fleet)
        kills = [kill_ms(app) for _ in range(KILLS)]
        spawns = spawn_ms(fleet)
    speed = wide / stock.jobs_per_s
    narrow = ours.jobs_per_s / stock.jobs_per_s
    delay = ours.p50 / stock.p50
    rows = [
        (f"no-op jobs/s, {SLOTS} slots", f"{wide:.0f}", f"{stock.jobs_per_s:.0f}", f"{speed:.1f}x", ">= 3x"),
        (f"no-op jobs/s, {WORKERS} slots", f"{ours.jobs_per_s:.0f}", f"{stock.jobs_per_s:.0f}", f"{narrow:.1f}x", ""),
        ("enqueue to result, p50 ms", f"{ours.p50:.1f}", f"{stock.p50:.1f}", f"{delay:.2f}x", "<= 0.7x"),
        ("enqueue to result, p99 ms", f"{ours.p99:.1f}", f"{stock.p99:.1f}", f"{ours.p99 / stock.p99:.2f}x", ""),
        ("kill to receipt, p50 ms", f"{statistics.median(wall for wall, _ in kills):.1f}", "", "", ""),
        ("  as its receipt says, p50 ms", f"{statistics.median(total for _, total in kills):.1f}", "", "", ""),
        ("claim to start, p50 ms", f"{statistics.median(spawns):.1f}", "", "", ""),
        ("memory of an idle node, MiB (PSS)", f"{idle_mib:.0f}", "", "", ""),
    ]
    print(f"isolated jobs against {WORKERS} workers of rq worker-pool (fork, no isolation)")
    for row in (("", "ringfence", "stock rq", "ratio", "target"), *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, (34, 10, 9, 7, 8), strict=True)).rstrip())
    missed = speed < THROUGHPUT_TARGET or delay > LATENCY_TARGET
    print("a target is missed" if missed else "both targets are met")
    return int(missed)


def measure_stock() -> Numbers:
    """Return the numbers of stock RQ on a store without persistence."""
    with stores.running() as store, store.client() as client, worker_pool(store.url):
        queue = Queue(connection=client)

        def one() -> None:
            job = queue.enqueue(bench_stock.noop)
            if job.latest_result(timeout=30) is None:
                raise SystemExit("stock rq gave no result in 30 s")

        for _ in range(WARM_UP):
            one()
        latencies = [timed_ms(one) for _ in range(LATENCIES)]
        before = client.zcard("rq:finished:default")
        start = time.perf_counter()
        for _ in range(STOCK_BURST):
            queue.enqueue(bench_stock.noop)
        wait_until(lambda: client.zcard("rq:finished:default") >= before + STOCK_BURST, "stock's burst", BURST_S)
        return Numbers(STOCK_BURST / (time.perf_counter() - start), latencies)


@contextmanager
def worker_pool(url: str) -> Iterator[None]:
    """Run `rq worker-pool` while the block runs."""
    words = [str(Path(sys.executable).with_name("rq")), "worker-pool", "-n", str(WORKERS), "-u", url, "-q"]
    with subprocess.Popen([*words, "--path", str(ROOT)], cwd=ROOT, stderr=subprocess.DEVNULL) as pool:
        try:
            yield
        finally:
            pool.terminate()


def measure_ours(app: App, fleet: Fleet) -> Numbers:
    """Return the numbers of isolated jobs on the embedded store, which keeps its data."""

    def one() -> None:
        app.call("bench_tasks:noop").result(timeout=30)

    for _ in range(WARM_UP):
        one()
    latencies = [timed_ms(one) for _ in range(LATENCIES)]
    return Numbers(burst(app, fleet), latencies)


def burst(app: App, fleet: Fleet) -> float:
    """Return the jobs a second of one burst, after a small one that warms the moulds up."""
    url = json.loads((fleet.home / "client.json").read_text())["redis_url"]
    with redis.Redis.from_url(url) as client:
        for count in (WARM_UP, OUR_BURST):
            before = client.zcard("rq:finished:agents")
            specs = [build(JobOptions(), task="bench_tasks:noop") for _ in range(count)]
            start = time.perf_counter()
            app.client().enqueue(specs)
            wait_until(lambda: client.zcard("rq:finished:agents") >= before + count, "our burst", BURST_S)  # noqa: B023 - called within its turn
        return OUR_BURST / (time.perf_counter() - start)


def kill_ms(app: App) -> tuple[float, float]:
    """Kill one running job; return the time of the call and the time that the receipt tells."""
    job = app.command(["sh", "-c", "sleep 60 & sleep 60 & echo up; wait"])
    next(job.logs(follow=True))
    start = time.perf_counter()
    receipt = job.kill()
    wall = 1000 * (time.perf_counter() - start)
    if receipt.outcome != "killed" or receipt.survivors != 0:
        raise SystemExit(f"a kill was not confirmed: {receipt}")
    return wall, receipt.total_ms


def spawn_ms(fleet: Fleet) -> list[float]:
    """Return the times from claim to start, as the events tell them."""
    claimed: dict[object, float] = {}
    found = []
    for event in fleet.json_lines("events"):
        at = stamp_ms(str(event["at"]))
        if event["type"] == "job.claimed":
            claimed[event["job"]] = at
        elif event["type"] == "job.started" and event["job"] in claimed:
            found.append(at - claimed[event["job"]])
    return found


def memory_mib(fleet: Fleet) -> float:
    """Return the proportional memory of the agent and all processes below it."""
    agents = {int(str(node["pid"])) for node in fleet.json("nodes")}
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(") ", 1)[1].split()[1])
            except OSError:
                continue
    tree = set(agents)
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(pss_kib(pid) for pid in tree) / 1024


def pss_kib(pid: int) -> int:
    """Return the proportional memory of one process, 0 if it is gone or hides it."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def timed_ms(action: Callable[[], None]) -> float:
    """Return how long ``action`` takes."""
    start = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start)


def stamp_ms(text: str) -> float:
    """Return an ISO time in milliseconds."""
    return datetime.fromisoformat(text).timestamp() * 1000


if __name__ == "__main__":
    sys.exit(main())
