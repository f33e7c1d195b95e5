"""The seccomp filter of a job: what no job may ask of the kernel, whatever else is set up.

Called by the zygote (builds both forms once) and by the worker (puts one on, last). Must never allow a call because of
the high half of an argument: the kernel reads 32 bits of these arguments, so the filter compares those 32 bits.

A deny list: everything outside it is allowed. Source: seccomp(2); struct seccomp_data in linux/seccomp.h.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from typing import Final, NamedTuple

from node_agent.containment import linux
from node_agent.containment.errors import ContainmentError
from node_agent.containment.sysnumbers import AUDIT_ARCH, NUMBERS

__all__ = ["Filter", "build", "install"]

_SECCOMP: Final = 317 if os.uname().machine == "x86_64" else 277
_SET_MODE_FILTER: Final = 1

_LOAD: Final = 0x20
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_ANY_BIT: Final = 0x45
_AND: Final = 0x54
_RETURN: Final = 0x06

_ALLOW: Final = 0x7FFF_0000
_KILL_PROCESS: Final = 0x8000_0000
_ERRNO: Final = 0x0005_0000
_REFUSE: Final = _ERRNO | errno.EPERM
_ABSENT: Final = _ERRNO | errno.ENOSYS

_OFFSET_NUMBER: Final = 0
_OFFSET_ARCH: Final = 4
_OFFSET_ARGS: Final = 16
_X32: Final = 0x4000_0000

_NEW_NAMESPACES: Final = (
    linux.NEWNS | linux.NEWCGROUP | linux.NEWUTS | linux.NEWIPC | linux.NEWUSER | linux.NEWPID | linux.NEWNET
)
_NEWTIME: Final = 0x80
#: Set-user-ID and set-group-ID. The kernel itself ignores mode bits above 16.
_SET_ID_BITS: Final = 0o6000
_CREATES: Final = os.O_CREAT | 0o20000000  # __O_TMPFILE without O_DIRECTORY
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C
_AF_UNIX: Final = 1
_AF_INET: Final = 2
_AF_INET6: Final = 10
_AF_NETLINK: Final = 16
_NETLINK_ROUTE: Final = 0
_SOCK_TYPE: Final = 0xF
_SOCK_STREAM: Final = 1
_SOCK_SEQPACKET: Final = 5
#: Rules that are skipped together.
_BLOCK: Final = 8
_BY_USER: Final = {"setpriority": 2, "ioprio_set": 3}

#: Refused whatever their arguments.
DENIED: Final = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "pidfd_getfd", "kcmp"),
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "name_to_handle_at", "open_by_handle_at", "fanotify_init"),
    *("setns", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "kexec_load", "kexec_file_load", "init_module", "finit_module"),
    *("create_module", "delete_module", "iopl", "ioperm", "modify_ldt", "acct", "swapon", "swapoff", "reboot"),
    *("quotactl", "quotactl_fd", "nfsservctl", "lookup_dcookie", "uselib", "_sysctl", "syslog", "vhangup"),
    *("sethostname", "setdomainname", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime"),
)
#: Answered as if the kernel did not have them: their arguments lie in memory, where no filter can read them.
ABSENT: Final = ("clone3", "openat2")
#: Calls that may set mode bits: the index of their mode argument.
MODES: Final = {
    "chmod": 1,
    "fchmod": 1,
    "fchmodat": 2,
    "fchmodat2": 2,
    "creat": 1,
    "mkdir": 1,
    "mkdirat": 2,
    "mknod": 1,
    "mknodat": 2,
}
#: Calls that open files: the indexes of their flags and mode.
OPENS: Final = {"open": (1, 2), "openat": (2, 3)}
#: Calls on a process named by argument 0, which must be the caller itself (0), attack 37.
OWN_PROCESS: Final = (
    "prlimit64",
    "sched_setparam",
    "sched_setscheduler",
    "sched_setattr",
    "sched_setaffinity",
    "migrate_pages",
    "move_pages",
)
#: personality(2): plain Linux, and the question for the current one.
PERSONALITIES: Final = (0, 0xFFFF_FFFF)


class _Step(NamedTuple):
    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


class Filter(NamedTuple):
    """A program for the kernel, ready to be put on."""

    code: bytes
    length: int


def build(*, allow_unix: bool, machine: str = os.uname().machine) -> Filter:
    """Return the filter; ``allow_unix`` permits socket(AF_UNIX).

    Raises:
        ContainmentError: there is no table for this machine.
    """
    if machine not in NUMBERS:
        raise ContainmentError(f"no system call table for {machine}: jobs run on x86_64 and aarch64")
    numbers = NUMBERS[machine]
    steps = [
        _Step(_LOAD, _OFFSET_ARCH),
        _Step(_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _Step(_RETURN, _KILL_PROCESS),
        _Step(_LOAD, _OFFSET_NUMBER),
    ]
    if machine == "x86_64":
        steps += [_Step(_AT_LEAST, _X32, 0, 1), _Step(_RETURN, _REFUSE)]
    rules = [(numbers[name], body) for name, body in _rules(allow_unix=allow_unix) if name in numbers]
    steps += _searched(sorted(rules))
    steps.append(_Step(_RETURN, _ALLOW))
    code = b"".join(struct.pack("HBBI", step.code, step.if_true, step.if_false, step.value) for step in steps)
    built = Filter(code, len(steps))
    _program(built)  # made here, once, for all that are forked from here
    return built


def install(ready: Filter) -> None:
    """Put the filter on this (only) thread, for good. Needs no_new_privs. Raises OSError."""
    linux.syscall("seccomp", _SECCOMP, _SET_MODE_FILTER, 0, _program(ready)[0])


@functools.cache
def _program(ready: Filter) -> tuple[bytes, object]:
    """Return struct sock_fprog for a filter, and the memory that it points to."""
    code = ctypes.create_string_buffer(ready.code, len(ready.code))
    return struct.pack("@HP", ready.length, ctypes.addressof(code)), code


def _searched(rules: list[tuple[int, list[_Step]]]) -> list[_Step]:
    """Lay out rules, sorted by number, in blocks that are skipped whole.

    The kernel tries a new filter on every call number there is: fewer steps make each start of a job cheaper.
    """
    blocks: list[list[_Step]] = []
    for start in range(0, len(rules), _BLOCK):
        block: list[_Step] = []
        for number, body in rules[start : start + _BLOCK]:
            block += [_Step(_EQUAL, number, 0, len(body)), *body]
        if start + _BLOCK < len(rules):
            block.insert(0, _Step(_AT_LEAST, rules[start + _BLOCK][0], len(block) + 1, 0))
            # In this block's range, but none of its numbers.
            block.append(_Step(_RETURN, _ALLOW))
        blocks.append(block)
    return [step for block in blocks for step in block]


def _rules(*, allow_unix: bool) -> list[tuple[str, list[_Step]]]:
    """Every rule ends in a return, so that the next one still finds the call's number loaded."""
    allow, refuse, absent = _Step(_RETURN, _ALLOW), _Step(_RETURN, _REFUSE), _Step(_RETURN, _ABSENT)
    rules = [(name, [absent]) for name in ABSENT]
    rules += [(name, [refuse]) for name in DENIED]
    rules.append(("clone", [_arg(0), _Step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse, allow]))
    rules.append(("unshare", [_arg(0), _Step(_ANY_BIT, _NEW_NAMESPACES | _NEWTIME, 0, 1), refuse, allow]))
    rules += [(name, [_arg(at), _Step(_ANY_BIT, _SET_ID_BITS, 0, 1), refuse, allow]) for name, at in MODES.items()]
    for name, (flags, mode) in OPENS.items():
        checks = [_arg(flags), _Step(_ANY_BIT, _CREATES, 0, 3), _arg(mode), _Step(_ANY_BIT, _SET_ID_BITS, 0, 1)]
        rules.append((name, [*checks, refuse, allow]))
    rules += [(name, [_arg(0), _Step(_EQUAL, 0, 1, 0), refuse, allow]) for name in OWN_PROCESS]
    for name, by_user in _BY_USER.items():
        checks = [_arg(0), _Step(_EQUAL, by_user, 2, 0), _arg(1), _Step(_EQUAL, 0, 1, 0)]
        rules.append((name, [*checks, refuse, allow]))
    rules.append(("personality", [_arg(0), *_one_of(PERSONALITIES)]))
    rules.append(
        ("ioctl", [_arg(1), _Step(_EQUAL, _TIOCSTI, 1, 0), _Step(_EQUAL, _TIOCLINUX, 0, 1), refuse, allow]),
    )
    families = (*((_AF_UNIX,) if allow_unix else ()), _AF_INET, _AF_INET6)
    # NETLINK_ROUTE stays: the C library asks it for the interfaces in getaddrinfo.
    netlink = [_Step(_EQUAL, _AF_NETLINK, 0, 2), _arg(2), _Step(_EQUAL, _NETLINK_ROUTE, 1, 0)]
    named = [_Step(_EQUAL, family, len(families) - at + 3, 0) for at, family in enumerate(families)]
    rules.append(("socket", [_arg(0), *named, *netlink, refuse, allow]))
    # A DGRAM pair could still sendto() any pathname socket (attack 17).
    pair = [_arg(0), _Step(_EQUAL, _AF_UNIX, 0, 4), _arg(1), _Step(_AND, _SOCK_TYPE)]
    types = [_Step(_EQUAL, _SOCK_STREAM, 2, 0), _Step(_EQUAL, _SOCK_SEQPACKET, 1, 0)]
    rules.append(("socketpair", [*pair, *types, refuse, allow]))
    return rules


def _one_of(values: tuple[int, ...]) -> list[_Step]:
    tests = [_Step(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [*tests, _Step(_RETURN, _REFUSE), _Step(_RETURN, _ALLOW)]


def _arg(index: int) -> _Step:
    """Load the low half of an argument (both machines are little-endian)."""
    return _Step(_LOAD, _OFFSET_ARGS + 8 * index)
