"""A job of the bench: asks its broker again and again, on the channels that it inherits. Used by vaulted.py.

    asking.py FD[,FD…] [--apart]     stdin: `get N`, `list N`    stdout: its number first, then a JSON list of ms each

It imports nothing but the standard library, as a job has it.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time

NEW_USER_AND_PID = 0x3000_0000
PR_SET_PDEATHSIG = 1
ORDERS = {"get": b'{"op":"get","name":"KEY"}', "list": b'{"op":"list"}'}


def main() -> None:
    """Serve orders until stdin ends."""
    channels = [socket.socket(fileno=int(word)) for word in sys.argv[1].split(",") if word]
    libc = ctypes.CDLL(None)
    pid = os.getpid()
    if "--apart" in sys.argv:
        if libc.unshare(NEW_USER_AND_PID) != 0:
            sys.exit("no namespaces")
        pid = os.fork()
        if pid:
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            os.waitpid(pid, 0)
            return
        libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    else:
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    for line in sys.stdin:
        word, count = line.split()
        sys.stdout.write(json.dumps(timed(channels, ORDERS[word], int(count))) + "\n")
        sys.stdout.flush()


def timed(channels: list[socket.socket], order: bytes, count: int) -> list[float]:
    """Ask on each channel in turn; return how long each answer took, in ms."""
    found = []
    for number in range(count):
        channel = channels[number % len(channels)]
        began = time.perf_counter()
        channel.send(order)
        reply = channel.recv(65536)
        found.append(1000 * (time.perf_counter() - began))
        if b'"ok":true' not in reply:
            sys.exit(reply.decode())
    return found


if __name__ == "__main__":
    main()
