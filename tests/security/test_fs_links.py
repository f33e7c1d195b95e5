"""Ways out of a granted folder by links, ``..``, descriptors and swapped folders (A-I03, attacks 46 and 48).

Everything outside is open to the job's uid, so that only the view, the kind of mount or the node's check can stop it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from node_agent.containment.errors import GrantRefused
from node_agent.containment.paths import Protected, open_grant
from node_agent.containment.plan import Mount
from tests.containment.rig import LEVEL, Rig, granted, in_rig, python
from tests.security.fs_tries import Wall, broken, outside, tried

VIEW = Wall.of("view", "ENOENT")
MOUNTS = Wall.of("mounts of their own", "EXDEV EROFS")

PLANT = r"""
import os, sys
top = sys.argv[1]
os.chdir(top + "/w")
os.symlink(top + "/out/secret", "to-file"); os.symlink(top + "/out", "to-folder")
os.symlink(top + "/out/n", "dangling")
os.symlink("../out", "relative"); os.makedirs("mid"); os.symlink("../../out", "mid/link")
os.symlink("/proc/self/root" + top + "/out", "magic")
"""

LINKS = r"""
top = sys.argv[1]
os.chdir(top + "/w")
here = os.open(".", os.O_RDONLY)
def read(path, at=None): os.close(os.open(path, os.O_RDONLY, dir_fd=at))
def write(path, at=None): os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=at))
for name in ("to-file", "to-folder/secret", "relative/secret", "mid/link/secret", "magic/secret"):
    attempt("read:" + name, lambda: read(name))
    attempt("write:" + name, lambda: write(name))
attempt("create:dangling", lambda: write("dangling"))
attempt("create:to-folder", lambda: write("to-folder/made"))
attempt("dotdot", lambda: read("../out/secret"))
attempt("dotdot:many", lambda: read("../" * 60 + top[1:] + "/out/secret"))
attempt("dotdot:dirfd", lambda: read("../out/secret", here))
attempt("proc:root", lambda: read("/proc/self/root" + top + "/out/secret"))
attempt("proc:cwd", lambda: read("/proc/self/cwd/../out/secret"))
attempt("proc:fd", lambda: read(f"/proc/self/fd/{here}/../out/secret"))
attempt("proc:task", lambda: read(f"/proc/thread-self/root{top}/out/secret"))
attempt("chdir", lambda: (os.chdir("to-folder"), os.chdir(top + "/w")))
attempt("truncate", lambda: os.truncate("to-file", 0))
attempt("chmod", lambda: os.chmod("to-file", 0o777))
attempt("utime", lambda: os.utime("to-file"))
attempt("hardlink:outside", lambda: os.link(top + "/out/secret", "hard"))
attempt("hardlink:followed", lambda: raw(265, 37, AT, b"to-file", AT, b"hard2", 0x400))
attempt("rename:in", lambda: os.rename(top + "/out/secret", "mine"))
attempt("rename:out", lambda: os.rename("mid", top + "/out/mid"))
attempt("fifo", lambda: os.mkfifo("to-folder/fifo"))
"""
REACH = dict.fromkeys(
    (
        *(f"{what}:{name}" for what in ("read", "write") for name in ("to-file", "to-folder/secret")),
        *(f"{what}:{name}/secret" for what in ("read", "write") for name in ("relative", "mid/link", "magic")),
        *("create:dangling", "create:to-folder", "dotdot", "dotdot:many", "dotdot:dirfd", "proc:root", "proc:cwd"),
        *("proc:fd", "proc:task", "chdir", "truncate", "chmod", "utime", "hardlink:outside", "hardlink:followed"),
        *("rename:in", "fifo"),
    ),
    VIEW,
) | {"rename:out": Wall.of("view", "ENOENT")}

ACROSS = r"""
top = sys.argv[1]
attempt("hardlink:read-to-write", lambda: os.link(top + "/r/file", top + "/w/hard"))
fd = os.open(top + "/r/file", os.O_RDONLY)
own = f"/proc/self/fd/{fd}".encode()
attempt("hardlink:descriptor", lambda: raw(265, 37, AT, own, AT, (top + "/w/hard2").encode(), 0x400))
attempt("rename:read-to-write", lambda: os.rename(top + "/r/file", top + "/w/moved"))
attempt("rename:write-to-read", lambda: os.rename(top + "/w/own", top + "/r/own"))
attempt("exchange", lambda: raw(316, 276, AT, (top + "/r/file").encode(), AT, (top + "/w/own").encode(), 2))
attempt("link:into-read", lambda: os.symlink("/etc", top + "/r/link"))
attempt("link:work-to-write", lambda: (open("/work/own", "w").close(), os.link("/work/own", top + "/w/own2")))
attempt("reopen:write", lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
attempt("reopen:truncate", lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_TRUNC))
attempt("fchmod", lambda: os.fchmod(fd, 0o777))
attempt("ftruncate", lambda: os.ftruncate(fd, 0))
"""

SWAP = r"""
top = sys.argv[1]
os.chdir(top + "/w")
os.mkdir("swap"); open("swap/secret", "w").write("mine"); os.symlink(top + "/out", "other")
end = time.monotonic() + 0.7
if os.fork() == 0:
    while time.monotonic() < end:
        raw(316, 276, AT, b"swap", AT, b"other", 2)
    os._exit(0)
