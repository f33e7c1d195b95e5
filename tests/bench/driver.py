"""One side of the bench as a process of its own: starts what it measures, then obeys one order a line.

Started by sides.py as `PYTHON driver.py SIDE [SLOTS]`, also under another user or with another interpreter (celery's).
Orders on standard input, one answer as JSON each: `burst N`, `latency N`, `kill N`, `pss`, `quit`. The first line out
is {"roots": [pid, ...]}: the processes whose trees do the work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE / "jobs")]


class Side(Protocol):
    """What can be asked of a side."""

    roots: list[int]

    def one(self) -> None:
        """Enqueue one job and wait for its result."""

    def burst(self, count: int) -> float:
        """Enqueue ``count`` jobs, wait until all are done, return the seconds."""


def main(words: list[str]) -> None:
    """Serve orders until `quit` or the end of input."""
    with ExitStack() as stack:
        side = stack.enter_context(SIDES[words[0]](*words[1:]))
        for _ in range(20):
            side.one()
        _say({"roots": side.roots})
        for line in sys.stdin:
            order, _, count = line.strip().partition(" ")
            if order == "quit":
                return
            _say(_obey(side, order, int(count or 0)))


def _obey(side: Side, order: str, count: int) -> dict[str, object]:
    if order == "burst":
        return {"s": side.burst(count)}
    if order == "latency":
        return {"ms": [_timed_ms(side) for _ in range(count)]}
    return dict(getattr(side, order)(count))


def _timed_ms(side: Side) -> float:
    start = time.perf_counter()
    side.one()
    return 1000 * (time.perf_counter() - start)


def _say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


@contextmanager
def ringfence(slots: str, reuse: str = "0") -> Iterator[Side]:
    """Isolated jobs of `ringfence up`, on its embedded store, which keeps its data."""
    from tests.bench import isolated

    with isolated.running(int(slots), int(reuse)) as side:
        yield side


@contextmanager
def rq(kind: str) -> Iterator[Side]:
    """Stock `rq worker-pool -n 2`: Worker forks a process per job, SimpleWorker runs it in its own."""
    from tests.bench import stock

    with stock.running(kind) as side:
        yield side


@contextmanager
def celery(socket: str) -> Iterator[Side]:
    """`celery worker --pool prefork -c 2` on the store whose socket is given; needs celery and redis only."""
    with import_module("bench_celery").running(socket) as side:
        yield side


SIDES: dict[str, Callable[..., AbstractContextManager[Side]]] = {"ringfence": ringfence, "rq": rq, "celery": celery}


if __name__ == "__main__":
    main(sys.argv[1:])
