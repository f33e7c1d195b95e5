"""The sides of the bench as this process sees them: each a driver.py that takes orders. Used by main.py.

Must never leave a driver behind, and never wait for one without a bound.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tests.bench import load

DRIVER = Path(__file__).with_name("driver.py")
ANSWER_S = 150.0
STOP_S = 60.0
#: The interpreter that has celery, if this one has none; else the one beside the first `celery` of the PATH.
CELERY_VARIABLE = "RINGFENCE_BENCH_CELERY"
ORDINARY_UID = 65_533


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst: jobs a second, and processor milliseconds a job of everything but the client."""

    jobs_per_s: float
    cpu_ms: float
    own_s: float


class Side:
    """A running driver."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.roots = cast("list[int]", self.ask(None)["roots"])

    def ask(self, order: str | None) -> dict[str, object]:
        """Send an order (None: only listen) and return the answer."""
        source, sink = self._process.stdout, self._process.stdin
        if source is None or sink is None:
            raise SystemExit("a driver has no pipes")
        if order is not None:
            sink.write(order + "\n")
            sink.flush()
        if not select.select([source], [], [], ANSWER_S)[0]:
            raise SystemExit(f"a side of the bench did not answer {order or 'at its start'} in {ANSWER_S:g} s")
        line = source.readline()
        if not line:
            raise SystemExit(f"a side of the bench ended at {order or 'its start'}; its words are above")
        return cast("dict[str, object]", json.loads(line))

    def burst(self, count: int) -> Burst:
        """Have ``count`` jobs run."""
        before, client = load.tree_cpu_s(self.roots), load.tree_cpu_s([self._process.pid])
        seconds = cast("float", self.ask(f"burst {count}")["s"])
        spent = load.tree_cpu_s(self.roots) - before
        # The driver is above its side's processes, so its tree holds theirs.
        own_s = max(spent, load.tree_cpu_s([self._process.pid]) - client)
        return Burst(count / seconds, 1000 * spent / count, own_s)

    def latencies_ms(self, count: int) -> list[float]:
        """Have ``count`` single jobs run, one after the other."""
        return cast("list[float]", self.ask(f"latency {count}")["ms"])


@contextmanager
def running(words: Sequence[str], *, python: str = sys.executable, user: int | None = None) -> Iterator[Side]:
    """Yield a side; ``user``: the uid it runs under."""
    before = [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
    process = subprocess.Popen(
        [*before, python, str(DRIVER), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Side(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def celery_python() -> str | None:
    """Return an interpreter that has celery, or None."""
    found = os.environ.get(CELERY_VARIABLE)
    if found is None and (program := shutil.which("celery")) is not None:
        found = str(Path(program).with_name("python"))
    for python in filter(None, (found, sys.executable)):
        if (
            subprocess.run(
                [python, "-c", "import celery, kombu.transport.redis"], capture_output=True, check=False
            ).returncode
            == 0
        ):
            return python
    return None
