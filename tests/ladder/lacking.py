"""Runs a program on a host that lacks something, taken away for real from this process and all that follow.

    python lacking.py WHAT[,WHAT…] PROGRAM ARGUMENT…

Called by the tests of hosts. ``cgroups``: the cgroup file systems are read-only (private mount namespace). ``admin``,
``setuid``: root without CAP_SYS_ADMIN, without CAP_SETUID and CAP_SETGID, as in a container. ``user``: an ordinary uid
without an account. ``unshare``, ``landlock``: see support/without.py. Taken away in the order in which they are named.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

from node_agent.containment import linux, mounts
from tests.support import without

STRANGER: Final = 65_533
_DROP_BOUNDING: Final = 24
_CAPABILITIES: Final = {"admin": (21,), "setuid": (6, 7)}


def take_away(what: str) -> None:
    """Take one thing away from this process; needs root but for ``unshare`` and ``landlock``."""
    if what == "user":
        os.setgroups([])
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
    elif what in _CAPABILITIES:
        # The rest follows at the exec: root gets what the bounding set leaves.
        for number in _CAPABILITIES[what]:
            if ctypes.CDLL(None, use_errno=True).prctl(_DROP_BOUNDING, number, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "PR_CAPBSET_DROP")
    elif what == "cgroups":
        linux.unshare(linux.NEWNS)
        linux.mount(None, "/", None, linux.SLAVE_TREE)
        for entry in mounts.table().values():
            if entry.kind in ("cgroup", "cgroup2"):
                linux.mount_setattr(-1, linux.RDONLY, path=entry.point)
    else:
        without.refuse(what)


if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        take_away(name)
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - becoming the program is this script's job
