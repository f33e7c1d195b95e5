"""A real fleet, started by `ringfence up` on a home of its own. Called by the e2e tests; never outlives its block."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from runner import App
from runner.home import Home
from tests.support import scratch
from tests.support import shell as shells
from tests.support.shell import Shell
from tests.support.wait import wait_until

__all__ = ["CLI", "Fleet", "processes_with", "running", "up"]

CLI = (sys.executable, "-I", "-m", "runner.cli")
READY_S = 60.0
STEP_S = 45.0
STOP_S = 40.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running `up`: its home, its process, and a folder that jobs may be granted paths below."""

    home: Path
    work: Path
    process: subprocess.Popen[str]
    log: Path
    shell: Shell

    def run(self, *words: str, timeout_s: float = STEP_S) -> subprocess.CompletedProcess[str]:
        """Run one command of Ringfence on this home."""
        return self.shell.run(["--home", str(self.home), *words], timeout_s)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start one command of Ringfence; the caller waits for it."""
        return subprocess.Popen(
            [*CLI, "--home", str(self.home), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def json(self, *words: str) -> list[dict[str, object]]:
        """Run a reading command with --json and return its objects, also of a command that prints one."""
        done = self.run(*words, "--json")
        found = json.loads(done.stdout)
        return cast("list[dict[str, object]]", found if isinstance(found, list) else [found])

    def json_lines(self, *words: str) -> list[dict[str, object]]:
        """Run a command that prints one object a line and return them."""
        return [json.loads(line) for line in self.run(*words, "--json").stdout.splitlines()]

    def detach(self, *words: str) -> str:
        """Enqueue a command job and return its id; words before ``--`` are options."""
        done = self.run("run", "--detach", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the job's state."""
        with App(home=self.home) as app:
            return app.job(job).status().state

    def wait_state(self, job: str, *states: str) -> None:
        """Wait until the job is in one of these states. Asks the store itself: a command a look would cost a core."""
        with App(home=self.home) as app:
            handle = app.job(job)
            wait_until(lambda: handle.status().state in states, f"{job} to be {' or '.join(states)}", STEP_S)

    def wait_output(self, job: str, word: str) -> None:
        """Wait until the job's output holds ``word``; asks as `wait_state` does."""
        with App(home=self.home) as app:
            handle = app.job(job)

            def said() -> bool:
                return word in b"".join(data for _, data in handle.logs()).decode("utf-8", "replace")

            wait_until(said, f"{word!r} in the output of {job}", STEP_S)

    def clear(self) -> None:
        """Kill whatever a test left, with proof; by the API, which takes a tenth of the command's time."""
        with App(home=self.home) as app:
            receipts = app.kill(all=True)
        assert all(receipt.outcome != "unconfirmed" for receipt in receipts), receipts

    def busy(self) -> int:
        """Return how many slots of all nodes are taken."""
        return sum(cast("int", node["busy"]) for node in self.json("nodes"))


@contextmanager
def running(*options: str, prepare: Callable[[Home], object] = lambda home: None) -> Iterator[Fleet]:
    """Yield a fleet of `up` with these options; it is stopped and its home removed afterwards.

    ``prepare`` gets the home before `up` starts.
    """
    with scratch.folder(mode=0o711) as folder:
        work = folder / "work"
        work.mkdir()
        prepare(Home(folder / "h"))
        with up(folder / "h", work, options) as fleet:
            yield fleet


@contextmanager
def up(home: Path, work: Path, options: Sequence[str] = ()) -> Iterator[Fleet]:
    """Run `up` on ``home`` while the block runs, with ``work`` as the one path that jobs may be granted."""
    log = home.parent / "up.log"
    words = [*CLI, "--home", str(home), "up", "--allow", str(work), *options]
    with log.open("ab") as file:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert _first_line(process) == "ready", log.read_text(errors="replace")[-4000:]
        yield Fleet(home, work, process, log, shells.shared())
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()


def processes_with(mark: str) -> list[int]:
    """Return this host's running processes that have ``mark`` among their arguments, `ringfence` itself left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if mark.encode() in words and b"runner.cli" not in words:
                found.append(int(entry.name))
    return found


def _first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line of a process's output, "" at its end or after READY_S."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        lines.put(process.stdout.readline() if process.stdout is not None else "")

    threading.Thread(target=read, daemon=True).start()
    try:
        return lines.get(timeout=READY_S).strip()
    except queue.Empty:
        return ""
