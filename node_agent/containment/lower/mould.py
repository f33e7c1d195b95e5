"""The mould of levels C to F: no namespace holds its job, so it follows every process of it, and a guard follows it.

Executed by the agent (slots.py) as ``python -I -B -m node_agent.containment.lower.mould LEVEL LIFELINE CONTROL JOB
JOIN…`` with an empty environment, for one attempt. Never runs job code and reads no plan: it passes one descriptor on.
Must end, and kill its job first, when the lifeline closes, when its newest deadline has passed, when the control socket
closes, and after anything that it does not expect.

    agent → mould   {"op": "begin", "attempt", "uid"} + the attempt's channel · {"op": "term"} · {"op": "kill"} ·
                    {"op": "stop"} · {"op": "cont"}
    mould → agent   {"op": "up", "pid"} · {"op": "failed", "detail"} · {"op": "end", "attempt", "status", …} ·
                    {"op": "gone"} · {"op": "held", "still", "moving"} answers stop and cont

Two processes share the control socket: this one, and the guard, its parent. Each says ``gone`` when it has the proof
(ways.py) and then ends. End of file with a ``gone`` before it: nothing is left, whichever of the two was killed.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

from node_agent.containment import linux, oomscore
from node_agent.containment.lower import worker
from node_agent.containment.lower.tree import Pause
from node_agent.containment.lower.ways import Children, SessionWay, UidWay, Way, way_of
from node_agent.containment.orders import LETTERS
from runner.wire import codec
from runner.wire.errors import WireError

__all__ = ["main"]

_MAX_CONTROL_BYTES: Final = 4096
_FD_SPACE: Final = socket.CMSG_SPACE(4)
_MAX_REAPED: Final = 64
_WALL: Final = 0x4000_0000


def main(argv: Sequence[str]) -> NoReturn:
    """Serve one attempt, then end. ``argv``: see above; JOB is -1 where no cgroup v2 group is used.

    ``argv`` of ``clear UID``: kill all of a job uid whose mould and guard were both killed by others, then end.
    """
    if argv[1] == "clear":
        Children(UidWay(int(argv[2]))).clear()
        sys.exit(0)
    level, lifeline, control, job_fd = argv[1], int(argv[2]), int(argv[3]), int(argv[4])
    _close_others({lifeline, control, *([job_fd] if job_fd >= 0 else [])})
    # Before it is undumpable: then /proc/self is root's.
    oomscore.at_least(oomscore.OOM_SCORE_ADJ)
    linux.heed_signals()
    linux.set_dumpable(False)
    linux.set_subreaper()
    # What both processes must know: the uid of the job, written before there is one.
    shared = mmap.mmap(-1, 8)
    job = job_fd if job_fd >= 0 else None
    pid = os.fork()
    if pid == 0:
        _serve(level, lifeline, control, job, argv[5:], shared)
    os.close(lifeline)
    _guard(level, control, job, pid, shared)


def _guard(level: str, control: int, job_fd: int | None, mould: int, shared: mmap.mmap) -> NoReturn:
    """Wait for the mould's end, however it comes, then kill what it may have left, and say so."""
    code = 1
    try:
        while True:
            pid, status = os.waitpid(-1, _WALL)
            if pid == mould:
                break
        code = os.waitstatus_to_exitcode(status) & 0x7F
        (uid,) = struct.unpack("q", shared[:8])
        # Without a uid nothing was forked yet.
        Children(way_of(level, job_fd, uid) if uid else Way()).clear()
        _send(control, op="gone")
    finally:
        os._exit(code)


def _serve(
    level: str, lifeline: int, control: int, job_fd: int | None, join: Sequence[str], shared: mmap.mmap
) -> NoReturn:
    talk = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=control)
    try:
        linux.set_subreaper()
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD})
        if os.geteuid() == 0:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, -5)  # its job must not starve it
        for path in join:
            with open(path, "w", encoding="ascii") as procs:
                procs.write("0")
        kit = worker.make_kit()
        mould = _Mould(level, lifeline, talk, job_fd, shared, kit)
    except (OSError, ValueError) as error:
        _send(control, op="failed", detail=str(error)[:300])
        os._exit(1)
    _send(control, op="up", pid=os.getpid())
    mould.serve()


