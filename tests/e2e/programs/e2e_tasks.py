"""Tasks that the e2e fleets serve. Each process ends by itself after LIFETIME_S."""

from __future__ import annotations

import subprocess
import sys

from runner import App

app = App()
LIFETIME_S = 60
SLEEPER = f"import time; time.sleep({LIFETIME_S})"


@app.task()
def add(left: int, right: int) -> int:
    """Return the sum."""
    sys.stdout.write("adding\n")
    return left + right


@app.task()
def leave_child(mark: str) -> int:
    """Return 7 while a background child still holds the output pipe."""
    subprocess.Popen([sys.executable, "-c", SLEEPER, mark])
    return 7


@app.task()
def explode() -> None:
    """Fail with a message."""
    raise RuntimeError("on purpose")
