"""The broker gives up what it does not need, before it hears its first job (attack 7).

Called by service.py, once, when its files, sockets and scrubber stand. Must never be skipped: a step that the kernel
has and refuses ends the broker.

Landlock keeps a broker with a user of its own to its vault and its rules. One that shares its agents' user can't wear
it: the kernel would no longer tell it the pid namespace of a job, which is what it knows jobs by at level B.

Source: seccomp(2), landlock(7), pidfd_open(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

from broker.egress import confine as egress
from broker.egress.calls import AUDIT_ARCH, CALLS
from broker.egress.confine import Step
from broker.vault.errors import VaultError

__all__ = ["facts", "program", "wear"]

#: Files, descriptors to other processes and the end of the scrubber, besides what egress does: x86-64, aarch64 (the
#: latter is not verified on that hardware; 0 = the machine has no such call).
_MORE: Final = {
    "access": (21, 0),
    "copy_file_range": (326, 285),
    "dup": (32, 23),
    "dup2": (33, 0),
    "dup3": (292, 24),
    "epoll_create1": (291, 20),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fallocate": (285, 47),
    "fchmod": (91, 52),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fstatfs": (138, 44),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "kill": (62, 129),
    "linkat": (265, 37),
    "lstat": (6, 0),
    "mkdir": (83, 0),
    "mkdirat": (258, 34),
    "open": (2, 0),
    "pidfd_open": (434, 434),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "pipe2": (293, 59),
    "pwrite64": (18, 68),
    "readlink": (89, 0),
    "readlinkat": (267, 78),
    "rename": (82, 0),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "rmdir": (84, 0),
    "socketpair": (53, 199),
    "stat": (4, 0),
    "statfs": (137, 43),
    "statx": (332, 291),
    "umask": (95, 166),
    "uname": (63, 160),
    "unlink": (87, 0),
    "unlinkat": (263, 35),
    "wait4": (61, 260),
    "waitid": (247, 95),
}
_AF_UNIX: Final = 1
_PR_GET_DUMPABLE: Final = 3
_PIDFD_GET_PID_NAMESPACE: Final = 0xFF05
_TCGETS, _FIOCLEX, _FIONBIO, _FIONREAD = 0x5401, 0x5451, 0x5421, 0x541B
_F_WRITE, _F_READ_DIR, _F_REMOVE_FILE, _F_MAKE_REG, _F_TRUNCATE = 1 << 1, 1 << 3, 1 << 5, 1 << 8, 1 << 14
_VAULT: Final = egress.READ_FILE | _F_WRITE | _F_READ_DIR | _F_REMOVE_FILE | _F_MAKE_REG | _F_TRUNCATE
#: The rules may be replaced by a new file of their name, and the sockets are taken away at the end.
_HOME: Final = egress.READ_FILE
_SOCKETS: Final = _F_REMOVE_FILE


def wear(place: Path, scrubber: int, *, fenced: bool) -> dict[str, object]:
    """Keep the files below ``place``, the sockets that stand and the scrubber's end; lose everything else.

    ``scrubber``: the one process that may be ended. ``fenced``: this process has a user of its own, and so gives up
    every capability and, by Landlock, every other file.

    Returns what `vault doctor` is told of it.

    Raises:
        VaultError: a step failed, or this machine's calls are not known; the broker must end.
    """
    try:
        return _worn(place, scrubber, fenced=fenced)
    except (OSError, KeyError) as error:
        why = (
            f"{error.strerror} ({error.filename or error.args[-1]})"
            if isinstance(error, OSError)
            else "unknown machine"
        )
        raise VaultError(
            f"the broker can't give up what it does not need: {why}; it takes Linux with seccomp on x86-64 or aarch64"
        ) from None


def _worn(place: Path, scrubber: int, *, fenced: bool) -> dict[str, object]:
    kernel = egress.landlock_abi()
    landlock = 0
    if fenced:
        egress.without_rights()
        places = []
        for path, rights in ((place, _HOME), (place / "vault", _VAULT), (place / "s", _SOCKETS)):
            # The folder of sockets may be one that only root can enter: then there is nothing to keep.
            with suppress(PermissionError, FileNotFoundError):
                places.append((os.open(path, os.O_PATH | os.O_CLOEXEC), rights))
        landlock = egress.fence(places)
        for fd, _ in places:
            os.close(fd)
    egress.filtered(program(os.uname().machine, scrubber))
    return {"landlock": landlock, "scrubber_pid": scrubber, "scrubber_landlock": kernel}


def facts(reserve_bytes: int) -> dict[str, object]:
    """Return what only the process itself can be asked, for `vault doctor`."""
    dumpable = ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)
    core_bytes = resource.getrlimit(resource.RLIMIT_CORE)[0]
    return {"dumpable": dumpable, "core_bytes": core_bytes, "reserve_bytes": reserve_bytes}


def program(machine: str, scrubber: int) -> list[Step]:
    """Return the filter: no program, no new process, no other machine's network, nobody else's end."""
    column = {name: number for number, name in enumerate(AUDIT_ARCH)}[machine]
    numbers = dict(CALLS[machine]) | {name: row[column] for name, row in _MORE.items() if row[column]}
    return egress.assemble(
        machine,
        numbers,
        {
            "socket": egress.one_of(0, _AF_UNIX),
            "socketpair": egress.one_of(0, _AF_UNIX),
            "kill": egress.one_of(0, scrubber),
            "prctl": egress.one_of(0, _PR_GET_DUMPABLE),
            "prlimit64": egress.one_of(0, 0),
            "ioctl": egress.one_of(1, _TCGETS, _FIOCLEX, _FIONBIO, _FIONREAD, _PIDFD_GET_PID_NAMESPACE),
        },
    )
