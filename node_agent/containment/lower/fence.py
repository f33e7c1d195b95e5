"""What fences a job in where it has no view: Landlock rules on the host's own tree, and calls that the kernel refuses.

Called by worker.py in the worker. Must never be weakened because the job is trusted: without a network namespace,
refused sockets are what ``net none`` is.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from node_agent.containment import landlock
from node_agent.containment.plan import Plan
from node_agent.containment.seccomp import Filter

__all__ = ["no_sockets", "rules"]

#: By machine: socket, and what makes objects in the host's ipc namespace (shmget, semget, msgget, mq_open).
_REFUSED: Final = {
    "x86_64": (41, 29, 64, 68, 240),
    "aarch64": (198, 194, 190, 186, 180),
}
_LOAD_NUMBER: Final = struct.pack("HBBI", 0x20, 0, 0, 0)
_REFUSE: Final = struct.pack("HBBI", 0x06, 0, 0, 0x0005_0000 | errno.EACCES)
_ALLOW: Final = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF_0000)
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC: Final = ("ssl", "ca-certificates", "ca-certificates.conf", "alternatives", "localtime", "mime.types")
#: Names of accounts; a view writes its own.
_ACCOUNTS: Final = ("passwd", "group", "nsswitch.conf")
_ETC_PREFIX: Final = "ld.so."
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")


def no_sockets(machine: str = os.uname().machine) -> Filter:
    """Return a filter that refuses every new socket and every System V or POSIX ipc object; socketpair stays.

    The job's own filter comes on top and checks the architecture. Raises KeyError for an unknown machine.
    """
    numbers = _REFUSED[machine]
    steps = [_LOAD_NUMBER]
    for index, number in enumerate(numbers):
        steps.append(struct.pack("HBBI", 0x15, len(numbers) - index, 0, number))
    steps += [_ALLOW, _REFUSE]
    return Filter(b"".join(steps), len(steps))


def rules(plan: Plan, workspace: str, own_paths: Sequence[str], grants: Sequence[int]) -> list[tuple[str, int]]:
    """Return path and rights of everything that the job may use; ``grants``: descriptors in the plan's order."""
    shown = [*_SYSTEM, *_etc(), *plan.python_paths, *plan.task_paths, *own_paths]
    return [
        *((path, landlock.READ) for path in _real(shown)),
        # Not to be written: there a job of the agent's uid would change the agent (oom_score_adj, autogroup, …).
        ("/proc", landlock.READ),
        *((f"/dev/{name}", landlock.READ | landlock.USE) for name in _DEVICES),
        (workspace, landlock.WRITE),
        # By the descriptor that the node checked: a name could lead elsewhere by now.
        *(
            (f"/proc/self/fd/{fd}", landlock.WRITE if grant.mode == "write" else landlock.READ)
            for grant, fd in zip(plan.mounts, grants, strict=True)
        ),
    ]


def _etc() -> Iterable[str]:
    return (
        f"/etc/{name}"
        for name in (*_ETC, *_ACCOUNTS, *(name for name in os.listdir("/etc") if name.startswith(_ETC_PREFIX)))
    )


def _real(paths: Iterable[str]) -> list[str]:
    return [path for path in dict.fromkeys(map(os.path.realpath, paths)) if os.path.exists(path)]
