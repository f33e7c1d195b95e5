"""The worker: an attempt's first process, from the fork to the moment it may run the job.

Called by the mould in a fresh child (``run``, never returns). Takes the plan from its channel, puts itself into the
view, gives up every right, checks that it did, answers READY, and hands over to the guest, which reads the payload.
Must fail closed: an error in any step is a FAILED record and the end of this process, and no step is ever skipped.

Port: the one file of the containment that loads the guest (runner.guest).
Source: DESIGN §5; the order of steps is part of the design.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from node_agent.containment import landlock, linux, seccomp, view
from node_agent.containment.plan import Mount, Plan
from node_agent.containment.seccomp import Filter
from runner.guest import bootstrap, call
from runner.wire import codec, frames, record
from runner.wire.frames import FD_KERNEL, FD_RESULT, Op

__all__ = ["Progress", "run", "warm_up"]

EXIT_SETUP: Final = 70
#: Most descriptors that one message carries (SCM_MAX_FD).
_MAX_FDS: Final = 253
#: Descriptors are parked here before they take their fixed numbers.
_PARKING: Final = 512
#: The package that a task's module imports; in an editable install it lies outside of the environment.
_RUNNER: Final = os.path.dirname(os.path.dirname(os.path.abspath(frames.__file__)))
_NO_CAPABILITIES: Final = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


class CheckError(Exception):
    """The finished sandbox is not what it must be; the message says what is wrong."""


@dataclass(slots=True)
class Progress:
    """The step that is being done, for the report of a failure."""

    step: str = "plan"


def warm_up() -> None:
    """Have everything loaded and cached in the zygote that workers need: a plan read once is read fast."""
    record.loads(Plan, record.dumps(Plan("job.1", "command", "A", 1, 1, mounts=(Mount("/x", "read", "dir"),))))
    call.preload()


def run(channel_fd: int, prepared: view.Prepared, filters: dict[bool, Filter]) -> NoReturn:
    """Restrict this process as the plan says, then become the job."""
    progress = Progress()
    channel = _Channel(channel_fd)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        plan = _restrict(channel, prepared, filters, progress)
        channel.socket.send(frames.pack(Op.READY))
    except BaseException as error:  # noqa: BLE001 - nothing may unwind into the mould's loop
        _fail(channel.socket, progress.step, error)
    try:
        bootstrap.main(channel.socket, plan.kind, plan.task_paths, plan.result_bytes)
    finally:
        os._exit(EXIT_SETUP)


class _Channel:
    """The attempt's channel, whatever number it has at the moment."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)

    def moved(self, fd: int) -> None:
        """It is open as ``fd`` now; the old number is closed by who moved it."""
        self.socket.detach()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)


def _restrict(channel: _Channel, prepared: view.Prepared, filters: dict[bool, Filter], progress: Progress) -> Plan:
    plan, fds = _receive(channel.socket)
    stdio = 3 if plan.kind == "task" else 2
    linux.unshare(linux.NEWNS | linux.NEWIPC | linux.NEWCGROUP)
    progress.step = "view"
    view.build(plan, prepared, (_RUNNER,) if plan.kind == "task" else ())
    progress.step = "grant"
    view.attach_grants(plan, fds[stdio:])
    progress.step = "root"
    view.enter()
    progress.step = "descriptors"
    _arrange(channel, fds[:stdio])
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("session", _own_session),
        ("limits", lambda: _limit(plan)),
        ("identity", lambda: _become(plan)),
        ("capabilities", _give_up_capabilities),
        ("cwd", lambda: os.chdir(plan.cwd)),
        ("no_new_privs", linux.no_new_privs),
        ("landlock", lambda: landlock.restrict(_rules(plan))),
        ("seccomp", lambda: seccomp.install(filters[plan.allow_unix])),
        # Its own /proc entries become readable to the job; nothing but this process is there yet.
        ("dumpable", lambda: linux.set_dumpable(True)),
        ("check", lambda: _check(plan)),
    )
    for progress.step, act in steps:
        act()
    return plan


