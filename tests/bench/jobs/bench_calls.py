"""Jobs that call their node and take the time."""

import base64
import time

from runner import App
from runner.inside import call
from runner.wire.codec import Json

app = App()
FOUR_KIB = base64.b64encode(b"x" * 4096).decode()


def _opened() -> Json:
    found = call("file.open", path="/mem/working/x", flags=["write", "create"])
    return found["fd"] if isinstance(found, dict) else None


def _took(count: int, op: str, **fields: Json) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        call(op, **fields)
        found.append(1000 * (time.perf_counter() - began))
    return sorted(found)


@app.task()
def ask(count: int) -> list[float]:
    """Return the median and the 99th percentile of a call that does nothing but ask policy, in ms."""
    call("policy.ask", action="file.open")
    found = _took(count, "policy.ask", action="file.open")
    return [found[count // 2], found[count * 99 // 100]]


@app.task()
def write(count: int) -> list[float]:
    """Return the same of a write of 4 KiB at one place of a file, recorded before it happens."""
    fd = _opened()
    found = _took(count, "file.write", fd=fd, data=FOUR_KIB, at=0)
    return [found[count // 2], found[count * 99 // 100]]


@app.task()
def act(until_s: float, from_s: float) -> int:
    """Make small recorded calls from ``from_s`` to ``until_s`` (CLOCK_MONOTONIC); return how many."""
    fd = _opened()
    while time.monotonic() < from_s:
        call("file.write", fd=fd, data="eA==", at=0)
    count = 0
    while time.monotonic() < until_s:
        call("file.write", fd=fd, data="eA==", at=0)
        count += 1
    return count
