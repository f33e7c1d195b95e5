"""Runs a program on a host that lacks something: the kernel says no, as Docker's default profile or a sysctl would.

    python without.py unshare|landlock|seccomp|capset PROGRAM ARGUMENT...

Called by tests that take a feature away for real. A seccomp filter of this process and all that follow answers EPERM
or ENOSYS (landlock); it can't be taken off again.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from typing import Final

from node_agent.containment import linux, seccomp
from node_agent.containment.seccomp import Filter

#: By feature: (error, system call numbers on x86-64, on aarch64).
REFUSED: Final = {
    "unshare": (errno.EPERM, (272,), (97,)),
    "landlock": (errno.ENOSYS, (444, 445, 446), (444, 445, 446)),
    "seccomp": (errno.EPERM, (317,), (277,)),
    "capset": (errno.EPERM, (126,), (91,)),
}
_LOAD_NUMBER: Final = struct.pack("HBBI", 0x20, 0, 0, 0)
_ALLOW: Final = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)


def refuse(feature: str) -> None:
    """Take the feature away from this process and its children."""
    error, x86_64, aarch64 = REFUSED[feature]
    numbers = x86_64 if os.uname().machine == "x86_64" else aarch64
    deny = struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error)
    steps = [_LOAD_NUMBER]
    for number in numbers:
        steps += [struct.pack("HBBI", 0x15, 0, 1, number), deny]
    steps.append(_ALLOW)
    linux.no_new_privs()
    seccomp.install(Filter(b"".join(steps), len(steps)))


if __name__ == "__main__":
    refuse(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - becoming the program is this script's job
