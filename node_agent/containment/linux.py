"""System calls that Python does not offer, one thin checked wrapper each.

Called by the zygote, the mould, the worker and the host side of the containment. Must never decide anything: a call
succeeds or raises OSError with the call's name.

Source: the man pages of the calls; numbers from asm-generic/unistd.h and x86's syscall_64.tbl.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import signal
import struct
import sys
from typing import Final

from node_agent.containment.sysnumbers import NUMBERS

__all__ = [
    "BE_DUMPABLE",
    "CLEAR_AMBIENT",
    "DETACH",
    "NEWCGROUP",
    "NEWIPC",
    "NEWNET",
    "NEWNS",
    "NEWPID",
    "NEWUSER",
    "NEWUTS",
    "NODEV",
    "NOEXEC",
    "NOSUID",
    "NO_NEW_PRIVS",
    "RDONLY",
    "RESOLVE_BENEATH",
    "RESOLVE_NO_MAGICLINKS",
    "RESOLVE_NO_SYMLINKS",
    "SIZE_OF_DEADLINE",
    "close_range",
    "drop_ambient",
    "drop_bounding",
    "drop_capabilities",
    "fork_into",
    "heed_signals",
    "kill_others",
    "lock_securebits",
    "mount",
    "mount_setattr",
    "move_mount",
    "no_new_privs",
    "open_tree",
    "openat2",
    "pivot_root",
    "raw",
    "set_dumpable",
    "set_parent_death_signal",
    "set_subreaper",
    "setns",
    "signal_descriptor",
    "syscall",
    "tidy_heap",
    "timer_arm",
    "timer_descriptor",
    "umount",
    "unblock_signals",
    "unshare",
]

NEWNS: Final = 0x0002_0000
NEWCGROUP: Final = 0x0200_0000
NEWUTS: Final = 0x0400_0000
NEWIPC: Final = 0x0800_0000
NEWUSER: Final = 0x1000_0000
NEWPID: Final = 0x2000_0000
NEWNET: Final = 0x4000_0000

#: Mount flags; MS_* and MOUNT_ATTR_* share these four values.
RDONLY: Final = 1
NOSUID: Final = 2
NODEV: Final = 4
NOEXEC: Final = 8
SLAVE_TREE: Final = 0x4000 | 0x80000
DETACH: Final = 2

RESOLVE_NO_MAGICLINKS: Final = 0x02
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08

#: A lifeline record: one signed 64-bit CLOCK_BOOTTIME deadline in nanoseconds.
SIZE_OF_DEADLINE: Final = 8

_AT_FDCWD: Final = -100
_MS_PRIVATE: Final = 1 << 18
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_CLOEXEC: Final = 0o2000000
_NONBLOCK: Final = 0o4000
_CLOCK_BOOTTIME: Final = 7

_NUMBERS: Final = NUMBERS.get(os.uname().machine, {})
_KILL_OTHERS: Final = (_NUMBERS.get("kill", -1), -1, int(signal.SIGKILL), 0, 0, 0, 0)
_SYSCALL_WORDS: Final = 6
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_CLONE3: Final = 435
_CLOSE_RANGE: Final = 436
_OPENAT2: Final = 437
_MOUNT_SETATTR: Final = 442

_CLONE_CHILD_CLEARTID: Final = 0x0020_0000
_CLONE_CHILD_SETTID: Final = 0x0100_0000
_CLONE_INTO_CGROUP: Final = 0x2_0000_0000
#: Size of struct clone_args, version 2.
_CLONE_ARGS_BYTES: Final = 88

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_GET_TID_ADDRESS: Final = 40
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
#: Arguments of prctl, for tables of calls.
CLEAR_AMBIENT: Final = (_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
BE_DUMPABLE: Final = (_PR_SET_DUMPABLE, 1)
NO_NEW_PRIVS: Final = (_PR_SET_NO_NEW_PRIVS, 1)
_RT_SIGACTION: Final = _NUMBERS.get("rt_sigaction", -1)
#: The kernel's own struct: handler, flags, restorer and mask, a word each.
_SIGACTION_BYTES: Final = 32
_SIGNALS: Final = 64
#: NOROOT, NO_SETUID_FIXUP and NO_CAP_AMBIENT_RAISE on, KEEP_CAPS off, all four locked.
_SECUREBITS: Final = 0b1110_1111
_LAST_KNOWN_CAPABILITY: Final = 63

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# A pointer's type takes whole registers: numbers, the addresses of bytes, and None.
_libc.syscall.argtypes = (ctypes.c_long, *(ctypes.c_void_p,) * _SYSCALL_WORDS)
_libc.unshare.argtypes = (ctypes.c_int,)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
#: The unchecked call: (number, six arguments) → result, or -1 and errno. For tables of calls (script.py).
raw: Final = _libc.syscall
# The same call with the interpreter lock held throughout: a fork must not happen between two threads of Python.
_clone3: Final = ctypes.PyDLL(None, use_errno=True).syscall
_clone3.restype = ctypes.c_long
_clone3.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_long)
# Looked up here, once: a child that does it copies fifty pages of its mould.
_before_fork: Final = ctypes.pythonapi.PyOS_BeforeFork
_after_fork_parent: Final = ctypes.pythonapi.PyOS_AfterFork_Parent
_after_fork_child: Final = ctypes.pythonapi.PyOS_AfterFork_Child


def syscall(what: str, number: int, *args: int | bytes | None) -> int:
    """Make a raw system call; bytes are passed by address. Raises OSError that names ``what``."""
    return _named(what, "", number, *args)


def fork_into(cgroup_fd: int | None) -> int:
    """Fork like os.fork, but with the child born in the cgroup v2 group of ``cgroup_fd``; 0 in the child.

    Joining a group after the fork costs a migration of 6 to 14 ms on an idle host; being born there costs nothing.
    Runs CPython's own fork hooks, and lets the kernel write the child's thread id where the C library caches it, as its
    own fork does. Call it with one thread only.

    Source: clone(2), CLONE_INTO_CGROUP; CPython, PyOS_BeforeFork.
    """
    if cgroup_fd is None:
        return os.fork()
    _before_fork()
    pid = _clone3(_CLONE3, _clone_args(cgroup_fd), _CLONE_ARGS_BYTES)
    if pid == 0:
        _after_fork_child()
        return 0
    error = ctypes.get_errno()
    _after_fork_parent()
    if pid < 0:
        raise OSError(error, f"clone3: {os.strerror(error)}")
    return int(pid)


@functools.cache
def _clone_args(cgroup_fd: int) -> bytes:
    """Return struct clone_args, version 2, for a child in the group of ``cgroup_fd``; the same for every fork."""
    flags = _CLONE_INTO_CGROUP
    cached = _thread_id_address()
    if cached:
        flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
    # flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup
    return struct.pack("11Q", flags, 0, cached, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, cgroup_fd)


def unshare(flags: int) -> None:
    """Leave the shared namespaces named by ``flags``."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace of ``fd``."""
    _checked(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount ``kind`` on ``target`` with MS_* ``flags``."""
    done = _libc.mount(_text(source), _text(target), _text(kind), flags, _text(options or None))
    _checked(done, "mount", target)


def umount(target: str, flags: int = 0) -> None:
    """Take the mount on ``target`` away."""
    _checked(_libc.umount2(_text(target), flags), "umount", target)


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root of this mount namespace, with the old root on ``old``."""
    syscall("pivot_root", _NUMBERS["pivot_root"], os.fsencode(new), os.fsencode(old))


def open_tree(path: str, *, at: int = _AT_FDCWD, recursive: bool = False) -> int:
    """Return a detached copy of the mount at ``path`` (empty: the one that ``at`` is open on)."""
    flags = 1 | _CLOEXEC | (_AT_RECURSIVE if recursive else 0) | (0 if path else _AT_EMPTY_PATH)
    return _named("open_tree", path, _OPEN_TREE, at, os.fsencode(path), flags)


def move_mount(fd: int, target: str, *, at: int = _AT_FDCWD) -> None:
    """Attach the detached mount ``fd`` on ``target`` (empty: on what ``at`` is open on)."""
    onto = 0x04 | (0 if target else 0x40)
    _named("move_mount", target, _MOVE_MOUNT, fd, b"", at, os.fsencode(target), onto)


def mount_setattr(fd: int, attributes: int, *, path: str = "", recursive: bool = False) -> None:
    """Set MOUNT_ATTR_* on the mount that ``fd`` is open on, or on the one at ``path``; never clears any.

    It gets no mounts of others any more either: what the host mounts below it later would appear there, writable.
    """
    flags = (_AT_RECURSIVE if recursive else 0) | (0 if path else _AT_EMPTY_PATH)
    change = struct.pack("QQQQ", attributes, 0, _MS_PRIVATE, 0)
    _named("mount_setattr", path, _MOUNT_SETATTR, fd, os.fsencode(path), flags, change, len(change))


def openat2(path: str, flags: int, resolve: int, *, at: int = _AT_FDCWD) -> int:
    """Open ``path`` with the RESOLVE_* rules."""
    how = struct.pack("QQQ", flags | _CLOEXEC, 0, resolve)
    return _named("openat2", path, _OPENAT2, at, os.fsencode(path), how, len(how))


def close_range(first: int, last: int | None = None) -> None:
    """Close every descriptor from ``first`` to ``last`` (None: the highest)."""
    syscall("close_range", _CLOSE_RANGE, first, 0xFFFF_FFFF if last is None else last, 0)


def set_parent_death_signal(number: int) -> None:
    """Ask for ``number`` when the thread that forked this process ends. Cleared by a change of uid."""
    _prctl(_PR_SET_PDEATHSIG, number)


def set_dumpable(value: bool) -> None:
    """Allow or forbid others of the same uid to look into this process."""
    _prctl(_PR_SET_DUMPABLE, int(value))


def set_subreaper() -> None:
    """Adopt orphaned descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def no_new_privs() -> None:
    """No execve may grant anything from here on."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_bounding() -> None:
    """Drop every capability from the bounding set; needs CAP_SETPCAP."""
    for number in range(_LAST_KNOWN_CAPABILITY + 1):
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except OSError:
            if number == 0:
                raise
            return  # past the kernel's last capability; the worker checks that the set is empty


def lock_securebits() -> None:
    """Uid 0 and changes of uid carry no capabilities any more, for good; needs CAP_SETPCAP."""
    _prctl(_PR_SET_SECUREBITS, _SECUREBITS)


def drop_ambient() -> None:
    """Empty the ambient set."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Empty the permitted, effective and inheritable sets."""
    header = struct.pack("Ii", 0x2008_0522, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def kill_others() -> None:
    """SIGKILL to every process that this one may signal, but itself. That there is none is no error: it is the rule."""
    if raw(*_KILL_OTHERS) < 0 and ctypes.get_errno() != errno.ESRCH:
        raise OSError(ctypes.get_errno(), "kill: " + os.strerror(ctypes.get_errno()))


def tidy_heap() -> None:
    """Have the C library sort its free memory, where it can: a child that does it copies every page of it."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def signal_descriptor(number: int) -> int:
    """Return a non-blocking descriptor that is readable when the (blocked) signal ``number`` is pending."""
    mask = struct.pack("Q", 1 << (number - 1)).ljust(128, b"\0")
    return _checked(_libc.signalfd(ctypes.c_int(-1), mask, ctypes.c_int(_CLOEXEC | _NONBLOCK)), "signalfd")


def unblock_signals() -> None:
    """Block no signal any more."""
    _checked(_libc.sigprocmask(ctypes.c_int(signal.SIG_SETMASK), bytes(128), None), "sigprocmask")


def heed_signals() -> None:
    """Give every signal that some ancestor had ignored its default action back, those of the C library included.

    SIGPIPE and SIGXFSZ stay: the interpreter itself ignores them, and commands get them back later.
    """
    old = ctypes.create_string_buffer(_SIGACTION_BYTES)
    for number in set(range(1, _SIGNALS + 1)) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        _checked(raw(_RT_SIGACTION, number, None, ctypes.addressof(old), 8, 0, 0), "rt_sigaction")
        if int.from_bytes(old.raw[:8], sys.byteorder) == signal.SIG_IGN:
            _checked(raw(_RT_SIGACTION, number, bytes(_SIGACTION_BYTES), None, 8, 0, 0), "rt_sigaction")


def timer_descriptor() -> int:
    """Return a timer on CLOCK_BOOTTIME: it fires at once after a suspend that lasted past its time."""
    return _checked(
        _libc.timerfd_create(ctypes.c_int(_CLOCK_BOOTTIME), ctypes.c_int(_CLOEXEC | _NONBLOCK)), "timerfd_create"
    )


def timer_arm(fd: int, deadline_ns: int) -> None:
    """Make the timer fire at the absolute CLOCK_BOOTTIME ``deadline_ns`` (at once if that has passed)."""
    seconds, nanoseconds = divmod(max(deadline_ns, 1), 1_000_000_000)
    when = struct.pack("qqqq", 0, 0, seconds, nanoseconds)
    _checked(_libc.timerfd_settime(ctypes.c_int(fd), ctypes.c_int(1), when, None), "timerfd_settime")


def _named(what: str, of: str, number: int, *args: int | bytes | None) -> int:
    return _checked(_libc.syscall(number, *args, *(0,) * (_SYSCALL_WORDS - len(args))), what, of)


@functools.cache
def _thread_id_address() -> int:
    """Return where the C library caches this thread's id, or 0 if the kernel doesn't say or it looks wrong."""
    address = ctypes.c_ulong(0)
    try:
        _prctl(_PR_GET_TID_ADDRESS, ctypes.addressof(address))
    except OSError:
        return 0
    if not address.value or ctypes.c_int.from_address(address.value).value != _libc.gettid():
        return 0
    return address.value


def _prctl(option: int, second: int, third: int = 0) -> None:
    _checked(_libc.prctl(option, second, third, 0, 0), "prctl", str(option))


def _text(value: str | None) -> bytes | None:
    return None if value is None else os.fsencode(value)


def _checked(result: int, what: str, of: str = "") -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what} {of}".rstrip() + f": {os.strerror(error)}")
    return result
