"""Starting processes without a queue, two at a time: what other ways of running a job cost by themselves. No isolation
but bwrap's. Used by main.py.
"""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

COUNT = 60
NOTHING = [sys.executable, "-I", "-S", "-c", "pass"]
#: A view and namespaces of its own, like a job's of ours.
BWRAP = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-all")
TIMEOUT_S = 30.0


def rates() -> dict[str, float]:
    """Return starts per second by name; what is not installed is left out."""
    found = {"subprocess (python -c pass)": _rate(_spawn), "multiprocessing (fork)": _rate(_fork)}
    if (bwrap := shutil.which("bwrap")) is not None:
        words = [bwrap, *BWRAP, "--die-with-parent", *NOTHING]
        found["bwrap (python -c pass)"] = _rate(lambda: _run(words))
    return found


def _rate(once: Callable[[], object]) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(once) for _ in range(COUNT)]:
            done.result(TIMEOUT_S)
    return COUNT / (time.perf_counter() - start)


def _spawn() -> None:
    _run(NOTHING)


def _run(words: list[str]) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)


def _fork() -> None:
    process = multiprocessing.get_context("fork").Process(target=_nothing)
    process.start()
    process.join(TIMEOUT_S)


def _nothing() -> None:
    """Do nothing, in a process of its own."""
