"""A job's process: sends what it is told on the channel, prints the answer. Started with the channel's descriptor.

`asker.py FD [--apart]`: with --apart in a user and pid namespace of its own, whose first process it is; prints that
process's number as the outside sees it.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import struct
import sys

NEW_USER_AND_PID = 0x3000_0000
PR_SET_PDEATHSIG = 1
SIGKILL = 9
SCM_CREDENTIALS = 2


def main() -> None:
    """Serve orders from stdin: a JSON text to send, or a word for something more hostile."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    libc = ctypes.CDLL(None)
    pid = os.getpid()
    if "--apart" in sys.argv:
        if libc.unshare(NEW_USER_AND_PID) != 0:
            sys.exit("no namespaces")
        pid = os.fork()
        if pid:
            tell(str(pid))
            os.waitpid(pid, 0)
            return
        libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    elif "--told" not in sys.argv:
        tell(str(pid))
    if "--told" in sys.argv:
        tell('{"exec": true}')
    for line in sys.stdin:
        tell(obey(channel, line.rstrip("\n")))


def tell(text: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def obey(channel: socket.socket, order: str) -> str:
    """Carry out one order; the answer on one line."""
    word, _, rest = order.partition(" ")
    try:
        if word == "child":
            return _in_child(channel, rest)
        if word == "exec":
            os.set_inheritable(channel.fileno(), True)
            words = [sys.executable, "-I", __file__, str(channel.fileno()), "--told"]
            os.execv(sys.executable, words)  # noqa: S606 - the same process, another program
        if word == "forge":
            forged = struct.pack("iII", int(rest), os.getuid(), os.getgid())
            channel.sendmsg([b'{"op":"list"}'], [(socket.SOL_SOCKET, SCM_CREDENTIALS, forged)])
        elif word == "grandchild":
            return _in_child(channel, f"child {rest}")
        if word == "big":
            channel.send(b"x" * int(rest))
        elif word == "raw":
            channel.send(bytes.fromhex(rest))
        elif word == "flood":
            return _flood(channel, int(rest))
        elif word == "stuff":
            socket.send_fds(channel, [b'{"op":"list"}'], [0, 1, 2])
        else:
            channel.send(order.encode())
        return channel.recv(1 << 17).decode() or "closed"
    except OSError as error:
        return json.dumps({"errno": error.errno})


def _in_child(channel: socket.socket, order: str) -> str:
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.write(write_end, obey(channel, order).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        text = file.read().decode()
    os.wait()
    return text


def _flood(channel: socket.socket, count: int) -> str:
    channel.setblocking(False)
    done = 0
    for _ in range(count):
        try:
            done += channel.send(b'{"op":"list"}') > 0
        except OSError:
            break
    return str(done)


if __name__ == "__main__":
    main()
