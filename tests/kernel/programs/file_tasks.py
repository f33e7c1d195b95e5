"""Tasks with files: state over attempts, an agent's memory between jobs."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time

from runner import App, current_job
from runner.inside import files, state

app = App()
BIG = b"0123456789" * 10_000


@app.task
def works() -> dict[str, object]:
    """First keep what is known and die when another job says so, with a file half written; then go on from there."""
    attempt = current_job.attempt
    if attempt == 1:
        state.save("page", {"n": 7})
        files.put("/state/big", BIG)
        half = files.open("/state/half", "wb")
        half.write(b"half")
        half.flush()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while files.get("/mem/semantic/go", default=b"") != b"go":
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    names = [found.path for found in files.listdir("/state")]
    return {"attempt": attempt, "page": state.load("page"), "big": files.get("/state/big") == BIG, "names": names}


@app.task
def says_go() -> str:
    """Tell the other job through what both remember, and use a file as Python does."""
    with files.open("/mem/episodic/log", "a") as log:
        log.write("one\ntwo\n")
    files.put("/mem/episodic/log", "three\n", append=True)
    with files.open("/mem/episodic/log") as log:
        lines = [line.strip() for line in log]
    try:
        files.put("/state/x", b"")
    except PermissionError as error:
        lines.append(errno.errorcode[error.errno or 0])
    files.put("/mem/semantic/go", b"go")
    return " ".join(str(line) for line in lines)
