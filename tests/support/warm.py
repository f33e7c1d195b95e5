"""A process that has loaded the `ringfence` command and becomes it, anew for each order. Started by Shell alone.

An order comes with four descriptors: stdin, stdout, stderr, and one on which the command's pid and then its wait status
are answered. It ends with whoever started it, and never loads anything on an order's behalf before the fork.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import NoReturn

import typer.main

from runner.cli.commands import application
from runner.cli.main import main

ORDER_BYTES = 1 << 17
PACKAGES = ("runner", "runner.cli", "runner.wire")
NOT_LOADED = {"__main__", "testing", "testing_pytest"}


def load() -> None:
    """Load what commands load: every module of the packages, as none does anything by being loaded."""
    for package in PACKAGES:
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if found.name not in NOT_LOADED:
                importlib.import_module(f"{package}.{found.name}")
    importlib.import_module("typer._adapters")
    # Typer makes its commands anew from their functions at each start: 0.1 s of processor time for these 64.
    whole = typer.main.get_command(application)
    typer.main.get_command = lambda typer_instance: whole
    gc.collect()
    gc.freeze()


def serve(orders: socket.socket) -> None:
    """Take orders until their sender is gone; returns in a child that is to become the command."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        body, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES, 4)
        if not body:
            os._exit(0)
        if os.fork() == 0:
            orders.close()
            watch(body, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def watch(body: bytes, descriptors: list[int]) -> None:
    """Return in the process that becomes the command; its parent tells how it ended and ends itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, answers = descriptors
    pid = os.fork()
    if pid:
        for descriptor in standard:
            os.close(descriptor)
        with suppress(BrokenPipeError):  # who gave up waiting does not read the answer
            os.write(answers, pid.to_bytes(4, "little"))
            os.write(answers, os.waitpid(pid, 0)[1].to_bytes(4, "little"))
        os._exit(0)
    order = json.loads(body)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(answers)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["ringfence", *order["words"]]


def command() -> NoReturn:
    """Run the command and end as the interpreter would, but for taking every module apart, which takes 30 ms."""
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    threading._shutdown()  # type: ignore[attr-defined]  # threads that have to end first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    load()
    serve(socket.socket(fileno=int(sys.argv[1])))
    command()
