"""Tasks that call their node; they and their children end by themselves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from runner import App
from runner.inside import CallRefused, Session, call, progress

app = App()
OPEN = b"\x14"
#: The session that an earlier attempt of this worker has kept.
held: list[Session] = []


def code_of(session: Session | None, op: str, **fields: str) -> str:
    """How a call is answered."""
    try:
        if session is None:
            call(op, **fields)
        else:
            session.call(op, **fields)
    except CallRefused as error:
        return error.code
    return "ok"


@app.task()
def talk(body: str) -> dict[str, object]:
    """Say how far it is, give an artifact, call from a child of a fork; return what came back."""
    progress.set(0.25, "a quarter")
    digest = progress.artifact("report.txt", body)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            progress.set(1.0, "the child says all")
            os.write(writer, code_of(None, "no.such").encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    child = os.read(reader, 100).decode()
    line = "from runner.inside import *\ntry: call('policy.ask', action='x')\nexcept CallRefused as e: print(e.code)"
    root = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["runner"].__file__ or "")))
    words = [sys.executable, "-c", line]
    other = subprocess.run(words, env={"PYTHONPATH": root}, capture_output=True, text=True, check=False)
    return {"digest": digest, "child": child, "other": other.stdout.strip()}


@app.task()
def junk(flood: int) -> str:
    """Break the channel on purpose, more than once; return what a call is answered with afterwards."""
    with Session() as session:
        for _ in range(flood):
            code_of(None, "no.such")
        with socket.socket(fileno=os.dup(100)) as channel:
            channel.send(b"junk")
        while (code := code_of(session, "policy.ask", action="x")) == "ok":
            pass
    return code


@app.task()
def again(number: int) -> dict[str, object]:
    """One of several attempts in one worker: the last one's session serves no more."""
    before = code_of(held.pop(), "policy.ask", action="x") if held else None
    progress.set(number / 10, f"number {number}")
    held.append(Session())
    now = code_of(held[0], "policy.ask", action="x")
    return {"pid": os.getpid(), "worker": id(held), "before": before, "now": now}


@app.task()
def neighbours() -> list[str]:
    """Return every process that this one can see and is not its own."""
    return [pid for pid in filter(str.isdecimal, os.listdir("/proc")) if int(pid) != os.getpid()]


@app.task()
def deaf() -> str:
    """End at once, with sessions under way that nobody waits for."""
    channel = socket.socket(fileno=os.dup(100))
    for _ in range(40):
        channel.send(OPEN)
    return "asked"


@app.task()
def wait() -> None:
    """Call, keep several sessions open, and never end by itself within a test."""
    held.extend(Session() for _ in range(5))
    progress.set(0.5, "in the middle")
    time.sleep(60)
