"""Forks node agents from a process that has loaded their code: 0.1 s of processor time each instead of 0.5.

Started by agents.py as ``python -I nursery.py FD``. An order is {"words", "env", "faulty"} with four descriptors:
stdin, stdout, stderr, and one on which the agent's pid and then its wait status are answered. ``faulty``: run
faulty_agent.py with these words. It ends with whoever started it, and every agent ends with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from node_agent import __main__ as agent

ORDER_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
FAULTY = Path(__file__).with_name("faulty_agent.py")


def main() -> NoReturn:
    """Serve until the other end of the orders' socket is closed."""
    orders = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    ended, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([orders.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            reap(answers)
        if orders.fileno() in ready:
            body, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES, 4)
            if not body:
                os._exit(0)
            start(body, descriptors, answers)


def reap(answers: dict[int, int]) -> None:
    """Tell how each agent that has ended did."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            answer = answers.pop(pid)
            with suppress(BrokenPipeError):  # who no longer wants to know
                os.write(answer, status.to_bytes(4, "little"))
            os.close(answer)


def start(body: bytes, descriptors: list[int], answers: dict[int, int]) -> None:
    """Fork one agent."""
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        become(json.loads(body), descriptors[:3], own)
    *standard, answer = descriptors
    for descriptor in standard:
        os.close(descriptor)
    answers[pid] = answer
    with suppress(BrokenPipeError):
        os.write(answer, pid.to_bytes(4, "little"))


def become(order: dict[str, object], standard: list[int], parent: int) -> NoReturn:
    """Be the agent, as launch.py and the interpreter would have made it."""
    status = 70
    try:
        signal.set_wakeup_fd(-1)
        leave(parent, standard, order["env"])  # type: ignore[arg-type]  # a mapping, by agents.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        words = [str(word) for word in order["words"]]  # type: ignore[attr-defined]  # a list, by agents.py
        sys.argv = [str(FAULTY if order["faulty"] else agent.__file__), *words]
        if order["faulty"]:
            runpy.run_path(str(FAULTY), run_name="__main__")
        status = agent.main(words)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 70
    except Exception as error:  # noqa: BLE001 - nothing may go on in a child that is not the nursery
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        os._exit(status)


def leave(parent: int, standard: Sequence[int], env: Mapping[str, str]) -> None:
    """Right after a fork: keep nothing of the nursery but its code, and end with it.

    ``standard``: what becomes 0, 1, 2. Called by tests/scale/nursery.py, too.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(70)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir("/")
    os.environ.clear()
    os.environ.update(env)


if __name__ == "__main__":
    main()
