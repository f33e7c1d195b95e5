"""Short ways to send a hostile program into a job or to run it outside, and to see what of it is left.

Called by the tests of this folder. Must never start a program without a bound on its processes and its time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from node_agent.containment.slots import Attempt
from tests.containment.rig import LEVEL, Rig
from tests.support.wait import await_until

__all__ = ["FULL", "REFUSED", "next_is_fine", "outside", "program", "quiet", "said", "still_held"]

PROGRAMS = Path(__file__).parent / "programs"
#: Set by `make endurance`: the long series instead of the short ones.
FULL = os.environ.get("RINGFENCE_TEST_FULL") == "1"
#: How a call that a job may not make is answered.
REFUSED = frozenset({"EPERM", "ENOSYS"})
OUTSIDE_S = 30.0


def program(name: str, *words: object) -> list[str]:
    """Return the command that runs a file of ``programs`` in a lean interpreter."""
    text = (PROGRAMS / f"{name}.py").read_text()
    return [sys.executable, "-I", "-S", "-B", "-c", text, *map(str, words)]


def outside(argv: list[str], *, uid: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program without any sandbox; as root under ``uid``, if one is given."""
    as_other = {"user": uid, "group": uid, "extra_groups": []} if uid is not None and LEVEL == "A" else {}
    return subprocess.run(  # type: ignore[call-overload, no-any-return] # the options of another user, or none
        argv, capture_output=True, text=True, timeout=OUTSIDE_S, check=False, stdin=subprocess.DEVNULL, **as_other
    )


async def said(attempt: Attempt, word: str = "up") -> str:
    """Wait until a job's output holds a line that starts with ``word``; return that line."""
    seen = b""

    def look() -> bool:
        nonlocal seen
        try:
            seen += os.read(attempt.stdout, 1 << 16)
        except BlockingIOError:
            return False
        return b"\n" in seen and word.encode() in seen

    await await_until(look, f"the job to say {word}", 30)
    return next(line for line in seen.decode().splitlines() if line.startswith(word))


def still_held(attempt: Attempt) -> bool:
    """Return whether any process still holds the job's output: true of every process of a tree that lives."""
    for fd in (attempt.stdout, attempt.stderr):
        try:
            while os.read(fd, 1 << 16):
                pass
        except BlockingIOError:
            return True
    return False


def quiet() -> bool:
    """Return whether, at this moment, hardly anybody but this process wants a CPU: only then a time says anything."""
    running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
    return int(running) <= max(2, (os.cpu_count() or 1) // 2)


async def next_is_fine(rig: Rig) -> bool:
    """Return whether the slot serves another job."""
    seen = await rig.run(["echo", "fine"])
    return seen.out == b"fine\n" and seen.verdict.code == 0
