"""Isolated jobs against stock RQ and celery, in one run on this machine. Run by `make bench`.

Every side is started once; then rounds follow, in which each side gets one burst and some single jobs. A round in which
others used the processors does not count. Prints medians, and exits 1 when a target is missed. Needs no network.

    python tests/bench/main.py [--rounds N]
"""

from __future__ import annotations

import argparse
import compileall
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.bench import bare, calling, enqueued, load, moulds, proxied, sides, vaulted  # noqa: E402 - the project's root comes first
from tests.bench.sides import Burst, Side  # noqa: E402 - as above
from tests.support import valkey as stores  # noqa: E402 - as above

ROUNDS = 4
#: Rounds are repeated at most so often, and for so long, until ROUNDS of them are undisturbed.
MOST_ROUNDS = 10
LONGEST_S = 150.0
#: Least share of the busy time that is this bench's own, in a round that counts.
OWN_SHARE = 0.85
SINGLES = 25
KILLS = 20
WIDE, NARROW, STOCK, SIMPLE, CELERY, ORDINARY = "8 slots", "2 slots", "rq fork", "rq simple", "celery", "8 slots, B"
#: How many jobs share a worker on the side that reuses them.
REUSE = 100
REUSED = f"2 slots, reuse={REUSE}"
JOBS = {WIDE: 600, NARROW: 400, STOCK: 120, SIMPLE: 300, CELERY: 600, ORDINARY: 600, REUSED: 1500}
JOB_UIDS = (1_900_000_000, 1000)


@dataclass(slots=True)
class Round:
    """One round: what each side did, and the share of the busy time that was ours."""

    bursts: dict[str, Burst] = field(default_factory=dict)
    singles: dict[str, list[float]] = field(default_factory=dict)
    own_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``bound``: ("<=" or ">=", number) that the value must keep."""

    what: str
    value: float | None
    unit: str = ""
    bound: tuple[str, float] | None = None
    note: str = ""

    @property
    def missed(self) -> bool:
        """Whether there is a bound and the value breaks it."""
        if self.bound is None or self.value is None:
            return False
        return self.value > self.bound[1] if self.bound[0] == "<=" else self.value < self.bound[1]


def main() -> int:
    """Measure all sides, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description="Isolated jobs against stock RQ and celery, measured in one run.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"undisturbed rounds (default {ROUNDS})")
    wanted = parser.parse_args().rounds
    # Stock rq compiles its job's module once and keeps the result; a node's jobs can write none, so it is made here.
    compileall.compile_dir(HERE / "jobs", quiet=2)
    rows = [*_enqueued(), *_without_queue(), *_calls(), *_secrets(), *_vault()]
    with ExitStack() as stack:
        running = {name: stack.enter_context(each) for name, each in _contenders(stack).items()}
        rounds = _rounds(running, wanted)
        counted = [each for each in rounds if each.own_share >= OWN_SHARE]
        used = counted if len(counted) >= wanted else sorted(rounds, key=lambda each: -each.own_share)[:wanted]
        rows = [*_with_queue(used), *_alone(running), *rows]
    left = load.uids_running(*JOB_UIDS)
    rows.append(Row("processes of jobs left at the end", left, bound=("<=", 0)))
    return _print(rows, len(rounds), len(counted), wanted)


def _contenders(stack: ExitStack) -> dict[str, AbstractContextManager[Side]]:
    """Return every side that this machine can run, as context managers."""
    found: dict[str, AbstractContextManager[Side]] = {
        WIDE: sides.running(["ringfence", "8"]),
        NARROW: sides.running(["ringfence", "2"]),
        REUSED: sides.running(["ringfence", "2", str(REUSE)]),
        STOCK: sides.running(["rq", "Worker"]),
        SIMPLE: sides.running(["rq", "SimpleWorker"]),
    }
    if os.geteuid() == 0:
        found[ORDINARY] = sides.running(["ringfence", "8"], user=sides.ORDINARY_UID)
    if (python := sides.celery_python()) is not None:
        store = stack.enter_context(stores.running(stores.DURABLE))
        found[CELERY] = sides.running(["celery", str(store.socket)], python=python)
    return found


def _rounds(running: dict[str, Side], wanted: int) -> list[Round]:
    rounds: list[Round] = []
    until = time.monotonic() + LONGEST_S
    while sum(each.own_share >= OWN_SHARE for each in rounds) < wanted:
        if rounds and (len(rounds) >= max(wanted, MOST_ROUNDS) or time.monotonic() >= until):
            break
        rounds.append(_round(running))
        shown = "  ".join(f"{name} {burst.jobs_per_s:.0f}/s" for name, burst in rounds[-1].bursts.items())
        print(f"round {len(rounds)}: {shown}  (own share {rounds[-1].own_share:.2f})", file=sys.stderr)
    return rounds


