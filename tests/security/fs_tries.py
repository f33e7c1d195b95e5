"""Tries attacks inside a job and says which wall must answer each. Called by the security tests.

A script is Python that calls ``attempt(name, act)`` for each attack: one line ``NAME ANSWER`` comes out, with the name
of an error, or ``DONE`` if the attack worked. ``outside`` runs the same script without any wall: what is DONE there and
not in the job was stopped, and the test can fail.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.containment.rig import Rig, python

__all__ = ["PRELUDE", "Wall", "answers", "broken", "outside", "tried"]

PRELUDE = r"""
import ctypes, errno, fcntl, os, platform, signal, socket, stat, struct, sys, time
signal.alarm(30)
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
AT = -100
def raw(x86, arm, *args):
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in args]
    answer = libc.syscall(ctypes.c_long(x86 if X86 else arm), *words)
    if answer < 0: raise OSError(ctypes.get_errno(), "")
    return answer
def attempt(name, act):
    try: act()
    except OSError as error: answer = errno.errorcode.get(error.errno, str(error.errno))
    else: answer = "DONE"
    print(name, answer, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Wall:
    """What stops an attack: the layer's name, and the errors it answers with."""

    layer: str
    errors: frozenset[str]

    @classmethod
    def of(cls, layer: str, errors: str) -> Wall:
        """``errors``: names with blanks between them."""
        return cls(layer, frozenset(errors.split()))


async def tried(rig: Rig, script: str, *argv: str, **options: object) -> dict[str, str]:
    """Run the script as a job and return its answers."""
    seen = await rig.run([*python(PRELUDE + script), *argv], **options)
    assert seen.verdict.kind == "exit", seen
    assert seen.verdict.code == 0, seen
    return answers(seen.out)


def outside(script: str, *argv: str, before: Sequence[str] = ()) -> dict[str, str]:
    """Run the same script on the host, as this test's user; ``before``: words in front of the command."""
    done = subprocess.run(
        [*before, *python(PRELUDE + script), *argv], capture_output=True, check=False, timeout=40, cwd="/"
    )
    assert done.returncode == 0, done
    return answers(done.stdout)


def answers(output: bytes) -> dict[str, str]:
    """Return the answer to each attack."""
    found: dict[str, str] = {}
    for line in output.decode().splitlines():
        name, answer = line.split()
        assert name not in found, f"{name} is tried twice"
        found[name] = answer
    return found


def broken(found: Mapping[str, str], walls: Mapping[str, Wall]) -> list[str]:
    """Say for each attack that no wall, or the wrong one, answered: ``NAME: ANSWER, not stopped by LAYER``.

    Every attack has to have a wall and the other way round.
    """
    bad = [f"{name}: {answer}, no wall is named for it" for name, answer in found.items() if name not in walls]
    for name, wall in walls.items():
        answer = found.get(name, "was not tried")
        if answer not in wall.errors:
            bad.append(f"{name}: {answer}, not stopped by {wall.layer} ({'|'.join(sorted(wall.errors))})")
    return bad
