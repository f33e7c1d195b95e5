"""The seccomp filter of a job: an allow list, whatever else is set up around it.

Called by the zygote (builds every form once) and by the worker (puts one on, last). Must never allow a call because of
the high half of an argument: the kernel reads 32 bits of these arguments, so the filter compares those 32 bits.

Decisions by name are in syscalls.py; the checks of arguments are here. A call through another machine's entry (32-bit
code, x32 numbers) ends the process with SIGSYS: its number would mean something else. Everything else that is not
allowed is answered with an error, which programs can handle.
Source: DESIGN §5, attacks 9, 16, 17, 37, 45; seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from typing import Final, NamedTuple

from node_agent.containment import linux, script, syscalls
from node_agent.containment.bpf import AND, ANY_BIT, EQUAL, LOAD, RETURN, Step, arg, assemble, search
from node_agent.containment.errors import ContainmentError
from node_agent.containment.script import Row
from node_agent.containment.sysnumbers import AUDIT_ARCH, NUMBERS

__all__ = ["Filter", "build", "install", "row"]

_SECCOMP: Final = 317 if os.uname().machine == "x86_64" else 277
_SET_MODE_FILTER: Final = 1

_OFFSET_NUMBER: Final = 0
_OFFSET_ARCH: Final = 4
#: x32 calls are x86-64 numbers with this bit.
_X32: Final = range(0x4000_0000, 0x8000_0000)

#: Every answer that a filter gives, by its label.
_ANSWERS: Final = {
    "allow": 0x7FFF_0000,
    "refuse": 0x0005_0000 | errno.EPERM,
    "absent": 0x0005_0000 | errno.ENOSYS,
    "pretend": 0x0005_0000,
    "no_protocol": 0x0005_0000 | errno.EPROTONOSUPPORT,
    "kill": 0x8000_0000,
}

_NEW_NAMESPACES: Final = (
    linux.NEWNS | linux.NEWCGROUP | linux.NEWUTS | linux.NEWIPC | linux.NEWUSER | linux.NEWPID | linux.NEWNET
)
#: What unshare may undo: CLONE_VM, FS, FILES, SIGHAND, THREAD and SYSVSEM. No namespace, also none of a later kernel.
_UNSHARED: Final = 0x0005_0F00
#: Set-user-ID and set-group-ID. The kernel itself ignores mode bits above 16.
_SET_ID_BITS: Final = 0o6000
_CREATES: Final = os.O_CREAT | 0o20000000  # __O_TMPFILE without O_DIRECTORY
#: Input pushed into a terminal (TIOCSTI, TIOCLINUX), and what takes files out of the project quota of a write grant
#: (FS_IOC_SETFLAGS, its 32-bit form, FS_IOC_FSSETXATTR: at level A the kernel lets a file's owner do that; attack 40).
_IOCTLS: Final = (0x5412, 0x541C, 0x4008_6602, 0x4004_6602, 0x401C_5820)
_RLIMIT_CORE: Final = 4
_PRIO_USER: Final = 2
_IOPRIO_WHO_USER: Final = 3
#: personality(2): plain Linux, and the question for the current one.
_PERSONALITIES: Final = (0, 0xFFFF_FFFF)
#: A socket that lingers makes its last holder wait in close(2) for as long as the job says, and a job can make the
#: agent the last holder of anything (attack 51). Programs that ask for it go on, and wait for nothing.
_SOL_SOCKET: Final = 1
_SO_LINGER: Final = 13
_AF_UNIX: Final = 1
_AF_INET: Final = 2
_AF_INET6: Final = 10
_AF_NETLINK: Final = 16
_NETLINK_ROUTE: Final = 0
_SOCK_TYPE: Final = 0xF
_SOCK_STREAM: Final = 1
_SOCK_DGRAM: Final = 2
_SOCK_SEQPACKET: Final = 5
#: IPPROTO_IP (the type's own), TCP, UDP, ICMP (ping without rights), ICMPV6. A rarer one could load a kernel module.
_PROTOCOLS: Final = (0, 6, 17, 1, 58)


class Filter(NamedTuple):
    """A program for the kernel, ready to be put on."""

    code: bytes
    length: int


def build(
    *, allow_unix: bool, allow_exec: bool = True, alone: bool = False, machine: str = os.uname().machine
) -> Filter:
    """Return the filter. ``allow_unix`` permits socket(AF_UNIX), ``allow_exec`` files in memory that can be executed.

    ``alone``: no call makes a process or thread, or puts another program in this one's place.

    Raises:
        ContainmentError: there is no table for this machine.
    """
    if machine not in NUMBERS:
        raise ContainmentError(f"no system call table for {machine}: jobs run on x86_64 and aarch64")
    numbers = NUMBERS[machine]
    decisions = _decisions(allow_exec=allow_exec)
    if alone:
        decisions |= dict.fromkeys(syscalls.OTHERS, "refuse")
    named = {numbers[name]: label for name, label in decisions.items() if name in numbers}
    ranges = [(range(number, number + 1), label) for number, label in named.items()]
    if machine == "x86_64":
        ranges.append((_X32, "kill"))
    steps = [
        Step(LOAD, _OFFSET_ARCH),
        Step(EQUAL, AUDIT_ARCH[machine], "", "kill"),
        Step(LOAD, _OFFSET_NUMBER),
        *search(ranges, "absent"),
        *_checks(allow_unix=allow_unix),
        *(Step(RETURN, answer, label=label) for label, answer in _ANSWERS.items()),
    ]
    built = Filter(assemble(steps), len(steps))
    _program(built)  # made here, once, for all that are forked from here
    return built


def install(ready: Filter) -> None:
    """Put the filter on this (only) thread, for good. Needs no_new_privs. Raises OSError."""
    linux.syscall("seccomp", _SECCOMP, _SET_MODE_FILTER, 0, _program(ready)[0])


def row(ready: Filter) -> Row:
    """Return ``install`` as a row of a worker's table."""
    return script.row("seccomp", "seccomp", _SET_MODE_FILTER, 0, _program(ready)[0])