class _Mould:
    """Serves one attempt."""

    def __init__(
        self, level: str, lifeline: int, control: socket.socket, job_fd: int | None, shared: mmap.mmap, kit: worker.Kit
    ) -> None:
        self._level = level
        self._lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=lifeline)
        self._control = control
        self._job_fd = job_fd
        self._shared = shared
        self._kit = kit
        self._signals = linux.signal_descriptor(signal.SIGCHLD)
        self._timer = linux.timer_descriptor()
        self._deadline_ns: int | None = None
        self._attempt = ""
        self._children: Children | None = None
        self._pause = Pause()

    def serve(self) -> NoReturn:
        """Answer the agent until the attempt is over or something ends it."""
        poll = select.poll()
        for fd in (self._lifeline.fileno(), self._timer, self._control.fileno(), self._signals):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._lifeline.fileno() in ready or self._timer in ready:
                self._read_lifeline()
            if self._signals in ready:
                self._reap()
            if self._control.fileno() in ready:
                self._obey()

    def _read_lifeline(self) -> None:
        """Read to the newest record; end if the agent is gone or its lease has run out."""
        while True:
            try:
                record = self._lifeline.recv(2 * linux.SIZE_OF_DEADLINE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if len(record) != linux.SIZE_OF_DEADLINE:
                self._end()
            (self._deadline_ns,) = struct.unpack("q", record)
        if self._deadline_ns is None:
            return
        if time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= self._deadline_ns:
            self._end()
        linux.timer_arm(self._timer, self._deadline_ns)

    def _obey(self) -> None:
        data, ancillary, _, _ = self._control.recvmsg(_MAX_CONTROL_BYTES, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for _, _, packed in ancillary for fd in struct.unpack(f"{len(packed) // 4}i", packed)]
        try:
            order = codec.load(data) if data else None
        except WireError:
            order = None
        op = order.get("op") if isinstance(order, dict) else ""
        if isinstance(order, dict) and op == "begin" and len(fds) == 1 and self._children is None:
            uid = order.get("uid")
            self._begin(str(order.get("attempt")), uid if isinstance(uid, int) else 0, fds[0])
        elif op == "signal" and not fds and isinstance(order, dict) and order.get("number") in LETTERS:
            self._signal_worker(int(str(order["number"])))
        elif op in ("stop", "cont") and not fds:
            self._hold(stop=op == "stop")
        else:
            self._end()

    def _begin(self, attempt: str, uid: int, channel_fd: int) -> None:
        self._read_lifeline()
        if uid <= 0:
            self._end()
        way = way_of(self._level, self._job_fd, uid)
        self._attempt, self._children = attempt, Children(way)
        self._shared[:8] = struct.pack("q", uid)
        try:
            pid = linux.fork_into(self._job_fd)
        except OSError as error:
            _send(self._control.fileno(), op="failed", detail=str(error)[:300])
            self._end()
        if pid == 0:
            worker.run(channel_fd, self._kit)
        os.close(channel_fd)
        self._children.worker = pid
        if isinstance(way, SessionWay):
            way.worker = pid

    def _signal_worker(self, number: int) -> None:
        """Signal the worker: safe, because it is this process's own child and not reaped yet."""
        if self._children is not None and not self._children.worker_ended() and self._children.worker is not None:
            with suppress(ProcessLookupError):
                os.kill(self._children.worker, number)

    def _hold(self, *, stop: bool) -> None:
        still = moving = 0
        if stop:
            still, moving = self._pause.stop()
        else:
            still = self._pause.go_on()
        _send(self._control.fileno(), op="held", still=still, moving=moving)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._signals, 128)
        if self._children is None:
            return
        if self._children.worker_ended():
            self._finish()
        self._children.reap(_MAX_REAPED)

    def _finish(self) -> NoReturn:
        """The worker has ended: kill the rest, and report how it ended after the proof."""
        found = self._children
        assert found is not None  # noqa: S101 - only called with a worker
        found.clear()
        _send(
            self._control.fileno(),
            op="end",
            attempt=self._attempt,
            status=found.status or 0,
            cpu_s=round(found.cpu_s, 6),
            max_rss_bytes=found.max_rss_bytes,
            processes=found.processes,
        )
        self._end()

    def _end(self) -> NoReturn:
        """Kill what there is, say so after the proof, end."""
        try:
            if self._children is not None:
                self._children.clear()
            _send(self._control.fileno(), op="gone")
        finally:
            os._exit(0)


def _send(control: int, **record: object) -> None:
    """Tell the agent; one that is gone or does not read ends this process through the lifeline, not here."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=os.dup(control)) as talk:
        talk.send(codec.dump(record), socket.MSG_DONTWAIT)


def _close_others(keep: set[int]) -> None:
    start = 3
    for fd in sorted(keep):
        if fd > start:
            linux.close_range(start, fd - 1)
        start = fd + 1
    linux.close_range(start)
    for fd in keep:
        os.set_inheritable(fd, False)


if __name__ == "__main__":
    main(sys.argv)
