"""Becomes a daemon that ends with the process that started it; a script of its own, standard library only.

Started by children.py as ``python -I -S launch.py PARENT SIGNAL UID PROGRAM ARGUMENT…``; the program inherits the
environment, the standard descriptors and those that were passed on. Must never return: it becomes the program or exits.

Source: prctl(2) PR_SET_PDEATHSIG; the second look at the parent closes the race with a parent that died before.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Final, NoReturn

__all__ = ["NO_UID"]

#: Stands for "keep the uid".
NO_UID: Final = "-"
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_PARENT_GONE: Final = 70


def main(parent: int, signal_number: int, uid: str, program: str, *arguments: str) -> NoReturn:
    """Drop to ``uid``, tie this process's life to ``parent`` and run ``program``."""
    # A piped core_pattern ignores a limit of 0 and honours 1 (attack 19).
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    libc = ctypes.CDLL(None, use_errno=True)
    # Opened before the uid changes: the program may lie below a folder that only root can enter.
    binary = os.open(program, os.O_RDONLY | os.O_CLOEXEC)
    if uid != NO_UID:
        os.setgroups([])
        os.setresgid(int(uid), int(uid), int(uid))
        os.setresuid(int(uid), int(uid), int(uid))
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_PARENT_GONE)
    words = [program, *arguments]
    if uid == NO_UID:
        os.execv(program, words)  # noqa: S606 - becoming the program is this script's job
    os.execve(binary, words, os.environ)  # noqa: S606 - as above


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
