"""The egress process gives up what it does not need, before it reads its first hostile byte (attack 7).

Called by __main__ and the scrubber's, once, when everything is loaded; the broker puts its own together from parts.
Must never be skipped: a step that the kernel has and refuses ends the process. Only Landlock may be missing, and then
the state says so.

Source: seccomp(2), landlock(7), capabilities(7), prctl(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker.egress.calls import AUDIT_ARCH, CALLS, SETS

__all__ = [
    "READ_FILE",
    "State",
    "Step",
    "assemble",
    "confine",
    "fence",
    "filtered",
    "landlock_abi",
    "one_of",
    "prctl",
    "without_rights",
]

_PR_SET_PDEATHSIG: Final = 1
_PR_GET_PDEATHSIG: Final = 2
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_CAPABILITY_V3: Final = 0x2008_0522
_PARENT_GONE: Final = 70

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH: Final = 1
READ_FILE: Final = 1 << 2
_FS_RIGHTS: Final = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_ALL_FS_RIGHTS: Final = 0xFFFF
_BIND_TCP: Final = 1
_NET_SINCE: Final = 4
_SCOPES: Final = 0b11
_SCOPES_SINCE: Final = 6

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW: Final = 0x7FFF_0000
_REFUSE: Final = 0x0005_0000 | errno.EPERM
_KILL: Final = 0x8000_0000
_OFFSET_ARGS: Final = 16
_PROT_EXEC: Final = 4
_FIOCLEX, _FIONBIO = 0x5451, 0x5421

Step = tuple[int, int, int, int]
_GRANT: Final[Step] = (_RETURN, _ALLOW, 0, 0)
_DENY: Final[Step] = (_RETURN, _REFUSE, 0, 0)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long, *(ctypes.c_void_p,) * 4)
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


@dataclass(frozen=True, slots=True)
class State:
    """What became of this process. ``landlock``: the ABI, 0 for none. ``agents``: users whose agents it serves."""

    uid: int
    landlock: int
    agents: frozenset[int]

    def weak(self, agent_uid: int) -> str:
        """Return what an operator should know of; "" if nothing."""
        faults = []
        if self.uid == agent_uid:
            faults.append("it runs under its agent's user")
        if not self.landlock:
            faults.append("this kernel has no Landlock")
        return " and ".join(faults)


def confine(uid: int | None, readable: Sequence[Path]) -> State:
    """Become ``uid`` (None: stay), keep the ``readable`` files and the network, lose everything else.

    Raises:
        OSError: a step failed; the process must end.
    """
    agents = frozenset({0, os.geteuid()})
    parent = os.getppid()
    tied = ctypes.c_int(0)
    _libc.prctl(_PR_GET_PDEATHSIG, ctypes.addressof(tied), 0, 0, 0)
    files = _opened(readable)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if tied.value:
        # The kernel forgot it with the change of user.
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(_PARENT_GONE)
    without_rights()
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    landlock = fence([(fd, READ_FILE) for fd in files])
    for fd in files:
        os.close(fd)
    filtered(program(os.uname().machine))
    return State(os.geteuid(), landlock, agents)


def without_rights() -> None:
    """Give up every capability. Raises OSError."""
    _call("capset", SETS[os.uname().machine][0], struct.pack("Ii", _CAPABILITY_V3, 0), bytes(24))


def filtered(steps: Sequence[Step]) -> None:
    """Take a seccomp filter for good; no_new_privs stands before. Raises OSError."""
    code = b"".join(struct.pack("HBBI", step[0], step[2], step[3], step[1]) for step in steps)
    kept = ctypes.create_string_buffer(code, len(code))
    program_ = struct.pack("@HP", len(code) // 8, ctypes.addressof(kept))
    _call("seccomp", SETS[os.uname().machine][1], 1, 0, program_)


def program(machine: str) -> list[Step]:
    """Return the filter: the listed calls, four of them only with harmless arguments, and nothing else."""
    inet, inet6 = 2, 10
    return assemble(machine, CALLS[machine], {"socket": one_of(0, inet, inet6), "ioctl": one_of(1, _FIONBIO, _FIOCLEX)})


def assemble(machine: str, numbers: Mapping[str, int], checked: Mapping[str, Sequence[Step]]) -> list[Step]:
    """Return a filter that allows calls by number, those in ``checked`` by their steps, and no new code in memory."""
    steps: list[Step] = [
        (_LOAD, 4, 0, 0),
        (_EQUAL, AUDIT_ARCH[machine], 1, 0),
        (_RETURN, _KILL, 0, 0),
        (_LOAD, 0, 0, 0),
    ]
    no_code = [_arg(2), (_ANY_BIT, _PROT_EXEC, 1, 0), _GRANT, _DENY]
    bodies = {"mmap": no_code, "mprotect": no_code, **checked}
    for name, number in numbers.items():
        body = bodies.get(name, [_GRANT])
        steps += [(_EQUAL, number, 0, len(body)), *body]
    return [*steps, _DENY]


def one_of(index: int, *values: int) -> list[Step]:
    """Return the steps that allow a call if its argument has one of these values."""
    last = len(values) - 1
    # A match jumps over the rest of the comparisons; the last one falls to the refusal.
    tests = [(_EQUAL, value, last - at, 1 if at == last else 0) for at, value in enumerate(values)]
    return [_arg(index), *tests, _GRANT, _DENY]


def _arg(index: int) -> Step:
    return (_LOAD, _OFFSET_ARGS + 8 * index, 0, 0)


def _opened(paths: Sequence[Path]) -> list[int]:
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
    return found


def fence(places: Sequence[tuple[int, int]]) -> int:
    """Lose every file but those below ``places`` (descriptor, rights) with Landlock; returns its ABI, 0 for none.

    Raises:
        OSError: the kernel has it and refuses.
    """
    version = landlock_abi()
    if not version:
        return 0
    rights = _FS_RIGHTS.get(version, _ALL_FS_RIGHTS)
    head = struct.pack("QQQ", rights, _BIND_TCP if version >= _NET_SINCE else 0, _SCOPES)
    size = 24 if version >= _SCOPES_SINCE else 16 if version >= _NET_SINCE else 8
    ruleset = _call("landlock", _CREATE_RULESET, head, size, 0)
    for fd, allowed in places:
        _call("landlock", _ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed & rights, fd), 0)
    _call("landlock", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return version


def landlock_abi() -> int:
    """Return what Landlock this kernel has, 0 for none."""
    try:
        return _call("landlock", _CREATE_RULESET, None, 0, 1)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def prctl(option: int, value: int) -> None:
    """Set one of this process's own switches. Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def _call(name: str, number: int, *arguments: int | bytes | None) -> int:
    result = int(_libc.syscall(number, *arguments, *(None,) * (4 - len(arguments))))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