def _receive(channel: socket.socket) -> tuple[Plan, list[int]]:
    data, fds, flags, _ = socket.recv_fds(channel, frames.MAX_RECORD_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(EXIT_SETUP)  # the agent is gone
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        raise CheckError("the plan arrived cut short")
    op, body = frames.unpack(data)
    if op is not Op.PLAN:
        raise CheckError("the first record is no plan")
    plan = record.loads(Plan, body)
    if plan.uid <= 0 or plan.gid <= 0:
        raise CheckError("a job never runs as root")
    return plan, fds


def _arrange(channel: _Channel, stdio: list[int]) -> None:
    """Give every descriptor its fixed number and close all others."""
    parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _PARKING) for fd in (channel.socket.fileno(), *stdio)]
    null = fcntl.fcntl(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), fcntl.F_DUPFD_CLOEXEC, _PARKING)
    places = {0: null, FD_KERNEL: parked[0], 1: parked[1], 2: parked[2]}
    if len(stdio) > 2:
        places[FD_RESULT] = parked[3]
    for number, fd in places.items():
        os.dup2(fd, number, inheritable=True)
    channel.moved(FD_KERNEL)
    start = 3
    for number in sorted(places):
        if number > start:
            linux.close_range(start, number - 1)
        start = max(start, number + 1)
    linux.close_range(start)


def _own_session() -> None:
    os.setsid()
    os.umask(0o022)
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _limit(plan: Plan) -> None:
    files = plan.files
    if plan.level == "B":
        # Descriptors in flight count per user: a job must not use up the agent's (attack 34).
        files = min(files, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 4)
    limits = {
        # 0 would not stop a core_pattern that pipes (attack 19).
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_NOFILE: files,
        # At B the mould counts too: the kernel counts per user namespace and uid. At A the cgroup comes first.
        resource.RLIMIT_NPROC: plan.pids + 1,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
    }
    if plan.address_space_bytes is not None:
        limits[resource.RLIMIT_AS] = plan.address_space_bytes
    if plan.file_bytes is not None:
        limits[resource.RLIMIT_FSIZE] = plan.file_bytes
    for number, value in limits.items():
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))


def _become(plan: Plan) -> None:
    if plan.level == "A":
        os.setgroups([])
    os.setresgid(plan.gid, plan.gid, plan.gid)
    os.setresuid(plan.uid, plan.uid, plan.uid)


def _give_up_capabilities() -> None:
    linux.drop_ambient()
    linux.drop_capabilities()


def _rules(plan: Plan) -> list[tuple[str, int]]:
    writable = ["/work", "/tmp", "/dev/shm"]  # noqa: S108 - the job's own tmpfs mounts
    writable += [grant.path for grant in plan.mounts if grant.mode == "write"]
    return [
        ("/", landlock.READ),
        ("/dev", landlock.READ | landlock.USE),
        ("/proc", landlock.READ | landlock.USE),
        *((path, landlock.WRITE) for path in writable),
    ]


def _check(plan: Plan) -> None:
    """Assert that nothing is left to give up and nothing leads outside. Raises CheckError."""
    status = _status()
    held = [name for name in _NO_CAPABILITIES if int(status[name], 16)]
    if held:
        raise CheckError(f"capabilities are left in {', '.join(held)}")
    if status["NoNewPrivs"] != "1" or status["Seccomp"] != "2":
        raise CheckError("no_new_privs or seccomp is not on")
    if set(status["Uid"].split()) != {str(plan.uid)} or set(status["Gid"].split()) != {str(plan.gid)}:
        raise CheckError("a foreign uid or gid is left")
    if plan.level == "A" and status["Groups"].split():
        raise CheckError("supplementary groups are left")
    wanted = {0, 1, 2, FD_KERNEL} | ({FD_RESULT} if plan.kind == "task" else set())
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    # One number in the list was the list's own descriptor, which is closed again.
    extra = {fd for fd in found - wanted if _is_open(fd)}
    if extra or wanted - found:
        raise CheckError(f"descriptors are not as planned: {sorted(extra | (wanted - found))}")
    _check_inside()


def _check_inside() -> None:
    """Walk up from the working folder: it must end at the view's root (attack 46)."""
    root = os.stat("/")
    at = "."
    while True:
        here, above = os.stat(at), os.stat(f"{at}/..")
        if os.path.samestat(here, above):
            break
        at += "/.."
    if not os.path.samestat(here, root):
        raise CheckError("the working folder lies outside the view")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _status() -> dict[str, str]:
    fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 1 << 16).decode("ascii", "replace")
    finally:
        os.close(fd)
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def _fail(channel: socket.socket, step: str, error: BaseException) -> NoReturn:
    errno = error.errno or 0 if isinstance(error, OSError) else 0
    body = codec.dump({"step": step, "errno": errno, "detail": ascii(str(error) or type(error).__name__)[1:301]})
    with suppress(OSError):
        channel.send(frames.pack(Op.FAILED, body))
    os._exit(EXIT_SETUP)
