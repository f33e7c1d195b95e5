"""What a write grant lets a job leave on the host, and what the node itself never makes there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from node_agent.containment.errors import SetupError
from node_agent.containment.plan import Mount
from tests.containment.rig import LEVEL, Rig, granted, in_rig, python

SET_ID = r"""
import ctypes, errno, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
os.chdir(sys.argv[1])
open("f", "w").close()
fd = os.open("f", os.O_RDWR)
HIGH = 0x7000_0000_0000_0000
def raw(name, number, *args):
    words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in args]
    answer = libc.syscall(number, *words)
    print(name, "DONE" if answer >= 0 else errno.errorcode[ctypes.get_errno()])
at = ctypes.c_ulong(-100 & 0xFFFFFFFFFFFFFFFF).value
for bits in (0o4755, 0o2755, 0o6777, HIGH | 0o4755, 0x10000 | 0o4755):
    raw("fchmod", 91 if x86 else 52, fd, bits)
    raw("fchmodat", 268 if x86 else 53, at, b"f", bits)
    raw("fchmodat2", 452, at, b"f", bits, 0)
    raw("openat", 257 if x86 else 56, at, b"g%o" % bits, os.O_CREAT | os.O_WRONLY, bits)
    raw("tmpfile", 257 if x86 else 56, at, b".", 0o20200000 | os.O_RDWR, bits)
    raw("openat2", 437, at, b"h", None, 24)
    raw("mknodat", 259 if x86 else 33, at, b"i%o" % bits, 0o100000 | bits, 0)
    raw("mkdirat", 258 if x86 else 34, at, b"j%o" % bits, bits)
    if x86:
        raw("chmod", 90, b"f", bits)
        raw("creat", 85, b"k%o" % bits, bits)
        raw("open", 2, b"l%o" % bits, os.O_CREAT | os.O_WRONLY, bits)
        raw("mknod", 133, b"m%o" % bits, 0o100000 | bits, 0)
        raw("mkdir", 83, b"n%o" % bits, bits)
os.chmod("f", 0o1755)
os.mkdir("plain", 0o755)
"""


def test_attack_09_no_set_id_file_through_a_write_grant(node_name: str, home: Path) -> None:
    """Every call that could set the bits fails; ordinary modes, git and tar work; the host finds no such file."""
    project = home / "project"
    project.mkdir()
    project.chmod(0o777)

    async def scenario(rig: Rig) -> None:
        grant = Mount(str(project), "write", "dir")
        with granted(project, "write") as fd:
            seen = await rig.run([*python(SET_ID), str(project)], mounts=[(grant, fd)], allow_unix=False)
        answers = [line.split() for line in seen.out.decode().splitlines()]
        assert len(answers) >= 8 * 5, seen
        assert [name for name, answer in answers if answer not in ("EPERM", "ENOSYS")] == []
        assert seen.verdict.code == 0, seen
        usual = "git init -q .; echo 1 >a; git add a; tar cf ../a.tar .; tar xf ../a.tar"
        script = f"mkdir {project}/r; cd {project}/r; {usual}"
        with granted(project, "write") as fd:
            seen = await rig.run(["sh", "-ec", script], mounts=[(grant, fd)], allow_unix=False)
        assert seen.verdict.code == 0, seen

    in_rig(node_name, scenario)
    modes = {path: path.lstat().st_mode for path in project.rglob("*")}
    assert len(modes) > 3
    assert [path for path, mode in modes.items() if mode & (stat.S_ISUID | stat.S_ISGID)] == []


@pytest.mark.skipif(LEVEL == "B", reason="at level B a grant is reopened by its path, so it can't stand elsewhere")
def test_nothing_is_made_on_the_host_for_a_nested_grant(node_name: str, home: Path) -> None:
    """A grant that covers one of the job's own places is the host's: missing folders for another grant are not made."""
    outer, inner = home / "outer", home / "inner"
    outer.mkdir()
    inner.mkdir()

    async def scenario(rig: Rig) -> None:
        with granted(outer, "write") as first, granted(inner, "read") as second:
            mounts = [(Mount("/work", "write", "dir"), first), (Mount("/work/a/b", "read", "dir"), second)]
            with pytest.raises(SetupError, match="grant"):
                await rig.run(["true"], mounts=mounts, allow_unix=False)

    in_rig(node_name, scenario)
    assert list(outer.iterdir()) == []
