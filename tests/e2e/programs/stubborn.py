"""``stubborn.py KIND MARK``: four ways not to notice a request to stop (scenario A-K05).

Every process ends by itself after LIFETIME_S.
"""

import os
import signal
import sys
import time

LIFETIME_S = 60
END = time.monotonic() + LIFETIME_S


def linger() -> None:
    while time.monotonic() < END:
        time.sleep(0.02)


def swallow() -> None:
    """Turn SIGTERM into an exception, and swallow every exception."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    while time.monotonic() < END:
        try:
            time.sleep(0.02)
        except BaseException:  # noqa: BLE001, S112 - the fault under test
            continue


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


kind = sys.argv[1]
sys.stdout.write("up\n")
sys.stdout.flush()
if kind == "swallow":
    swallow()
elif kind == "deaf":
    deaf()
    linger()
elif kind == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
    linger()
elif kind == "stopped-child":
    deaf()
    child = os.fork()
    if child:
        os.kill(child, signal.SIGSTOP)
    linger()
