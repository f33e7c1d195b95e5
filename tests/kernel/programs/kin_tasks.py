"""Tasks that start others and call tools; run by real nodes in test_children_fleet.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from runner import App, current_job
from runner.guest import jobs, tools
from runner.guest.calls import CallRefused
from runner.wire.codec import Json
from runner.wire.frames import FD_KERNEL

app = App()

CALL = """
from runner.guest import tools
tools.call("slow", mark={mark!r})
"""


@app.task
def square(number: int) -> dict[str, object]:
    """Return a number's square, and what the child finds of itself."""
    return {"square": number * number, "env": os.environ.get("PART", "")}


@app.task
def spread(numbers: list[int]) -> list[object]:
    """Start one child for each number and gather what they return."""
    children = [jobs.task(square, number, env={"PART": str(number)}) for number in numbers]
    return [child.result(timeout=30) for child in children]


@app.task
def linger(mark: str) -> None:
    """Run until somebody ends it."""
    os.write(1, f"{mark}\n".encode())
    time.sleep(60)


@app.task
def brood(mark: str, depth: int) -> None:
    """Start a child that does the same, as deep as was asked, and one that lingers; then linger."""
    if depth:
        jobs.task("kin_tasks:brood", mark, depth - 1, spawn=2 * depth - 1)
    jobs.task(linger, mark)
    linger.function(mark)


@app.task
def leave_one(mark: str) -> str:
    """Start a child that lingers, and end before it."""
    return jobs.task(linger, mark).id


@app.task
def twice() -> tuple[bool, object]:
    """Fail once after a child was started; the second attempt finds it."""
    child = jobs.task(square, 9, name="nine")
    if current_job.attempt == 1:
        raise RuntimeError("once")
    return child.known, child.result(timeout=30)


@app.task
def greedy(host: str) -> str:
    """Ask for a child with a destination that this job does not have; return the refusal's code."""
    try:
        jobs.task(square, 1, net=[host])
    except CallRefused as error:
        return error.code
    return "started"


@app.task
def leave(code: int) -> None:
    """Have a process below this one end the attempt."""
    words = [sys.executable, "-c", f"from runner.guest import jobs; jobs.leave({code})"]
    subprocess.run(words, pass_fds=(FD_KERNEL,), check=False)
    time.sleep(60)


@app.task
def use(name: str, args: dict[str, Json]) -> dict[str, object]:
    """Call a tool; return its answer."""
    found = tools.call(name, **args)
    return {"code": found.exit_code, "text": found.text, "timed_out": found.timed_out, "cut": found.truncated}


@app.task
def use_and_die(mark: str) -> None:
    """Have a process call the slow tool, and kill that process once the tool runs."""
    caller = subprocess.Popen([sys.executable, "-c", CALL.format(mark=mark)], pass_fds=(FD_KERNEL,))
    time.sleep(float(os.environ.get("BEFORE", "60")))
    caller.kill()
    caller.wait()
    time.sleep(60)


@app.task
def seen() -> list[str]:
    """Return the names of the tools that this job has."""
    return tools.names()


@app.task
def many(name: str, args: dict[str, Json], count: int) -> list[int]:
    """Call a tool several times at once; return the exit codes."""
    codes: list[int] = []

    def one() -> None:
        codes.append(tools.call(name, **args).exit_code or 0)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


@app.task
def one_by_one(name: str, args: dict[str, Json], count: int) -> None:
    """Call a tool several times, and say after each how often."""
    for number in range(1, count + 1):
        tools.call(name, **args)
        os.write(1, f"{number}\n".encode())