def _round(running: dict[str, Side]) -> Round:
    found = Round()
    busy_s = own_s = 0.0
    for name, side in running.items():
        before = load.busy_s()
        found.bursts[name] = side.burst(JOBS[name])
        busy_s += load.busy_s() - before
        own_s += found.bursts[name].own_s
    for name in (NARROW, REUSED, STOCK, SIMPLE, CELERY):
        if name in running:
            found.singles[name] = running[name].latencies_ms(SINGLES)
    found.own_share = own_s / busy_s if busy_s else 0.0
    return found


def _with_queue(rounds: Sequence[Round]) -> list[Row]:
    def rate(name: str) -> float | None:
        return _median([each.bursts[name].jobs_per_s for each in rounds if name in each.bursts])

    def ratio(name: str, other: str) -> float | None:
        """Within a round, so that a machine that grows slower does not matter."""
        pairs = [each.bursts for each in rounds if name in each.bursts and other in each.bursts]
        return _median([pair[name].jobs_per_s / pair[other].jobs_per_s for pair in pairs])

    def cpu(name: str) -> float | None:
        return _median([each.bursts[name].cpu_ms for each in rounds if name in each.bursts])

    def single(name: str, rank: float = 0.5) -> float | None:
        values = sorted(value for each in rounds for value in each.singles.get(name, ()))
        return values[int(rank * (len(values) - 1))] if values else None

    absent = f"celery is not installed: set {sides.CELERY_VARIABLE} to an interpreter that has it, and redis"
    mine, stock = single(NARROW), single(STOCK)
    return [
        Row("isolated no-op jobs, 8 slots", rate(WIDE), "/s"),
        Row("isolated no-op jobs, 2 slots", rate(NARROW), "/s"),
        Row("isolated no-op jobs, 8 slots, ordinary user", rate(ORDINARY), "/s"),
        Row(f"isolated no-op jobs, {REUSED}", rate(REUSED), "/s"),
        Row("stock rq worker x 2 (fork, not isolated)", rate(STOCK), "/s"),
        Row("stock rq SimpleWorker x 2 (no process of its own)", rate(SIMPLE), "/s"),
        Row("celery prefork -c 2 (process reused)", rate(CELERY), "/s", note="" if rate(CELERY) else absent),
        Row("8 slots / stock fork", ratio(WIDE, STOCK), "x", (">=", 6.0)),
        Row("2 slots / stock fork", ratio(NARROW, STOCK), "x", (">=", 5.0)),
        Row(f"{REUSED} / stock fork", ratio(REUSED, STOCK), "x"),
        Row(f"{REUSED} / 2 slots", ratio(REUSED, NARROW), "x", (">=", 2.0)),
        Row("8 slots / celery", ratio(WIDE, CELERY), "x", (">=", 0.9)),
        Row("level B / level A, 8 slots", ratio(ORDINARY, WIDE), "x", (">=", 0.85)),
        Row("processor time a job, 8 slots, store included", cpu(WIDE), "ms", ("<=", 2.2)),
        Row(f"processor time a job, {REUSED}, store included", cpu(REUSED), "ms"),
        Row("processor time a job, stock fork, store included", cpu(STOCK), "ms"),
        Row("enqueue to result p50", mine, "ms"),
        Row("enqueue to result p99", single(NARROW, 0.99), "ms"),
        Row(f"enqueue to result p50, {REUSED}", single(REUSED), "ms"),
        Row("enqueue to result p50, stock fork", stock, "ms"),
        Row("enqueue to result p50, SimpleWorker", single(SIMPLE), "ms"),
        Row("enqueue to result p50, celery", single(CELERY), "ms"),
        Row("enqueue to result / stock fork, p50", mine / stock if mine and stock else None, "x", ("<=", 0.3)),
    ]


def _alone(running: dict[str, Side]) -> list[Row]:
    """Kills and memory of the fleets that stand."""
    killed = running[NARROW].ask(f"kill {KILLS}")
    costs = cast("dict[str, float]", running[WIDE].ask(f"costs {JOBS[WIDE]}"))
    wide, narrow = (cast("int", running[name].ask("pss")["kib"]) / 1024 for name in (WIDE, NARROW))
    return [
        Row("processor time a job, 8 slots, agent alone", costs["agent_ms"], "ms", ("<=", 0.3)),
        Row("processor time a job, 8 slots, store alone", costs["store_ms"], "ms"),
        Row("script calls a job, 8 slots", costs["calls"], bound=("<=", 1.0)),
        Row("kill to receipt p50", _median(cast("list[float]", killed["wall_ms"])), "ms"),
        Row("  as its receipt says", _median(cast("list[float]", killed["total_ms"])), "ms"),
        Row(f"survivors of {KILLS} kills", cast("int", killed["survivors"]), bound=("<=", 0)),
        Row("memory of an idle slot (PSS)", (wide - narrow) / 6, "MiB", ("<=", 6.0)),
        Row("memory of an idle node with 2 slots (PSS)", narrow, "MiB"),
    ]


