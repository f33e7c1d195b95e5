"""The worker of levels C to F: no view, so every other wall is put up, checked, and only then the job may run.

Called by the mould in a fresh child (``run``, never returns). Must fail closed: an error in any step is a FAILED record
and the end of this process, and no step is ever skipped. A level that needs Landlock never runs without it.

Port: this file loads the guest (runner.guest).
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

from node_agent.containment import landlock, linux, seccomp
from node_agent.containment import plan as plans
from node_agent.containment.lower import fence
from node_agent.containment.plan import Plan
from node_agent.containment.seccomp import Filter
from runner.guest import bootstrap
from runner.wire import codec, frames
from runner.wire.frames import FD_KERNEL, FD_RESULT, Op

__all__ = ["SCOPED_ABI", "Kit", "make_kit", "needs_landlock", "run"]

EXIT_SETUP: Final = 70
#: The first Landlock that keeps signals inside: without it a job of the mould's uid could stop the mould.
SCOPED_ABI: Final = 6
_MAX_FDS: Final = 253
_FDS_SPACE: Final = socket.CMSG_SPACE(4 * _MAX_FDS)
_OWN_PATHS: Final = (os.path.dirname(os.path.dirname(os.path.abspath(frames.__file__))),)
_NOTHING_LEFT: Final = "".join(f"\n{name}:\t{0:016x}" for name in ("CapInh", "CapPrm", "CapEff")).encode()
_FENCED: Final = b"\nNoNewPrivs:\t1\nSeccomp:\t2\n"


class CheckError(Exception):
    """The finished fence is not what it must be; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Kit:
    """What the mould made before the fork: the filters, in the order in which they are put on."""

    filters: tuple[Filter, ...]


@dataclass(slots=True)
class _Given:
    """What arrived: the plan, and the descriptors that came with it."""

    plan: Plan
    stdio: list[int]
    grants: list[int]
    workspace: str
    #: Whether the job gets a uid that its mould does not have.
    own_uid: bool
    step: str = "plan"


def make_kit() -> Kit:
    """Load and make what the worker needs."""
    bootstrap.preload()
    return Kit((fence.no_sockets(), seccomp.build(allow_unix=False)))


def needs_landlock(level: str, *, own_uid: bool) -> bool:
    """Return whether a level is only offered behind Landlock: where the job could else reach its mould or its group."""
    return level == "E" or (level == "C" and not own_uid)


def run(channel_fd: int, kit: Kit) -> NoReturn:
    """Restrict this process as the plan says, then become the job."""
    given: _Given | None = None
    try:
        os.dup2(channel_fd, FD_KERNEL)
        linux.unblock_signals()
        given = _receive()
        _restrict(kit, given)
        os.write(FD_KERNEL, frames.pack(Op.READY))
    except BaseException as error:  # noqa: BLE001 - nothing may unwind into the mould's loop
        _fail(given.step if given is not None else "plan", error)
    try:
        plan = given.plan
        # The base environment names the places of a view; this process has none, and is this job's alone.
        bootstrap.BASE_ENVIRONMENT.update(HOME=given.workspace, TMPDIR=os.path.join(given.workspace, "tmp"))
        os._exit(bootstrap.main(plan.kind, plan.task_paths, plan.result_bytes))
    finally:
        os._exit(EXIT_SETUP)


