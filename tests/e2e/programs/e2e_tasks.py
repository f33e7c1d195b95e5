"""Tasks that the e2e fleets serve. Each process ends by itself after LIFETIME_S."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from runner import App, secret

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
def use_secret(name: str, fail: bool = False) -> dict[str, str]:
    """Return a secret's hash, and the secret itself, which must not get out; or fail with it in the message."""
    value = secret(name)
    if fail:
        raise RuntimeError(f"it is {value.decode()}")
    return {"hash": hashlib.sha256(value).hexdigest(), "value": value.decode()}


@app.task()
def explode() -> None:
    """Fail with a message."""
    raise RuntimeError("on purpose")