seen, tries = set(), 0
while time.monotonic() < end:
    tries += 1
    try:
        fd = os.open("swap/secret", os.O_RDWR)
        seen.add(os.read(fd, 10).decode()); os.close(fd)
    except OSError as error: seen.add(errno.errorcode[error.errno])
    try: os.close(os.open("swap/made", os.O_CREAT | os.O_WRONLY))
    except OSError: pass
os.wait()
print("tries", tries > 100)
print("seen", "+".join(sorted(seen)))
"""


@pytest.fixture
def top(home: Path) -> Path:
    """A folder ``out`` that nobody granted, beside ``w`` and ``r``; all open to every uid."""
    for name in ("out", "w", "r"):
        (home / name).mkdir()
        (home / name).chmod(0o777)
    for name, text in (("out/secret", "secret"), ("r/file", "read"), ("w/own", "own")):
        (home / name).write_text(text)
        (home / name).chmod(0o666)
    return home


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what the test opened."""
    with ExitStack() as opened:
        yield opened


def grant(stack: ExitStack, path: Path, mode: Literal["read", "write"]) -> tuple[Mount, int]:
    """A grant for one attempt."""
    return Mount(str(path), mode, "dir"), stack.enter_context(granted(path, mode))


def untouched(top: Path) -> bool:
    """Whether the folder outside is as it was made."""
    secret = top / "out" / "secret"
    return os.listdir(top / "out") == ["secret"] and secret.read_text() == "secret" and secret.stat().st_nlink == 1


def test_attack_48_no_link_of_an_earlier_job_leads_out(node_name: str, top: Path, stack: ExitStack) -> None:
    """Links that one job planted, in the middle, dangling or magic, lead the next one nowhere; so does ``..``."""

    async def scenario(rig: Rig) -> None:
        planted = await rig.run([*python(PLANT), str(top)], mounts=[grant(stack, top / "w", "write")])
        assert planted.verdict.code == 0, planted
        found = await tried(rig, LINKS, str(top), mounts=[grant(stack, top / "w", "write")])
        assert broken(found, REACH) == []

    in_rig(node_name, scenario)
    assert untouched(top)
    # Without the view every one of them works.
    found = outside(LINKS, str(top))
    assert [name for name in REACH if found[name] != "DONE"] == []


