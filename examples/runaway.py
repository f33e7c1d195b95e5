"""A program that does not want to end: it ignores signals, forks twice, and detaches. Used by demo.py.

Each of its processes ends by itself after LIFETIME_S, so that a broken demo leaves nothing behind for long.
"""

import os
import signal
import time

LIFETIME_S = 60


def linger() -> None:
    """Stay, deaf to every signal that can be ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    end = time.monotonic() + LIFETIME_S
    while time.monotonic() < end:
        time.sleep(0.1)


def spawn(*, session: bool = False, twice: bool = False) -> None:
    """Start a process that lingers: plain, in a session of its own, or as an orphan of a parent that is gone."""
    if os.fork():
        return
    if session:
        os.setsid()
    if twice and os.fork():
        os._exit(0)
    linger()
    os._exit(0)


if __name__ == "__main__":
    spawn()
    spawn(session=True)
    spawn(session=True, twice=True)
    print("three more of me are on their way, try to stop us", flush=True)
    linger()
