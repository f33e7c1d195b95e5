"""A job has no terminal, and can neither get one nor type into another's.

Stopped by the view (no /dev/tty, no pseudo-terminals), a session of its own, and seccomp (TIOCSTI, TIOCLINUX).
"""

from __future__ import annotations

import os
import subprocess
import sys
import termios

from tests.containment.rig import Rig, in_rig
from tests.security.fs_tries import PRELUDE, Wall, answers, broken, tried

TERMINAL = r"""
import glob
for name in ("tty", "tty0", "tty1", "console", "ptmx", "pts", "pts/0", "pts/ptmx", "vcs", "vcsa1", "ttyS0"):
    attempt("open:" + name, lambda: os.close(os.open("/dev/" + name, os.O_RDWR | os.O_NOCTTY)))
attempt("openpty", lambda: os.openpty())
for fd in (0, 1, 2):
    attempt(f"sti:{fd}", lambda: fcntl.ioctl(fd, 0x5412, b"x"))
    attempt(f"sctty:{fd}", lambda: fcntl.ioctl(fd, 0x540E, 1))
    attempt(f"spgrp:{fd}", lambda: os.tcsetpgrp(fd, os.getpgrp()))
assert os.getsid(0) == os.getpid() and not any(map(os.isatty, (0, 1, 2)))
assert open("/proc/self/stat").read().rpartition(")")[2].split()[4] == "0"
"""
NO_DEVICE = Wall.of("view", "ENOENT EACCES EPERM ENXIO")
NO_TERMINAL = Wall.of("no terminal is open", "ENOTTY EPERM")
#: Runs below a new session whose terminal is the one of the test: ``python -c CODE DESCRIPTOR``.
WITH_TERMINAL = """
import fcntl, os, sys, termios
os.setsid(); fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", sys.argv[2]])
"""


def test_a_job_has_no_terminal(node_name: str) -> None:
    """No device of a terminal exists, its streams are none, and it leads a session without one."""

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, TERMINAL)
        walls = {name: NO_DEVICE if name.startswith("open") else NO_TERMINAL for name in found}
        walls |= {f"sti:{fd}": Wall.of("seccomp", "EPERM") for fd in (0, 1, 2)}
        assert broken(found, walls) == []

    in_rig(node_name, scenario)


def test_with_a_terminal_it_would_be_found() -> None:
    """Counter-check: outside, in a session with a terminal, that terminal is opened and a new one made."""
    ours, theirs = os.openpty()
    try:
        code = PRELUDE + TERMINAL.partition("assert")[0]
        words = [sys.executable, "-I", "-S", "-c", WITH_TERMINAL, str(theirs), code]
        done = subprocess.run(words, capture_output=True, check=False, pass_fds=[theirs], stdin=theirs, timeout=30)
        found = answers(done.stdout)
    finally:
        os.close(ours)
        os.close(theirs)
    assert {name for name, answer in found.items() if answer == "DONE"} >= {"open:tty", "openpty", "spgrp:0"}, found
    assert termios.TIOCSTI == 0x5412
