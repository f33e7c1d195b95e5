"""Tasks that change the interpreter they run in, and tasks that look whether an earlier one did."""

from __future__ import annotations

import builtins
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

from runner import App

app = App()


@app.task()
def look() -> dict[str, object]:
    """Return what a spoilt interpreter would show."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "random": [random.random(), random.SystemRandom().random(), uuid.uuid4().hex, tempfile.mktemp()],  # noqa: S306 - names
        "names": sorted(set(dir(builtins)) - {"_"}),
        "modules": sorted(name for name in sys.modules if name.startswith("left_") and name != __name__),
        "path": list(sys.path),
        "environment": "LEFT" in os.environ,
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "threads": threading.active_count(),
        "filters": len(warnings.filters),
        "handler": str(signal.getsignal(signal.SIGUSR1)),
        "thresholds": list(gc.get_threshold()),
        "audit": _audited(),
        "shared": [line for line in maps if line.split()[1][1] == "w" and line.split()[1][3] == "s"],
    }


@app.task()
def spoil() -> dict[str, object]:
    """Change all of it; return what `look` sees then."""
    vars(builtins)["left_name"] = 1
    sys.modules["left_module"] = sys
    sys.path.insert(0, "/work/left")
    os.environ["LEFT"] = "1"
    sys.setrecursionlimit(5000)
    sys.setswitchinterval(0.5)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    warnings.simplefilter("error", UserWarning)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    gc.set_threshold(1, 1, 1)
    sys.addaudithook(lambda name, _: _heard.append(name) if name == "left.audit" else None)
    random.seed(1)
    return look.function()


_heard: list[str] = []


def _audited() -> bool:
    sys.audit("left.audit")
    return bool(_heard)


@app.task()
def carry(word: str, first: str, earlier: list[str], own: list[str]) -> list[int]:
    """Hold ``word``; count what stands behind ``first`` in this process's writable memory: of earlier jobs, and own."""
    held = [word]
    found = {second.encode(): 0 for second in (*earlier, *own)}
    start, length = first.encode(), len(own[0])
    for data in _writable():
        at = data.find(start)
        while at >= 0:
            second = data[at + len(start) : at + len(start) + length]
            if second in found:
                found[second] += 1
            at = data.find(start, at + 1)
    assert held
    return [sum(found[second.encode()] for second in seconds) for seconds in (earlier, own)]


def _writable() -> Iterator[bytes]:
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.readlines():
            place, rights = line.split()[:2]
            if rights.startswith("rw"):
                begin, end = (int(word, 16) for word in place.split("-"))
                memory.seek(begin)
                yield memory.read(end - begin)
