"""The worker: an attempt's first process, from the fork to the moment it may run the job.

Called by the mould in a fresh child (``run``, never returns). Takes the plan from its channel, puts itself into the
view, gives up every right, checks that it did, answers READY, and hands over to the guest, which reads the payload.
Must fail closed: an error in any step is a FAILED record and the end of this process, and no step is ever skipped.

Port: the one file of the containment that loads the guest (runner.guest).
Source: DESIGN §5; the order of steps is part of the design.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from node_agent.containment import landlock, linux, seccomp, view
from node_agent.containment import plan as plans
from node_agent.containment.plan import Plan
from node_agent.containment.seccomp import Filter
from runner.guest import bootstrap
from runner.wire import codec, frames
from runner.wire.frames import FD_KERNEL, FD_RESULT, Op

__all__ = ["OWN_PATHS", "Kit", "Progress", "make_kit", "run"]

EXIT_SETUP: Final = 70
#: Most descriptors that one message carries (SCM_MAX_FD).
_MAX_FDS: Final = 253
_FDS_SPACE: Final = socket.CMSG_SPACE(4 * _MAX_FDS)
#: The package that a task's module imports; in an editable install it lies outside of the environment.
OWN_PATHS: Final = (os.path.dirname(os.path.dirname(os.path.abspath(frames.__file__))),)
_READY: Final = frames.pack(Op.READY)
_PLAN: Final = int(Op.PLAN)
#: How /proc/self/status shows a process without any capability, with no_new_privs and a seccomp filter.
_NOTHING_LEFT: Final = (
    "".join(f"\n{name}:\t{0:016x}" for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    + "\nNoNewPrivs:\t1\nSeccomp:\t2\n"
).encode()


class CheckError(Exception):
    """The finished sandbox is not what it must be; the message says what is wrong."""


@dataclass(slots=True)
class Progress:
    """The step that is being done, for the report of a failure."""

    step: str = "plan"


@dataclass(frozen=True, slots=True)
class Kit:
    """What every worker finds made: both filters, and a socket object for whatever is open as FD_KERNEL."""

    filters: dict[bool, Filter]
    channel: socket.socket


def make_kit() -> Kit:
    """Load and make, in the zygote, what all workers need: what is made before the fork is not made again by each."""
    bootstrap.preload()
    sample = plans.dumps(Plan("job.1", "task", "A", 1, 1))
    for _ in range(bootstrap.REHEARSALS):
        plans.loads(sample)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.dup2(near.fileno(), FD_KERNEL, inheritable=False)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=FD_KERNEL)
    for fd in (near.detach(), far.detach(), FD_KERNEL):
        os.close(fd)
    return Kit({allow: seccomp.build(allow_unix=allow) for allow in (True, False)}, channel)


def run(channel_fd: int, prepared: view.Prepared, kit: Kit) -> NoReturn:
    """Restrict this process as the plan says, then become the job."""
    progress = Progress()
    try:
        os.dup2(channel_fd, FD_KERNEL)
        linux.unblock_signals()
        plan = _restrict(kit, prepared, progress)
        os.write(FD_KERNEL, _READY)
    except BaseException as error:  # noqa: BLE001 - nothing may unwind into the mould's loop
        _fail(progress.step, error)
    try:
        bootstrap.main(plan.kind, plan.task_paths, plan.result_bytes)
    finally:
        os._exit(EXIT_SETUP)


def _restrict(kit: Kit, prepared: view.Prepared, progress: Progress) -> Plan:
    # It may wait here for its plan, if it was forked ahead.
    linux.unshare(linux.NEWNS | linux.NEWIPC | linux.NEWCGROUP)
    plan, fds = _receive(kit.channel)
    stdio = 3 if plan.kind == "task" else 2
    own_paths = OWN_PATHS if plan.kind == "task" else ()
    progress.step = "view"
    if prepared.rooted and not plan.mounts:
        view.furnish(plan, prepared, own_paths)
    else:
        view.build(plan, prepared, own_paths)
        progress.step = "grant"
        view.attach_grants(plan, fds[stdio:])
        progress.step = "root"
        view.enter()
    progress.step = "descriptors"
    _arrange(fds[:stdio])
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("session", _own_session),
        ("limits", lambda: _limit(plan)),
        ("identity", lambda: _become(plan)),
        ("capabilities", _give_up_capabilities),
        ("cwd", lambda: os.chdir(plan.cwd)),
        ("no_new_privs", linux.no_new_privs),
        ("landlock", lambda: landlock.restrict(_rules(plan))),
        ("seccomp", lambda: seccomp.install(kit.filters[plan.allow_unix])),
        # Its own /proc entries become readable to the job; nothing but this process is there yet.
        ("dumpable", lambda: linux.set_dumpable(True)),
        ("check", lambda: _check(plan)),
    )
    for progress.step, act in steps:
        act()
    return plan


def _receive(channel: socket.socket) -> tuple[Plan, list[int]]:
    data, ancillary, flags, _ = channel.recvmsg(frames.MAX_RECORD_BYTES, _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(EXIT_SETUP)  # the agent is gone
    fds = [fd for _, _, packed in ancillary for fd in struct.unpack(f"{len(packed) // 4}i", packed)]
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        raise CheckError("the plan arrived cut short")
    if data[0] != _PLAN:
        raise CheckError("the first record is no plan")
    return plans.loads(data[1:]), fds


def _arrange(stdio: list[int]) -> None:
    """Give every descriptor its fixed number and close all others."""
    if max(stdio) >= FD_KERNEL or min(stdio) <= 2:
        raise CheckError("a descriptor arrived where a fixed one belongs")
    os.dup2(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), 0)
    os.dup2(stdio[0], 1)
    os.dup2(stdio[1], 2)
    if len(stdio) > 2:
        os.dup2(stdio[2], FD_RESULT)
    linux.close_range(3, FD_KERNEL - 1)
    linux.close_range(FD_KERNEL + 1, FD_RESULT - 1)
    linux.close_range(FD_RESULT + (len(stdio) > 2))


def _own_session() -> None:
    os.setsid()
    os.umask(0o022)


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
    granted = [grant.path for grant in plan.mounts if grant.mode == "write"]
    return [
        ("/", landlock.READ),
        ("/dev", landlock.READ | landlock.USE),
        ("/proc", landlock.READ | landlock.USE),
        # The job's own tmpfs mounts, and the write grants.
        *((path, landlock.WRITE) for path in ("/work", "/tmp", "/dev/shm", *granted)),  # noqa: S108 - the own tmpfs
    ]


def _check(plan: Plan) -> None:
    """Assert that nothing is left to give up and nothing leads outside. Raises CheckError."""
    status = _status()
    if _NOTHING_LEFT not in status:
        raise CheckError("capabilities are left, or no_new_privs or seccomp is not on")
    ids = "\nUid:" + f"\t{plan.uid}" * 4 + "\nGid:" + f"\t{plan.gid}" * 4 + "\n"
    if ids.encode() not in status:
        raise CheckError("a foreign uid or gid is left")
    if plan.level == "A" and os.getgroups():
        raise CheckError("supplementary groups are left")
    wanted = {0, 1, 2, FD_KERNEL} | ({FD_RESULT} if plan.kind == "task" else set())
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    # One number in the list was the list's own descriptor, which is closed again.
    extra = {fd for fd in found - wanted if _is_open(fd)}
    if extra or wanted - found:
        raise CheckError(f"descriptors are not as planned: {sorted(extra | (wanted - found))}")
    if not os.getcwd().startswith("/"):
        raise CheckError("the working folder lies outside the view")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _status() -> bytes:
    fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 14)
    finally:
        os.close(fd)


def _fail(step: str, error: BaseException) -> NoReturn:
    errno = error.errno or 0 if isinstance(error, OSError) else 0
    body = codec.dump({"step": step, "errno": errno, "detail": ascii(str(error) or type(error).__name__)[1:301]})
    with suppress(OSError):
        os.write(FD_KERNEL, frames.pack(Op.FAILED, body))
    os._exit(EXIT_SETUP)
