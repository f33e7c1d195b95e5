"""What a no-op job costs the queue: Ringfence, stock RQ, Celery and Dramatiq, in one run. Run by `make bench-peers`.

Every side has a store of its own. Jobs are enqueued while its workers stand still; then these run them all, and what
the store and the workers did meanwhile is divided by the jobs. "Round trips" are the reads that the store made of its
clients' sockets (INFO stats), so a pipeline is one, for every side alike.

    python tests/bench/peers.py PYTHON      the interpreter that has celery and dramatiq
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

import redis  # noqa: E402 - the project's root comes first
from rq import Queue  # noqa: E402 - as above

from runner import App, request  # noqa: E402 - as above
from tests.bench import load  # noqa: E402 - as above
from tests.bench.jobs import bench_stock  # noqa: E402 - as above
from tests.support import fleet as fleets  # noqa: E402 - as above
from tests.support import valkey as stores  # noqa: E402 - as above
from tests.support.wait import pause, wait_until  # noqa: E402 - as above

SIDE = HERE / "peers_side.py"
TASK = "bench_tasks:noop"
JOBS, ENQUEUED, ROUNDS = 400, 300, 5
BURST_S = 120.0
READY_S, STOP_S = 30.0, 20.0


@dataclass(slots=True)
class Side:
    """One contender.

    ``one_by_one(n)``, ``batched(n)``: enqueue so many and return the seconds; ``done``: how many ended.
    ``workers``: the processes whose trees do the work; ``agents``: those of them that are the queue's own.
    """

    name: str
    client: redis.Redis
    workers: list[int]
    agents: list[int]
    one_by_one: Callable[[int], float]
    done: Callable[[], int]
    batched: Callable[[int], float] | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What one job cost."""

    trips: float
    commands: float
    queue_ms: float
    all_ms: float
    jobs_per_s: float


def main() -> int:
    """Measure, print, return the exit code."""
    python = sys.argv[1]
    with ExitStack() as stack:
        sides = [stack.enter_context(each) for each in (ringfence(), rq(), celery(python), dramatiq(python))]
        for side in sides:
            burst(side, 20)
        costs = {side.name: [burst(side, JOBS) for _ in range(ROUNDS)] for side in sides}
        rates = enqueueing(sides)
    return report(costs, rates)


def burst(side: Side, count: int) -> Cost:
    """Have so many jobs run that were enqueued before the workers could look."""
    before = side.done()
    with stopped(side):
        (side.batched or side.one_by_one)(count)
        reads, commands = stats(side.client)
    queue_s, all_s = (sum(map(load.own_cpu_s, side.agents)), load.tree_cpu_s(side.workers))
    begun, polls = time.perf_counter(), 0
    while side.done() - before < count:
        polls += 1
        if time.perf_counter() - begun > BURST_S:
            raise SystemExit(f"{side.name} did not run {count} jobs in {BURST_S:g} s")
        pause(0.02)
    took_s = time.perf_counter() - begun
    late_reads, late_commands = stats(side.client)
    mine = polls + 3
    return Cost(
        (late_reads - reads - mine) / count,
        (late_commands - commands - mine) / count,
        1000 * (sum(map(load.own_cpu_s, side.agents)) - queue_s) / count,
        1000 * (load.tree_cpu_s(side.workers) - all_s) / count,
        count / took_s,
    )


def enqueueing(sides: list[Side]) -> dict[str, list[float]]:
    """Return jobs enqueued a second, side by side in each round, while nobody works."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(stopped(side))
        for _ in range(ROUNDS):
            for side in sides:
                found.setdefault(side.name, []).append(ENQUEUED / side.one_by_one(ENQUEUED))
                if side.batched is not None:
                    found.setdefault(f"{side.name}, batches", []).append(ENQUEUED / side.batched(ENQUEUED))
    return found


@contextmanager
def stopped(side: Side) -> Iterator[None]:
    """Have the workers stand still."""
    pids = load.tree_of(side.agents)
    send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pids, signal.SIGCONT)


def send(pids: set[int], number: signal.Signals) -> None:
    """Signal processes, those that are gone left out."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def stats(client: redis.Redis) -> tuple[int, int]:
    """Return the reads of all clients' sockets, and the commands that ran, those of scripts included."""
    found = cast("dict[str, int]", client.info("stats"))
    calls = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    return found["total_reads_processed"], sum(each["calls"] for each in calls.values())


@contextmanager
def ringfence() -> Iterator[Side]:
    """Isolated jobs on 8 slots: signatures, leases, events and logs on, the store keeps its data."""
    options = ("--slots", "8", "--import", f"bench_tasks:{HERE / 'jobs'}")
    with fleets.running(*options) as fleet, App(home=fleet.home) as app:
        client = app.client()._redis
        (node,) = fleet.json("nodes")

        def one_by_one(count: int) -> float:
            return timed(lambda: [app.call(TASK) for _ in range(count)])

        def batched(count: int) -> float:
            def send_all() -> None:
                app.client().enqueue([request.build({}, task=TASK) for _ in range(count)])

            return timed(send_all)

        agent = int(str(node["pid"]))
        yield Side(
            "ringfence", client, [agent], [agent], one_by_one, lambda: client.zcard("rq:finished:agents"), batched
        )