def test_nothing_passes_between_a_read_and_a_write_grant(node_name: str, top: Path, stack: ExitStack) -> None:
    """No link, rename or second opening turns what may be read into what may be written."""

    async def scenario(rig: Rig) -> None:
        mounts = [grant(stack, top / "w", "write"), grant(stack, top / "r", "read")]
        found = await tried(rig, ACROSS, str(top), mounts=mounts)
        walls = dict.fromkeys(("hardlink:read-to-write", "hardlink:descriptor", "link:work-to-write"), MOUNTS)
        walls |= dict.fromkeys(("rename:read-to-write", "rename:write-to-read", "exchange", "link:into-read"), MOUNTS)
        walls |= dict.fromkeys(
            ("reopen:write", "reopen:truncate"), Wall.of("read-only mount, Landlock", "EROFS EACCES")
        )
        walls |= {"fchmod": Wall.of("read-only mount", "EROFS"), "ftruncate": Wall.of("open mode", "EINVAL")}
        assert broken(found, walls) == []

    in_rig(node_name, scenario)
    assert (top / "r" / "file").read_text() == "read"
    assert os.listdir(top / "r") == ["file"]


def test_a_swapped_folder_never_shows_what_lies_outside(node_name: str, top: Path, stack: ExitStack) -> None:
    """While one process swaps a folder and a link out without end, another reads its own file or nothing."""

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, SWAP, str(top), mounts=[grant(stack, top / "w", "write")])
        assert found["tries"] == "True"
        assert set(found["seen"].split("+")) <= {"mine", "ENOENT"}, "the view has no such place to lead to"
        assert "mine" in found["seen"]

    in_rig(node_name, scenario)
    assert untouched(top)


def test_attack_48_a_granted_path_that_became_a_link_is_refused(node_name: str, top: Path, stack: ExitStack) -> None:
    """A job that swaps a folder for a link gets the next job's grant refused, with the real path named."""
    (top / "w" / "sub").mkdir()
    (top / "w" / "sub").chmod(0o777)
    swap = f"mv {top}/w/sub {top}/w/old && ln -s {top}/out {top}/w/sub"

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(["sh", "-ec", swap], mounts=[grant(stack, top / "w", "write")])
        assert seen.verdict.code == 0, seen

    in_rig(node_name, scenario)
    for path in (top / "w" / "sub", top / "w" / "sub" / "secret"):
        with pytest.raises(GrantRefused, match=f"real path: {top}/out") as caught:
            open_grant(str(path), "read", protected=Protected.collect())
        assert caught.value.reason == "policy"


@pytest.mark.skipif(LEVEL == "B", reason="level B opens the path again and refuses another folder (test_view.py)")
def test_attack_48_a_folder_swapped_after_the_check_is_the_checked_one(
    node_name: str, top: Path, stack: ExitStack
) -> None:
    """Between check and start a folder is swapped for a link: the job gets the very folder that was checked."""

    async def scenario(rig: Rig) -> None:
        mounts = [grant(stack, top / "r", "read")]
        (top / "r").rename(top / "old")
        (top / "r").symlink_to(top / "out")
        seen = await rig.run(["ls", f"{top}/r"], mounts=mounts)
        assert seen.out == b"file\n", seen

    in_rig(node_name, scenario)


DESCRIPTORS = r"""
reached = 0
for fd in range(3, 1024):
    try: mode = os.fstat(fd).st_mode
    except OSError: continue
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode): print("holds", fd)
    for act in (lambda: os.open("secret", os.O_RDONLY, dir_fd=fd), lambda: os.fchdir(fd), lambda: os.listdir(fd)):
        try: act(); reached += 1
        except OSError: pass
channel = socket.socket(fileno=100)
channel.setblocking(False)
try: data, fds, _, _ = socket.recv_fds(channel, 100, 10); reached += len(fds)
except OSError: pass
print("reached", reached)
"""


def test_attack_46_no_descriptor_of_the_agent_is_inherited(node_name: str, top: Path) -> None:
    """A folder that the agent holds open, inheritable even, is in no job; none of a job's descriptors is a folder."""
    held = os.open(top / "out", os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(held, True)

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, DESCRIPTORS)
        assert found == {"reached": "0"}, "closed by close_range in the worker, and not passed to the zygote"

    try:
        in_rig(node_name, scenario)
    finally:
        os.close(held)
