"""Where simulated jobs run: a process beside the agent that outlives a stopped agent and ends jobs as a mould does.

Called by sandbox.py. It keeps the promises of a real mould that the queue relies on: a job ends at the lease's deadline
by CLOCK_BOOTTIME, when the agent is gone, and when it is told to; and nothing runs after its end was said. What began
and ended when stands in a journal, one line each: ``S|E JOB ATTEMPT AGENT MONOTONIC_NS HOW``. Must never be taken for
isolation.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Floor", "Line", "append", "fork"]

LOOK_S = 0.02
MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the journal."""

    begins: bool
    job: str
    attempt: int
    agent: str
    at_ns: int
    how: str = ""


def append(fd: int, line: Line) -> None:
    """Write a line; the kernel keeps lines of many writers apart."""
    kind = "S" if line.begins else "E"
    os.write(fd, f"{kind} {line.job} {line.attempt} {line.agent} {line.at_ns} {line.how or '-'}\n".encode())


def fork(journal: Path, agent: str, boottime_ns: Callable[[], int]) -> tuple[int, socket.socket]:
    """Start the process; return its pid and the line to it. It ends when the other end of the line is closed."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            _alone(far, journal, agent, boottime_ns)
            status = 0
        finally:
            os._exit(status)
    far.close()
    return pid, near


def _alone(line: socket.socket, journal: Path, agent: str, boottime_ns: Callable[[], int]) -> None:
    """Drop everything of the agent but this line: above all its connections and its lock on the node's name."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    kept = os.dup2(line.fileno(), 3)
    os.closerange(4, 65_536)
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    Floor(socket.socket(fileno=kept), fd, agent, boottime_ns).run()


@dataclass(slots=True)
class Floor:
    """What runs now. ``run`` returns when the agent is gone."""

    line: socket.socket
    journal: int
    agent: str
    boottime_ns: Callable[[], int]
    live: dict[int, tuple[str, int]] = field(default_factory=dict)
    due: list[tuple[float, int]] = field(default_factory=list)
    deadline_ns: int | None = None

    def run(self) -> None:
        """Carry out orders until the line ends."""
        while True:
            for _ in self._wait():
                if not (data := self._read()):
                    self._end_all("eof")
                    return
                self._obey(json.loads(data))
            if self.live and self._lapsed():
                self._end_all("lease")
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                self._end(heapq.heappop(self.due)[1], "done")

    def _read(self) -> bytes:
        """Return the next order, nothing at the end; an agent that was killed with unread words resets the line."""
        try:
            return self.line.recv(MOST_BYTES)
        except OSError:
            return b""

    def _wait(self) -> list[socket.socket]:
        wait_s = None
        if self.live:
            wait_s = max(0.0, min(LOOK_S, self.due[0][0] - time.monotonic() if self.due else LOOK_S))
        return select.select([self.line], [], [], wait_s)[0]

    def _lapsed(self) -> bool:
        return self.deadline_ns is not None and self.boottime_ns() >= self.deadline_ns

    def _obey(self, order: dict[str, object]) -> None:
        key = int(str(order.get("key", 0)))
        if "deadline" in order:
            self.deadline_ns = int(str(order["deadline"]))
        elif order.get("op") == "kill":
            self._end(key, "killed")
        elif self._lapsed():
            self._tell(key, "lease")
        else:
            self.live[key] = (str(order["job"]), int(str(order["attempt"])))
            self._note(key, begins=True)
            heapq.heappush(self.due, (time.monotonic() + float(str(order["hold_s"])), key))

    def _end(self, key: int, how: str) -> None:
        if key in self.live:
            self._note(key, begins=False, how=how)
            del self.live[key]
            self._tell(key, how)

    def _end_all(self, how: str) -> None:
        for key in tuple(self.live):
            self._end(key, how)

    def _tell(self, key: int, how: str) -> None:
        try:
            self.line.send(json.dumps({"key": key, "how": how}).encode())
        except OSError:
            return  # the agent is gone; the journal has it

    def _note(self, key: int, *, begins: bool, how: str = "") -> None:
        job, attempt = self.live[key]
        append(self.journal, Line(begins, job, attempt, self.agent, time.monotonic_ns(), how))
