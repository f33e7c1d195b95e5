"""``pulse.py MARKER [WORD…]``: adds a line ``PROCESS TIME`` to MARKER every few milliseconds until it dies.

    tree    children in sessions of their own and a double-forked one pulse too
    late S  on SIGTERM go on for S seconds, then print "late" and exit with 0
    again   the program executes itself anew first
    once    one pulse, then exit with 0
    chatty  each pulse is printed, too

``up`` is printed once all pulse. Every process ends by itself after LIFETIME_S.
"""

import os
import signal
import sys
import time

LIFETIME_S = 60
STEP_S = 0.005
marker, words = sys.argv[1], sys.argv[2:]
end = time.monotonic() + LIFETIME_S


def late(number: int, frame: object) -> None:
    global end
    end = time.monotonic() + float(words[words.index("late") + 1])


def pulse() -> None:
    name = os.urandom(4).hex()  # process ids are counted anew in each sandbox
    with open(marker, "ab", buffering=0) as file:
        while time.monotonic() < end:
            file.write(f"{name} {time.time():.6f}\n".encode())
            if "chatty" in words:
                sys.stdout.write(f"{name}\n")
                sys.stdout.flush()
            if "once" in words:
                return
            time.sleep(STEP_S)


def branch(depth: int) -> None:
    """Pulse in a process ``depth`` forks away, in a session of its own."""
    if os.fork():
        return
    os.setsid()
    for _ in range(depth):
        if os.fork():
            os._exit(0)
    pulse()
    os._exit(0)


if "again" in words:
    words.remove("again")
    os.execv(sys.executable, [sys.executable, *sys.argv[:2], *words])  # noqa: S606 - the scenario
if "late" in words:
    signal.signal(signal.SIGTERM, late)
if "tree" in words:
    branch(0)
    branch(1)
    branch(2)
sys.stdout.write("up\n")
sys.stdout.flush()
pulse()
if "late" in words:
    sys.stdout.write("late\n")
