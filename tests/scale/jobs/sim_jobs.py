"""The one task of these tests, for agents with real sandboxes; sandbox.py does the same without running anything."""

from __future__ import annotations

import os
import threading
import time

from runner import App, current_job

app = App()


@app.task
def work(hold_ms: int = 0, fails: int = 0, says: str = "", journal: str = "") -> int:
    """Take so long, and fail in the first ``fails`` attempts; ``journal``: where begin and end are noted."""
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) if journal else -1
    own = f"sandbox.{os.urandom(4).hex()}"
    _note(fd, f"S {current_job.id} {current_job.attempt} {own} {time.monotonic_ns()} -\n")
    if says:
        os.write(1, says.encode())
    nobody = threading.Event()
    until = time.monotonic() + hold_ms / 1000
    while (left_s := until - time.monotonic()) > 0:
        nobody.wait(min(0.02, left_s))
        # Should this be the last line, the end came soon after it.
        _note(fd, f"B {current_job.id} {current_job.attempt} {own} {time.monotonic_ns()} -\n")
    _note(fd, f"E {current_job.id} {current_job.attempt} {own} {time.monotonic_ns()} done\n")
    if current_job.attempt <= fails:
        raise OSError("on purpose")
    return current_job.attempt


def _note(fd: int, line: str) -> None:
    if fd >= 0:
        os.write(fd, line.encode())
