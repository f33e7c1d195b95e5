"""A tree of processes that resists its end. Every process ends by itself after LIFETIME_S; relays are bounded.

``hostile.py MARK``: a plain child, one in a session of its own, a double-forked daemon, one that ignores every signal
it can, a stopped one, and relays that each start a successor after a millisecond and exit.
"""

import os
import signal
import sys
import time

LIFETIME_S = 60
RELAYS = 2
MAX_HOPS = 20_000
END = time.monotonic() + LIFETIME_S


def linger() -> None:
    while time.monotonic() < END:
        time.sleep(0.05)
    os._exit(0)


def child() -> bool:
    return os.fork() == 0


def deaf() -> None:
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            continue


def relay() -> None:
    for _ in range(MAX_HOPS):
        time.sleep(0.001)
        if time.monotonic() > END or os.fork():
            os._exit(0)
    os._exit(0)


def main() -> None:
    if child():
        linger()
    if child():
        os.setsid()
        linger()
    if child():
        os.setsid()
        if os.fork():
            os._exit(0)
        linger()
    if child():
        deaf()
        linger()
    stopped = os.fork()
    if stopped == 0:
        linger()
    os.kill(stopped, signal.SIGSTOP)
    for _ in range(RELAYS):
        if child():
            relay()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    linger()


if len(sys.argv) > 1:
    main()
