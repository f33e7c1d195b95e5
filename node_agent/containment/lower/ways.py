"""How a mould without namespaces kills everything of its attempt, and knows that nothing is left: one way a level.

Called by mould.py, in the mould and in its guard; both are subreapers, so whatever detaches itself becomes their child.
Must never signal a process that could be another one by now: own descendants, a whole group, or a uid that nobody else
has. ``clear`` returns only on the kernel's word.

    C   cgroup.kill, then "populated 0"         D   kill(-1) by a helper that is the job's uid, then no task of that uid
    E   descendants until there is no child     F   the worker's process group, then as E
Source: notes on measured kill methods (c3, cgroup2, own uid); cgroup-v2.rst, kill(2), wait(2), proc(5).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import Final

from node_agent.containment import cgroupfs
from node_agent.containment.lower import tree

__all__ = ["Children", "GroupWay", "SessionWay", "UidWay", "Way", "way_of"]

_WALL: Final = 0x4000_0000
_FIRST_PAUSE_S: Final = 0.0002
_LONGEST_PAUSE_S: Final = 0.02
#: A helper has the job's uid, so the job may stop or kill it; another one follows.
_HELPER_S: Final = 0.05
#: Most trees are gone after so many looks; what is not, forks.
_QUICK_LOOKS: Final = 3
_STOP_LOOKS: Final = 50


class Way:
    """Level E: descendants, until the kernel says that there is no child. The other levels add to it."""

    def strike(self) -> None:
        """Kill what this level reaches besides own children; call it before the worker is reaped."""

    def empty(self) -> bool:
        """Return the kernel's word that nothing is left, asked once there is no child any more."""
        return True


class GroupWay(Way):
    """Level C: the cgroup v2 group that workers are born in."""

    def __init__(self, job_fd: int) -> None:
        self._job_fd = job_fd

    def strike(self) -> None:
        """Kill everything in the group, whatever it does meanwhile."""
        fd = os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._job_fd)
        try:
            os.write(fd, b"1")
        finally:
            os.close(fd)

    def empty(self) -> bool:
        """Return whether no process is in the group or below it."""
        fd = os.open("cgroup.events", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._job_fd)
        try:
            return cgroupfs.flat(cgroupfs.read(fd)).get("populated", 1) == 0
        finally:
            os.close(fd)


class UidWay(Way):
    """Level D: a uid that this attempt alone has."""

    def __init__(self, uid: int) -> None:
        if uid <= 0:
            raise ValueError("a job never runs as root")
        self._uid = uid

    def strike(self) -> None:
        """Have one kill(-1) done as the job's uid: the kernel holds off every fork while it goes through the list."""
        pid = os.fork()
        if pid == 0:
            try:
                os.setresuid(self._uid, self._uid, self._uid)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        deadline = time.monotonic() + _HELPER_S
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return
            time.sleep(_FIRST_PAUSE_S)

    def empty(self) -> bool:
        """Return whether no task of the host has the uid as its real, effective, saved or file system uid."""
        number = str(self._uid).encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError), open(f"/proc/{name}/status", "rb") as file:
                    ids = next((line for line in file if line.startswith(b"Uid:")), b"")
                    if number in ids.split()[1:]:
                        return False
        return True


class SessionWay(Way):
    """Level F: the worker's process group, which any Unix can kill. What left the group is found as a child."""

    def __init__(self) -> None:
        self.worker: int | None = None

    def strike(self) -> None:
        """Kill the group; its number is the unreaped worker's, so it can't be another group's."""
        if self.worker is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.worker, signal.SIGKILL)


class Children:
    """The children of this process: kills and reaps them, and adds up what they used."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self.worker: int | None = None
        self.status: int | None = None
        self.cpu_s = 0.0
        self.max_rss_bytes = 0
        self.processes = 0

    def worker_ended(self) -> bool:
        """Return whether the worker is a zombie or reaped; it is not reaped by this."""
        if self.worker is None or self.status is not None:
            return self.status is not None
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def reap(self, most: int = 1 << 30) -> bool:
        """Reap what has ended, at most ``most``; return whether there is no child any more."""
        for _ in range(most):
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | _WALL)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            self.cpu_s += usage.ru_utime + usage.ru_stime
            self.max_rss_bytes = max(self.max_rss_bytes, usage.ru_maxrss * 1024)
            self.processes += 1
            if pid == self.worker:
                self.status = status
                if isinstance(self._way, SessionWay):
                    self._way.worker = None
        return False

    def clear(self) -> None:
        """Kill everything and return once nothing is left. Against a bomb at level E or F it may take for ever."""
        pause_s, looks = _FIRST_PAUSE_S, 0
        while True:
            # A failed strike must not end the loop: descendants are killed in any case, ``empty`` has the last word.
            with suppress(OSError):
                self._way.strike()
            if looks >= _QUICK_LOOKS:
                _hold_still()
            found = tree.strike(signal.SIGKILL)
            if self.reap() and self._way.empty():
                return
            looks += 1
            if not found:
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def _hold_still() -> None:
    """Stop a bomb before it is killed: each killed process would make room for a fork of one that is not."""
    pause = tree.Pause()
    for _ in range(_STOP_LOOKS):
        if not pause.stop()[1]:
            return


def way_of(level: str, job_fd: int | None, uid: int) -> Way:
    """Return the way of a level; at C the group must be there. Raises ValueError."""
    if level == "C":
        if job_fd is None:
            raise ValueError("level C needs a cgroup v2 group")
        return GroupWay(job_fd)
    if level == "D":
        return UidWay(uid)
    return SessionWay() if level == "F" else Way()