@contextmanager
def rq() -> Iterator[Side]:
    """Stock `rq worker-pool -n 2`, a process per job, without isolation or signatures."""
    program = str(Path(sys.executable).with_name("rq"))
    with stores.running(stores.DURABLE) as store, store.client() as client:
        queue = Queue(connection=client)
        words = [program, "worker-pool", "-n", "2", "-u", store.url, "-q", "--path", str(HERE.parent.parent)]
        with worker(words, {}) as pid:
            wait_until(lambda: client.scard("rq:workers") >= 2, "rq's workers", READY_S)

            def one_by_one(count: int) -> float:
                return timed(lambda: [queue.enqueue(bench_stock.noop) for _ in range(count)])

            def batched(count: int) -> float:
                datas = [Queue.prepare_data(bench_stock.noop) for _ in range(count)]
                return timed(lambda: queue.enqueue_many(datas))

            yield Side("rq", client, [pid], [pid], one_by_one, lambda: client.zcard("rq:finished:default"), batched)


@contextmanager
def celery(python: str) -> Iterator[Side]:
    """`celery worker --pool prefork -c 2`, processes reused, results kept."""
    words = [python, "-m", "celery", "-A", "peers_side", "worker", "--pool", "prefork", "-c", "2", "-l", "ERROR"]
    with foreign(
        "celery", python, [*words, "--without-gossip", "--without-mingle"], re.compile(b"celery-task-meta-")
    ) as side:
        yield side


@contextmanager
def dramatiq(python: str) -> Iterator[Side]:
    """`dramatiq` with two processes of four threads, results kept."""
    words = [python, "-m", "dramatiq", "peers_side", "--processes", "2", "--threads", "4", "--path", str(HERE)]
    with foreign("dramatiq", python, words, re.compile(b"[0-9a-f]{32}$")) as side:
        yield side


@contextmanager
def foreign(name: str, python: str, words: list[str], results: re.Pattern[bytes]) -> Iterator[Side]:
    """A worker and a client of another environment; ``results``: how the keys of results begin."""
    with stores.running(stores.DURABLE) as store, store.client() as client:
        env = {"PEERS_SOCKET": str(store.socket), "PEERS_SIDE": name}
        with worker(words, env) as pid, asked([python, str(SIDE)], env) as one_by_one:

            def done() -> int:
                return sum(results.match(key) is not None for key in cast("list[bytes]", client.keys()))

            one_by_one(1)
            wait_until(done, f"{name} to run its first job", READY_S)
            yield Side(name, client, [pid], [pid], one_by_one, done)


@contextmanager
def worker(words: list[str], env: dict[str, str]) -> Iterator[int]:
    """Yield the pid of a worker."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        words, cwd=HERE, env={**os.environ, **env}, stdin=quiet, stdout=quiet, stderr=quiet
    ) as process:
        try:
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                send(load.tree_of([process.pid]), signal.SIGKILL)


@contextmanager
def asked(words: list[str], env: dict[str, str]) -> Iterator[Callable[[int], float]]:
    """Yield what has a client enqueue so many jobs."""
    with subprocess.Popen(
        words, cwd=HERE, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def one_by_one(count: int) -> float:
            source, sink = cast("IO[str]", process.stdout), cast("IO[str]", process.stdin)
            sink.write(f"{count}\n")
            sink.flush()
            return float(source.readline())

        yield one_by_one
        cast("IO[str]", process.stdin).close()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that it took."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def report(costs: dict[str, list[Cost]], rates: dict[str, list[float]]) -> int:
    """Print the tables; the exit code is 1 if a target is missed."""
    print(f"medians of {ROUNDS} rounds of {JOBS} no-op jobs, {time.strftime('%Y-%m-%d')}")
    print(f"{'':22}{'round trips':>12}{'commands':>10}{'workers, ms':>13}{'jobs/s':>9}   a job")
    for name, found in costs.items():
        print(f"{name:22}", end="")
        for what, wide, digits in (("trips", 12, 2), ("commands", 10, 1), ("all_ms", 13, 2), ("jobs_per_s", 9, 0)):
            print(f"{statistics.median(getattr(cost, what) for cost in found):{wide}.{digits}f}", end="")
        print()
    for name, each in rates.items():
        print(f"{'enqueued, ' + name:34}{statistics.median(each):8.0f} /s")
    trips = statistics.median(each.trips for each in costs["ringfence"])
    agent_ms = statistics.median(each.queue_ms for each in costs["ringfence"])
    single = ratio(rates["ringfence"], rates["rq"])
    batches = ratio(rates["ringfence, batches"], rates["rq"])
    rows = (
        ("round trips a job", trips, "<=", 1.0),
        ("processor time of the agent a job, ms", agent_ms, "<=", 0.3),
        ("signed enqueue / rq.enqueue, one by one", single, ">=", 1.5),
        ("signed batches / rq.enqueue", batches, ">=", 4.0),
        ("signed batches / rq.enqueue_many", ratio(rates["ringfence, batches"], rates["rq, batches"]), "", 0.0),
    )
    missed = 0
    for what, value, sign, bound in rows:
        bad = bool(sign) and (value > bound if sign == "<=" else value < bound)
        missed += bad
        print(f"{what:44}{value:8.2f}  {f'{sign} {bound:g}' if sign else '':8}{'MISSED' if bad else ''}".rstrip())
    return int(missed > 0)


def ratio(mine: list[float], theirs: list[float]) -> float:
    """Return the median ratio within a round."""
    return statistics.median(one / other for one, other in zip(mine, theirs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
