"""What a call of a running job costs, in one run. Used by main.py; by itself it prints its figures.

The node records every acting call before it happens; its jobs may make 2,000 calls a second each.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runner import App
from tests.support import fleet as fleets

JOBS = Path(__file__).resolve().parent / "jobs"
SLOTS = 8
#: Fewer than an attempt may make at once, so that its rate is not what is measured.
CALLS = 400
SPAN_S = 2.0
BEGIN_S = 1.5
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Times of one job alone, in ms; calls a second of eight jobs together."""

    ask_p50_ms: float
    ask_p99_ms: float
    write_p50_ms: float
    write_p99_ms: float
    acts_per_s: float


def measure() -> Figures:
    """Start a node with eight slots, measure, end it."""
    with (
        fleets.running("--slots", str(SLOTS), "--import", f"bench_calls:{JOBS}") as fleet,
        App(home=fleet.home) as app,
    ):
        ask, write = (
            cast("list[float]", app.call(f"bench_calls:{name}", [CALLS]).result(timeout=ANSWER_S))
            for name in ("ask", "write")
        )
        begin_s = time.monotonic() + BEGIN_S
        jobs = [app.call("bench_calls:act", [begin_s + SPAN_S, begin_s]) for _ in range(SLOTS)]
        acts = sum(cast("int", job.result(timeout=ANSWER_S)) for job in jobs)
    return Figures(ask[0], ask[1], write[0], write[1], acts / SPAN_S)


if __name__ == "__main__":
    for name, value in asdict(measure()).items():
        print(f"{name}: {value:.3f}")