def _receive() -> _Given:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=os.dup(FD_KERNEL)) as channel:
        data, ancillary, flags, _ = channel.recvmsg(frames.MAX_RECORD_BYTES, _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(EXIT_SETUP)  # the agent is gone
    fds = [fd for _, _, packed in ancillary for fd in struct.unpack(f"{len(packed) // 4}i", packed)]
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        raise CheckError("the plan arrived cut short")
    op, body = frames.unpack(data)
    if op is not Op.PLAN:
        raise CheckError("the first record is no plan")
    plan = plans.loads(body)
    if not plan.allow_exec:
        raise CheckError("without a view nothing keeps a job from executing its own files")
    stdio = 3 if plan.kind == "task" else 2
    # The workspace comes between the job's own descriptors and its grants.
    if len(fds) != stdio + 1 + len(plan.mounts):
        raise CheckError("the plan and its descriptors don't fit")
    place = os.readlink(f"/proc/self/fd/{fds[stdio]}")
    return _Given(plan, fds[:stdio], fds[stdio + 1 :], place, own_uid=plan.uid != os.geteuid())


def _restrict(kit: Kit, given: _Given) -> None:
    plan = given.plan
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("session", _own_session),
        # Not by how much it changes: the mould has another one.
        ("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, plan.nice)),
        ("limits", lambda: _limit(plan, own_uid=given.own_uid)),
        ("workspace", lambda: os.chdir(given.workspace)),
        ("identity", lambda: _become(plan)),
        ("capabilities", _give_up_capabilities),
        ("cwd", lambda: _enter(given)),
        ("no_new_privs", linux.no_new_privs),
        ("landlock", lambda: _fence_in(given)),
        ("descriptors", lambda: _arrange(given.stdio)),
        ("seccomp", lambda: _filter(kit)),
        ("dumpable", lambda: linux.set_dumpable(True)),
        ("check", lambda: _check(plan)),
    )
    for step, act in steps:
        given.step = step
        act()


def _own_session() -> None:
    os.setsid()
    os.umask(0o022)


def _limit(plan: Plan, *, own_uid: bool) -> None:
    limits = {
        # 0 would not stop a core_pattern that pipes (attack 19).
        resource.RLIMIT_CORE: 1,
        # Descriptors in flight count per user (attack 34).
        resource.RLIMIT_NOFILE: min(plan.files, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // (1 if own_uid else 4)),
        # The kernel counts per uid. Of a uid that others use, this is a brake on bombs and no total.
        resource.RLIMIT_NPROC: plan.pids + (0 if own_uid else _tasks_of(plan.uid)),
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_SIGPENDING: 1024,  # counted per user, too (attack 39)
    }
    if plan.data_bytes is not None:
        # Not the address space: programs that reserve much and use little (node, go) would not start.
        limits[resource.RLIMIT_DATA] = plan.data_bytes
    if plan.file_bytes is not None:
        limits[resource.RLIMIT_FSIZE] = plan.file_bytes
    for number, value in limits.items():
        hard = resource.getrlimit(number)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (least, least))


def _tasks_of(uid: int) -> int:
    """Count the uid's threads, as the kernel does."""
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _become(plan: Plan) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        with suppress(OSError):
            # Some containers' root may not; no_new_privs alone already keeps the set from ever being given.
            linux.drop_bounding()
    os.setresgid(plan.gid, plan.gid, plan.gid)
    os.setresuid(plan.uid, plan.uid, plan.uid)


def _give_up_capabilities() -> None:
    linux.drop_ambient()
    linux.drop_capabilities()


def _enter(given: _Given) -> None:
    os.makedirs("tmp", mode=0o700, exist_ok=True)
    if given.plan.cwd != "/work":
        os.chdir(given.plan.cwd)


def _fence_in(given: _Given) -> None:
    plan = given.plan
    version = landlock.restrict(fence.rules(plan, given.workspace, _OWN_PATHS, given.grants))
    needed = SCOPED_ABI if needs_landlock(plan.level, own_uid=given.own_uid) else 0
    if plan.mounts and needed == 0:
        needed = 1
    if version < needed:
        raise CheckError(f"level {plan.level} needs Landlock {needed}, this kernel has {version}")


def _filter(kit: Kit) -> None:
    for each in kit.filters:
        seccomp.install(each)


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


def _check(plan: Plan) -> None:
    """Assert that nothing is left to give up. Raises CheckError."""
    with open("/proc/self/status", "rb") as file:
        status = file.read()
    if _NOTHING_LEFT not in status or f"\nCapAmb:\t{0:016x}".encode() not in status:
        raise CheckError("capabilities are left")
    if _FENCED not in status:
        raise CheckError("no_new_privs or seccomp is not on")
    ids = "\nUid:" + f"\t{plan.uid}" * 4 + "\nGid:" + f"\t{plan.gid}" * 4 + "\n"
    if ids.encode() not in status:
        raise CheckError("a foreign uid or gid is left")
    wanted = {0, 1, 2, FD_KERNEL} | ({FD_RESULT} if plan.kind == "task" else set())
    found = {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}
    if found != wanted:
        raise CheckError(f"descriptors are not as planned: {sorted(found ^ wanted)}")


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _fail(step: str, error: BaseException) -> NoReturn:
    errno = error.errno or 0 if isinstance(error, OSError) else 0
    body = codec.dump({"step": step, "errno": errno, "detail": ascii(str(error) or type(error).__name__)[1:301]})
    with suppress(OSError):
        os.write(FD_KERNEL, frames.pack(Op.FAILED, body))
    os._exit(EXIT_SETUP)
