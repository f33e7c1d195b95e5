"""The mould: pid 1 of a slot's namespaces. Forks one worker per attempt and proves that nothing of it is left.

Started by the zygote in a fresh child (``run``), told what to do by the agent over its control socket. Never runs job
code, never reads an argument, an environment value or a plan but those that name nothing of a job (known.py): it passes
one descriptor on and closes it. Must end, and with it everything in its pid namespace, when the lifeline closes, when
the newest deadline on it has passed, when the control socket closes, and after anything that it does not expect.

    agent → mould   the orders of orders.py; BEGIN comes with the far end of the attempt's channel
    mould → agent   an End of orders.py · {"op": "up"} · {"op": "failed", …} · {"op": "odd", "why"} ·
                    {"op": "held", "still", "moving"} answers STOP and CONT · {"op": "door"} + a listener on the
                    loopback of this net namespace, one for each door that BEGIN names, in their order: what a job with
                    net grants reaches, served by the egress process; its service, served by the broker

An end is sent after kill(-1) and ECHILD: the kernel's word that the namespace holds nobody else.

A job's path goes on in the worker (worker.py restricts it) and from there in runner/guest/bootstrap.py.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from node_agent.containment import linux, oomscore, outfit, view, worker
from node_agent.containment.orders import BEGIN, CONT, SIGNALS, STOP, end_record, order_of
from node_agent.containment.plan import DOORS
from node_agent.containment.quiet import Quiet
from node_agent.containment.reaper import Reaper
from node_agent.containment.stopping import Stopper
from node_agent.containment.worker import Kit
from runner.wire import codec

__all__ = ["Seat", "run"]

EXIT_LIFELINE: Final = 112
EXIT_DEADLINE: Final = 113
EXIT_CONTROL: Final = 114
EXIT_ODD: Final = 115
EXIT_SETUP: Final = 116

_BACKLOG: Final = 64
_MAX_CONTROL_BYTES: Final = 4096
_FD_SPACE: Final = socket.CMSG_SPACE(4)
#: Children reaped before the lifeline is looked at again: a job can make zombies as fast as they are reaped.
_MAX_REAPED: Final = 64
_SIOCSIFFLAGS: Final = 0x8914
_UP_AND_RUNNING: Final = 0x41
_HOLDS: Final = (STOP, CONT)
_CLOEXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_one_fd: Final = struct.Struct("i").unpack


@dataclass(frozen=True, slots=True)
class Seat:
    """What the zygote hands to a new mould.

    ``job_fd``: the cgroup v2 group that workers are born in, if any. ``paths``: the node's own, for its views to show.
    """

    level: Literal["A", "B"]
    join_paths: tuple[str, ...]
    lifeline_fd: int
    control_fd: int
    job_fd: int | None
    paths: tuple[str, ...]
    kit: Kit


def run(seat: Seat) -> NoReturn:
    """Set up, serve, end. Called in the child that is pid 1 of its namespace."""
    code = EXIT_SETUP
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=seat.control_fd)
    progress = worker.Progress()
    try:
        prepared = _set_up(seat, progress)
        _send(control, op="up")
        code = EXIT_ODD
        _Mould(seat, control, prepared).serve()
    except OSError as error:
        _send(control, op="failed", step=progress.step, errno=error.errno or 0, detail=str(error)[:300])
    finally:
        # Whatever happened: this process is pid 1, its end is the end of the namespace.
        os._exit(code)


def _set_up(seat: Seat, progress: worker.Progress) -> view.Prepared:
    progress.step = "mould"
    if os.getpid() != 1:
        raise OSError(0, "the mould is not pid 1 of its namespace")
    _close_others({0, 1, 2, seat.lifeline_fd, seat.control_fd, seat.job_fd or 0})
    # To the first process of a namespace the default action of a signal is nothing; its workers start with defaults.
    for number in (signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # SIGINT has the interpreter's handler, for tasks: here it must not interrupt, whoever sends it.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGCHLD, signal.SIGINT})
    oomscore.at_least(oomscore.OOM_SCORE_ADJ)
    progress.step = "cgroup"
    for path in seat.join_paths:
        with open(path, "w", encoding="ascii") as procs:
            procs.write("0")
    progress.step = "mould"
    linux.set_dumpable(False)
    if seat.level == "A":
        linux.set_parent_death_signal(signal.SIGKILL)
        linux.unshare(linux.NEWNS | linux.NEWNET | linux.NEWIPC | linux.NEWUTS)
    linux.mount(None, "/", None, linux.SLAVE_TREE)
    socket.sethostname("job")
    _loopback_up()
    progress.step = "view"
    prepared = view.prepare(seat.level, (*worker.OWN_PATHS, *seat.paths))
    progress.step = "capabilities"
    linux.drop_bounding()
    linux.lock_securebits()
    return prepared


class _Mould:
    """Serves one attempt at a time."""

    def __init__(self, seat: Seat, control: socket.socket, prepared: view.Prepared) -> None:
        self._seat = seat
        self._control = control
        self._lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=seat.lifeline_fd)
        self._news = select.poll()
        self._news.register(self._lifeline, select.POLLIN)
        self._signals = linux.signal_descriptor(signal.SIGCHLD)
        self._quiet = Quiet()
        self._more = False
        self._timer = linux.timer_descriptor()
        self._reaper = Reaper()
        self._stopper = Stopper(f"{prepared.stage}/proc")
        self._lent = oomscore.Lent.of(oomscore.at_least(oomscore.OOM_SCORE_ADJ)) if seat.level == "A" else None
        self._outfit = outfit.make(prepared, seat.kit, (*seat.paths, *worker.OWN_PATHS))
        self._deadline_ns: int | None = None
        self._attempt = ""
        self._worker: int | None = None
        self._status: int | None = None
        self._cpu_us = 0
        self._max_rss_bytes = 0
        self._processes = 0
        self._left = 0
        _settle()

    def serve(self) -> NoReturn:
        """Answer the agent until something ends this mould."""
        poll = select.poll()
        for fd in (self._lifeline.fileno(), self._timer, self._control.fileno(), self._signals):
            poll.register(fd, select.POLLIN)
        while True:
            ready = dict(poll.poll(0 if self._more else None))
            # The lifeline first: no work is done on an old deadline.
            if self._lifeline.fileno() in ready or self._timer in ready:
                self._read_lifeline()
            if self._more or self._signals in ready:
                self._reap()
            if self._control.fileno() in ready:
                self._obey()

    def _read_lifeline(self) -> None:
        """Read to the newest record; end if the agent is gone or its lease has run out."""
        news = False
        # Asked before it is read: an exception for "nothing there" costs more than all the rest of this.
        while self._news.poll(0):
            news = True
            record = self._lifeline.recv(2 * linux.SIZE_OF_DEADLINE, socket.MSG_DONTWAIT)
            if not record:
                os._exit(EXIT_LIFELINE)
            if len(record) != linux.SIZE_OF_DEADLINE:
                os._exit(EXIT_ODD)
            (self._deadline_ns,) = struct.unpack("q", record)
        if self._deadline_ns is None:
            return
        if time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= self._deadline_ns:
            os._exit(EXIT_DEADLINE)
        if news:
            linux.timer_arm(self._timer, self._deadline_ns)

    def _obey(self) -> None:
        data, ancillary, _, _ = self._control.recvmsg(_MAX_CONTROL_BYTES, _FD_SPACE, _CLOEXEC)
        if not data:
            os._exit(EXIT_CONTROL)
        order, attempt, doors, lesson = order_of(data)
        if order == BEGIN and len(ancillary) == 1 and self._worker is None:
            # The space is that of one descriptor.
            self._begin(attempt, _one_fd(ancillary[0][2])[0], doors, lesson)
        elif order in SIGNALS and not ancillary:
            self._signal_worker(attempt, SIGNALS[order])
        elif order in _HOLDS and not ancillary:
            self._hold(attempt, stop=order == STOP)
        else:
            os._exit(EXIT_ODD)

    def _begin(self, attempt: str, channel_fd: int, doors: list[str], lesson: bytes) -> None:
        self._read_lifeline()
        if self._seat.level == "B":
            # Adopted by the zygote by now for certain, so its death is the one that is reported.
            linux.set_parent_death_signal(signal.SIGKILL)
        changed = self._quiet.change()
        if changed:
            _send(self._control, op="odd", why=changed)
            os._exit(EXIT_ODD)
        if lesson:
            worker.learn(self._outfit, lesson)
            _settle()
        self._attempt, self._status = attempt, None
        self._cpu_us = self._max_rss_bytes = self._processes = self._left = 0
        try:
            for name in doors:
                _send_listener(self._control, DOORS[name])  # type: ignore[index] # a wrong name ends this mould
            pid = self._fork()
        except OSError as error:
            _send(self._control, op="odd", why=str(error)[:300])
            os._exit(EXIT_ODD)
        if pid == 0:
            worker.run(channel_fd, self._outfit)
        os.close(channel_fd)
        self._worker = pid

    def _fork(self) -> int:
        lent = self._lent
        if lent is None:
            return linux.fork_into(self._seat.job_fd)
        lent.begin()
        pid = linux.fork_into(self._seat.job_fd)
        if pid:
            lent.end()
        return pid

    def _signal_worker(self, attempt: str, number: int) -> None:
        """Signal the worker: safe, because it is this process's own child and not reaped yet."""
        if self._worker is not None and self._status is None and attempt == self._attempt:
            with suppress(ProcessLookupError):
                os.kill(self._worker, number)

    def _hold(self, attempt: str, *, stop: bool) -> None:
        """Stop the attempt's processes or let them go on; one that ends by itself meanwhile answers with nobody."""
        still = moving = 0
        if self._worker is not None and self._status is None and attempt == self._attempt:
            if stop:
                still, moving = self._stopper.stop()
            else:
                still = self._stopper.go_on()
        _send(self._control, op="held", still=still, moving=moving)

    def _reap(self) -> None:
        try:  # noqa: SIM105 - suppress() touches six more pages, which are copied anew after each fork
            os.read(self._signals, 128)
        except BlockingIOError:
            pass
        self._more = False
        if self._status is not None:
            _kill_everyone()
        for _ in range(_MAX_REAPED):
            pid = self._reaper.reap()
            if pid <= 0:
                if pid < 0:
                    self._report()
                return
            status, cpu_us, max_rss_bytes = self._reaper.told()
            self._cpu_us += cpu_us
            self._max_rss_bytes = max(self._max_rss_bytes, max_rss_bytes)
            self._processes += 1
            self._left += self._status is not None
            if pid == self._worker:
                self._status = status
                _kill_everyone()
        self._more = True

    def _report(self) -> None:
        """ECHILD after the worker's end: nothing else lives in this namespace. Say so, once."""
        if self._status is None:
            return
        counted = (self._cpu_us, self._max_rss_bytes, self._processes, self._left)
        try:  # noqa: SIM105 - as in _reap
            self._control.send(end_record(self._attempt, self._status, *counted))
        except OSError:  # as in _send
            pass
        self._worker = self._status = None
        self._stopper.forget()


def _settle() -> None:
    """Leave nothing for a worker to tidy up: it would copy every page that it looks at.

    No object made so far is looked at by a worker's collector, whose first run they would bring about, too.
    """
    gc.freeze()
    linux.tidy_heap()


def _kill_everyone() -> None:
    """SIGKILL to every other process of the namespace. Outside of one this would be the whole host."""
    if os.getpid() != 1:
        os._exit(EXIT_ODD)
    linux.kill_others()


def _send(control: socket.socket, **record: object) -> None:
    """Tell the agent; an agent that is gone or does not read ends this mould through its lifeline, not here."""
    with suppress(OSError):
        control.send(codec.dump(record))


def _send_listener(control: socket.socket, address: tuple[str, int]) -> None:
    """Give the agent a listener; none of the job's processes ever holds it, and this process forgets it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(_BACKLOG)
        socket.send_fds(control, [codec.dump({"op": "door"})], [listener.fileno()])


def _close_others(keep: set[int]) -> None:
    start = 0
    for fd in sorted(keep):
        if fd > start:
            linux.close_range(start, fd - 1)
        start = fd + 1
    linux.close_range(start)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP_AND_RUNNING))
