"""The kernel's own answers, inside a job: every denied call is really made, with arguments that do nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from node_agent.containment import syscalls
from node_agent.containment.plan import Mount
from node_agent.containment.sysnumbers import NUMBERS
from tests.containment.rig import Rig, granted, in_rig, python

#: Prints the error of each number, in order. No call that is allowed by mistake could do harm with these arguments.
CALL = r"""
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = []
for number in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    answer = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
    answers.append("DONE" if answer != -1 else errno.errorcode.get(ctypes.get_errno(), "?"))
print(json.dumps(answers))
"""
TABLE = NUMBERS[os.uname().machine]
#: Beyond every table: what later kernels will have.
LATER = (*range(max(TABLE.values()) + 1, max(TABLE.values()) + 40), 511, 700, 4000, 2**31 - 1, -1)


@pytest.mark.parametrize("allow_unix", [True, False])
def test_what_the_lists_deny_is_denied_by_the_kernel(node_name: str, *, allow_unix: bool) -> None:
    """EPERM for every call of the deny list, ENOSYS for the absent ones and for numbers that no table knows."""
    denied = sorted(syscalls.DENIED & set(TABLE))
    absent = sorted(syscalls.ABSENT & set(TABLE))
    later = [number for number in LATER if os.uname().machine != "x86_64" or not 0x4000_0000 <= number < 0x8000_0000]
    numbers = [*(TABLE[name] for name in (*denied, *absent)), *later]

    async def scenario(rig: Rig) -> None:
        seen = await rig.run([*python(CALL), json.dumps(numbers)], allow_unix=allow_unix)
        assert seen.verdict.code == 0, seen
        found = dict(zip((*denied, *absent, *map(str, later)), json.loads(seen.out), strict=True))
        wanted = dict.fromkeys(denied, "EPERM") | dict.fromkeys((*absent, *map(str, later)), "ENOSYS")
        assert found == wanted

    in_rig(node_name, scenario)


def test_attack_40_file_flags_and_project_ids_stay(node_name: str, home: Path) -> None:
    """A job can't change a file's flags or project: below a write grant that would end its project quota's count."""
    place = home / "place"
    place.mkdir()
    place.chmod(0o777)
    code = r"""
import errno, fcntl, os, struct, sys
for folder in sys.argv[1:]:
    fd = os.open(folder + "/file", os.O_RDWR | os.O_CREAT)
    for number, size in ((0x40086602, 8), (0x401C5820, 28)):
        try: fcntl.ioctl(fd, number, bytes(size)); print("DONE")
        except OSError as error: print(errno.errorcode[error.errno])
"""

    async def scenario(rig: Rig) -> None:
        with granted(place, "write") as fd:
            grant = Mount(str(place), "write", "dir")
            seen = await rig.run([*python(code), "/work", str(place)], mounts=[(grant, fd)], allow_unix=False)
        assert seen.out.split() == [b"EPERM"] * 4, seen

    in_rig(node_name, scenario)
