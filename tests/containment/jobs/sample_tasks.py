"""Tasks that the containment tests run inside a sandbox."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

from runner import App

app = App()


@app.task()
def add(left: int, right: int) -> int:
    """Return the sum, and say so."""
    print("adding", left, right)  # noqa: T201 - its output is what the test looks at
    return left + right


@app.task()
def fail(message: str) -> None:
    """Raise."""
    raise ValueError(message)


@app.task()
def leave() -> None:
    """Try to end the process past the result."""
    sys.exit(7)


@app.task()
def large(size: int) -> str:
    """Return a text of ``size`` characters."""
    return "x" * size


@app.task()
def odd() -> object:
    """Return what has no form on the wire."""
    return {1, 2}


def _double(number: int) -> int:
    return number * 2


@app.task()
def many_ways() -> dict[str, object]:
    """Use threads, a subprocess and a process pool."""
    seen: list[int] = []
    threads = [threading.Thread(target=seen.append, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = subprocess.run(["sh", "-c", "echo $RINGFENCE_JOB"], capture_output=True, text=True, check=True).stdout
    with multiprocessing.get_context("fork").Pool(2) as pool:
        doubled = pool.map(_double, [1, 2, 3])
    return {
        "threads": sorted(seen),
        "said": said.strip(),
        "doubled": doubled,
        "pid": os.getpid(),
        "native": threading.get_native_id(),
        "cwd": os.getcwd(),
        "modules": sorted(name for name in ("rq", "redis", "pydantic", "nacl") if name in sys.modules),
    }