@functools.cache
def _program(ready: Filter) -> tuple[bytes, object]:
    """Return struct sock_fprog for a filter, and the memory that it points to."""
    code = ctypes.create_string_buffer(ready.code, len(ready.code))
    return struct.pack("@HP", ready.length, ctypes.addressof(code)), code


def _decisions(*, allow_exec: bool) -> dict[str, str]:
    """Return the label of each call by name. A name stands in one list only, so no list hides another."""
    found = dict.fromkeys(syscalls.ALLOWED, "allow")
    found |= dict.fromkeys(syscalls.DENIED, "refuse")
    found |= dict.fromkeys(syscalls.ABSENT, "absent")
    found |= {name: f"mode{at}" for name, at in syscalls.MODES.items()}
    found |= {name: f"open{flags}" for name, (flags, _) in syscalls.OPENS.items()}
    found |= dict.fromkeys(syscalls.OWN_PROCESS, "own0")
    found |= {name: name for name in syscalls.LIMITS}
    found |= {name: name for name in ("clone", "unshare", "setpriority", "ioprio_set", "personality", "ioctl")}
    found |= {name: name for name in ("socket", "socketpair", "setsockopt")}
    found[syscalls.EXECUTABLE_MEMORY] = "allow" if allow_exec else "absent"
    return found


def _checks(*, allow_unix: bool) -> list[Step]:
    """Return the checks of arguments. Each ends in an answer: jumps go ahead only, and nothing falls into the next."""
    return [
        *(step for flags, mode in syscalls.OPENS.values() for step in _opens(flags, mode)),
        *(step for mode in (1, 2, 3) for step in _plain_mode(mode)),
        arg(0, "setpriority"),
        Step(EQUAL, _PRIO_USER, "refuse", "own1"),
        arg(0, "ioprio_set"),
        Step(EQUAL, _IOPRIO_WHO_USER, "refuse", "own1"),
        # Programs that go without cores (ulimit -c 0, gpg) ask for what would bring piped ones back, and must go on.
        arg(0, "prlimit64"),
        Step(EQUAL, 0, "", "refuse"),
        arg(1),
        Step(EQUAL, _RLIMIT_CORE, "", "allow"),
        arg(2),
        Step(EQUAL, 0, "", "pretend"),
        arg(2, high=True),
        Step(EQUAL, 0, "allow", "pretend"),
        arg(0, "setrlimit"),
        Step(EQUAL, _RLIMIT_CORE, "pretend", "allow"),
        arg(0, "own0"),
        Step(EQUAL, 0, "allow", "refuse"),
        arg(1, "own1"),
        Step(EQUAL, 0, "allow", "refuse"),
        arg(0, "clone"),
        Step(ANY_BIT, _NEW_NAMESPACES, "refuse", "allow"),
        arg(0, "unshare"),
        Step(ANY_BIT, 0xFFFF_FFFF ^ _UNSHARED, "refuse", "allow"),
        arg(0, "personality"),
        Step(EQUAL, _PERSONALITIES[0], "allow"),
        Step(EQUAL, _PERSONALITIES[1], "allow", "refuse"),
        arg(1, "setsockopt"),
        Step(EQUAL, _SOL_SOCKET, "", "allow"),
        arg(2),
        Step(EQUAL, _SO_LINGER, "pretend", "allow"),
        arg(1, "ioctl"),
        *(Step(EQUAL, number, "refuse", "" if number != _IOCTLS[-1] else "allow") for number in _IOCTLS),
        *_sockets(allow_unix=allow_unix),
    ]


def _opens(flags: int, mode: int) -> list[Step]:
    return [arg(flags, f"open{flags}"), Step(ANY_BIT, _CREATES, f"mode{mode}", "allow")]


def _plain_mode(mode: int) -> list[Step]:
    return [arg(mode, f"mode{mode}"), Step(ANY_BIT, _SET_ID_BITS, "refuse", "allow")]


def _sockets(*, allow_unix: bool) -> list[Step]:
    unix = [Step(EQUAL, _AF_UNIX, "allow")] if allow_unix else []
    families = [Step(EQUAL, _AF_INET, "protocol"), Step(EQUAL, _AF_INET6, "protocol")]
    protocols = [
        Step(EQUAL, number, "type", "" if number != _PROTOCOLS[-1] else "no_protocol") for number in _PROTOCOLS
    ]
    return [
        arg(0, "socket"),
        *unix,
        *families,
        Step(EQUAL, _AF_NETLINK, "", "refuse"),
        arg(2),
        # NETLINK_ROUTE stays: the C library asks it for the interfaces in getaddrinfo.
        Step(EQUAL, _NETLINK_ROUTE, "allow", "refuse"),
        arg(2, "protocol"),
        *protocols,
        arg(1, "type"),
        Step(AND, _SOCK_TYPE),
        Step(EQUAL, _SOCK_STREAM, "allow"),
        Step(EQUAL, _SOCK_DGRAM, "allow", "refuse"),
        # A DGRAM pair could still sendto() any pathname socket (attack 17).
        arg(0, "socketpair"),
        Step(EQUAL, _AF_UNIX, "", "refuse"),
        arg(1),
        Step(AND, _SOCK_TYPE),
        Step(EQUAL, _SOCK_STREAM, "allow"),
        Step(EQUAL, _SOCK_SEQPACKET, "allow", "refuse"),
    ]
