"""A task that tells what it found when it started. Served to the containment tests."""

from __future__ import annotations

import os
import signal
import sys

from runner import App

app = App()


@app.task
def found() -> dict[str, object]:
    """Return the environment, the signals' dispositions and mask, the umask and the last entries of the search path."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "environment": dict(os.environ),
        "real": sorted(os.popen("env").read().split("\n")),  # noqa: S605 - a fixed word
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "pipe": signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "umask": mask,
        "path": sys.path[-1],
    }


@app.task
def interrupted() -> str:
    """Send SIGINT to itself."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"
