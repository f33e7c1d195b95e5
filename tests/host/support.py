"""Helpers of the host tests: processes to be put into groups, and code run apart or as another user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["ROOT", "STRANGER", "apart", "join", "needs_root", "sleeper", "sleepers"]

#: Of this project, so that code run apart finds it.
ROOT = Path(__file__).resolve().parents[2]
#: An ordinary uid without an account.
STRANGER = 65_533
RUN_TIMEOUT_S = 30

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: CAP_SYS_ADMIN on the host")


@contextmanager
def sleepers(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield that many processes that only wait; they are gone afterwards."""
    found = [subprocess.Popen(["sleep", "60"]) for _ in range(count)]
    try:
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield one process that only waits; it is gone afterwards."""
    with sleepers(1) as found:
        yield found[0]


def join(paths: Iterable[str | Path], pid: int) -> None:
    """Put a process into groups, by their ``cgroup.procs`` files."""
    for path in paths:
        Path(path).write_text(str(pid))


def apart(code: str, *arguments: str, user: int | None = None) -> str:
    """Run Python code in a process of its own, as another user if asked, and return what it printed.

    The code finds the project on ``sys.path``; a failure shows what it wrote to stderr.
    """
    ids: dict[str, object] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        cwd="/",
        **ids,  # type: ignore[call-overload]  # the three words subprocess takes, or none
    )
    if done.returncode != 0:
        raise AssertionError(f"code run apart ended with {done.returncode}: {done.stderr[-2000:]}")
    return str(done.stdout)
