"""Clocks that a test moves: an agent's wall clock, its CLOCK_MONOTONIC, and the time that the scripts see.

The agent's two live in a file that the test writes and the agent maps; the store's is a key that every script reads.
CLOCK_BOOTTIME is never moved: it is the one clock that leases rest on, and no host's jumps. A host that sleeps is an
agent that is stopped for as long and whose CLOCK_MONOTONIC is then set back by it.
Called by nursery.py (in agents) and the tests. Must never set the machine's clock.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from runner.scripts import loader

__all__ = ["SKEW", "Clock", "inject", "skewed"]

#: Seconds that the scripts add to Redis TIME.
SKEW = "chaos:skew_s"
_FORM = struct.Struct("<qq")
_TIME = "local time = call('TIME')"


class Clock:
    """The offsets of one node's clocks, in a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.wall_s = self.slept_s = 0.0
        self._write()

    def jump(self, wall_s: float) -> None:
        """Move the wall clock."""
        self.wall_s += wall_s
        self._write()

    def sleep(self, slept_s: float) -> None:
        """The node was stopped for so long, and its CLOCK_MONOTONIC with it."""
        self.slept_s += slept_s
        self._write()

    def _write(self) -> None:
        data = _FORM.pack(int(self.wall_s * 1e9), int(self.slept_s * 1e9))
        if self.path.exists():
            with self.path.open("r+b") as file:
                file.write(data)
        else:
            self.path.write_bytes(data)


def inject(path: Path) -> None:
    """Have this process live by the clocks of a file."""
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), _FORM.size, prot=mmap.PROT_READ)
    wall_ns, monotonic = time.time_ns, time.monotonic

    def offsets() -> tuple[int, int]:
        return _FORM.unpack_from(shared)

    _replace("time_ns", lambda: wall_ns() + offsets()[0])
    _replace("time", lambda: (wall_ns() + offsets()[0]) / 1e9)
    _replace("monotonic", lambda: monotonic() - offsets()[1] / 1e9)


def skewed() -> Callable[[], None]:
    """Have this process send scripts that read SKEW; return what undoes it."""
    honest = loader.load

    @cache
    def load(name: str) -> loader.Script:
        text = honest(name).text
        if text.count(_TIME) != 1:
            raise AssertionError("the prelude reads the time in another way than this test knows")
        text = text.replace(_TIME, f"{_TIME} time[1] = time[1] + (call('GET', '{SKEW}') or 0)")
        return loader.Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

    loader.load = load

    def undo() -> None:
        loader.load = honest

    return undo


def _replace(name: str, clock: Callable[..., float]) -> None:
    setattr(time, name, clock)