def _enqueued() -> list[Row]:
    rates = enqueued.measure()
    return [
        Row("enqueue, signed, one by one", rates.single, "/s"),
        Row(f"enqueue, signed, batches of {enqueued.BATCH}", rates.batch, "/s"),
        Row("enqueue of stock rq, one by one", rates.stock, "/s"),
        Row("enqueue one by one / stock", rates.single_ratio, "x", (">=", 1.5)),
        Row("enqueue in batches / stock", rates.batch_ratio, "x", (">=", 4.0)),
    ]


def _secrets() -> list[Row]:
    cost = proxied.measure()
    return [
        Row("request to a host over TLS, p50", cost.direct_ms, "ms"),
        Row("  added by a proxied secret", cost.added_ms, "ms", ("<=", 0.5)),
        Row("stream from a host over TLS", cost.direct_mb_s, "MB/s"),
        Row("  with a proxied secret", cost.proxied_mb_s, "MB/s", (">=", 200.0)),
    ]


def _vault() -> list[Row]:
    found = vaulted.measure()
    agent = "" if found.sign_p50_ms else "ssh-agent, ssh-add and ssh-keygen are not installed"
    echo = "" if found.echo_per_s else f"no aiohttp: the extra `bench` has it, or set {vaulted.AIOHTTP_VARIABLE}"
    return [
        Row(f"get of a secret, {vaulted.IDLE} idle jobs beside", found.get_per_s, "/s", (">=", 2000.0)),
        Row("  p50", found.get_p50_ms, "ms"),
        Row("  p99", found.get_p99_ms, "ms", ("<=", 2.0)),
        Row("ed25519 signature of an ssh-agent, p50", found.sign_p50_ms, "ms", note=agent),
        Row("get / signature, p50", _ratio(found.get_p50_ms, found.sign_p50_ms), "x", ("<=", 1.0)),
        Row("list of a job's secrets", found.list_per_s, "/s"),
        Row("echo of aiohttp over a unix socket", found.echo_per_s, "/s", note=echo),
        Row("list / echo", _ratio(found.list_per_s, found.echo_per_s), "x", (">=", 1.7)),
        Row(f"{vaulted.IDLE} leases dead after their process", found.revoked_ms, "ms", ("<=", 50.0)),
        Row("redactor", found.redactor_mb_s, "MB/s", (">=", 40.0)),
        Row("memory of the broker (RSS)", found.rss_mib, "MiB", ("<=", 30.0)),
    ]


def _calls() -> list[Row]:
    found = calling.measure()
    return [
        Row("call of a job that does nothing, p50", found.ask_p50_ms, "ms", ("<=", 0.2)),
        Row("  p99", found.ask_p99_ms, "ms"),
        Row("write of 4 KiB, recorded, p50", found.write_p50_ms, "ms", ("<=", 0.5)),
        Row("  p99", found.write_p99_ms, "ms"),
        Row(f"recorded calls of {calling.SLOTS} jobs together", found.acts_per_s, "/s", (">=", 10_000.0)),
    ]


def _ratio(one: float, other: float | None) -> float | None:
    return one / other if other else None


def _without_queue() -> list[Row]:
    times = moulds.measure()
    return [
        Row("spawn to ready of a mould, p50", times.mould, "ms", ("<=", 8.0)),
        Row("grant to running, p50", times.start, "ms", ("<=", 2.0)),
        Row(f"{moulds.AT_ONCE} moulds and their jobs at once", times.many, "ms", ("<=", 120.0)),
        *(Row(f"starts without a queue: {name}", value, "/s") for name, value in bare.rates().items()),
    ]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _digits(value: float) -> int:
    return 0 if isinstance(value, int) or value >= 100 else 2


def _print(rows: Sequence[Row], made: int, counted: int, wanted: int) -> int:
    print(f"medians of {min(counted, wanted) or min(made, wanted)} rounds, {time.strftime('%Y-%m-%d')}")
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.{_digits(row.value)}f}{row.unit}"
        bound = "" if row.bound is None else f"{row.bound[0]} {row.bound[1]:g}{row.unit}"
        mark = "  MISSED" if row.missed else f"  {row.note}" if row.note else ""
        print(f"{row.what.ljust(52)}{value.rjust(10)}  {bound.ljust(10)}{mark}".rstrip())
    if counted < wanted:
        print(f"disturbed: others used the processors in {made - counted} of {made} rounds; the least disturbed count")
    missed = sum(row.missed for row in rows)
    print(f"{missed} targets missed" if missed else "all targets met")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
