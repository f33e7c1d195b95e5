"""Writes to what a job may only read: read grants, code that later jobs and the operator run, the system tree.

Modes are wide open and at level B the job's uid owns everything, so that permissions stop nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from node_agent.containment import landlock, worker
from node_agent.containment.plan import Mount
from tests.containment.rig import LEVEL, TASKS, Rig, granted, in_rig, python
from tests.security.fs_tries import Wall, broken, outside, tried

READ_ONLY = Wall.of("read-only mount", "EROFS")

#: Every call that changes a file, a folder or what is known of it.
CHANGES = r"""
top = sys.argv[1]
os.chdir(top)
def write(flags, path="file"): os.close(os.open(path, flags, 0o666))
attempt("open:write", lambda: write(os.O_WRONLY))
attempt("open:append", lambda: write(os.O_RDWR | os.O_APPEND))
attempt("open:truncate", lambda: write(os.O_RDONLY | os.O_TRUNC))
attempt("open:create", lambda: write(os.O_WRONLY | os.O_CREAT, "new"))
attempt("open:tmpfile", lambda: write(os.O_WRONLY | os.O_TMPFILE, "."))
attempt("truncate", lambda: os.truncate("file", 0))
attempt("mkdir", lambda: os.mkdir("new"))
attempt("mkfifo", lambda: os.mkfifo("new"))
attempt("symlink", lambda: os.symlink("file", "new"))
attempt("link", lambda: os.link("file", "new"))
attempt("chmod", lambda: os.chmod("file", 0o600))
attempt("chown", lambda: os.chown("file", -1, -1))
attempt("utime", lambda: os.utime("file"))
attempt("setxattr", lambda: os.setxattr("file", "user.a", b"b"))
attempt("removexattr", lambda: os.removexattr("file", "user.mark"))
fd = os.open("file", os.O_RDONLY)
attempt("fchmod", lambda: os.fchmod(fd, 0o600))
attempt("futimens", lambda: os.utime(fd))
attempt("fsetxattr", lambda: os.setxattr(fd, "user.a", b"b"))
attempt("chattr", lambda: fcntl.ioctl(fd, 0x40086602, struct.pack("q", 0x40)))
attempt("reopened", lambda: write(os.O_RDWR, f"/proc/self/fd/{fd}"))
swap = lambda: raw(316, 276, AT, b"file", AT, b"folder", 2)
attempt("exchange", lambda: (swap(), swap()))
attempt("rename", lambda: os.rename("file", "file2"))
attempt("rmdir", lambda: os.rmdir("folder"))
attempt("unlink", lambda: os.unlink("file" if os.path.exists("file") else "file2"))
"""
CHANGED = dict.fromkeys(
    (
        *("open:write", "open:append", "open:truncate", "open:create", "open:tmpfile", "reopened", "truncate"),
        *("mkdir", "mkfifo", "symlink", "link", "chmod", "chown", "utime", "setxattr", "removexattr", "fchmod"),
        *("futimens", "fsetxattr", "chattr", "rename", "exchange", "rmdir", "unlink"),
    ),
    READ_ONLY,
) | dict.fromkeys(
    # Landlock is asked before the mount where a right is missing that a folder would need.
    ("link", "rename", "exchange", "truncate"),
    Wall.of("read-only mount, Landlock", "EROFS EACCES EXDEV"),
)
CHANGED["chattr"] = Wall.of("read-only mount, seccomp", "EROFS EPERM")


@pytest.fixture
def tree() -> Iterator[Path]:
    """A tree that this test's user owns and everybody may write; not below a place that jobs may write."""
    place = Path(tempfile.mkdtemp(prefix="rf-", dir="/var/tmp"))
    place.chmod(0o711)
    try:
        yield _made(place / "tree")
    finally:
        shutil.rmtree(place)


def _made(top: Path) -> Path:
    (top / "folder").mkdir(parents=True)
    (top / "file").write_text("as it was")
    os.setxattr(top / "file", "user.mark", b"1")
    for path in (top, top / "folder", top / "file"):
        path.chmod(0o777)
    return top


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what the test opened."""
    with ExitStack() as opened:
        yield opened


def reading(stack: ExitStack, path: Path) -> tuple[Mount, int]:
    """A read grant for one attempt."""
    return Mount(str(path), "read", "dir"), stack.enter_context(granted(path, "read"))


def test_nothing_of_a_read_grant_can_be_changed(node_name: str, tree: Path, stack: ExitStack) -> None:
    """All calls that change files, names, modes, times, attributes and flags are refused; outside they work."""

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, CHANGES, str(tree), mounts=[reading(stack, tree)])
        assert broken(found, CHANGED) == []

    in_rig(node_name, scenario)
    assert (tree / "file").read_text() == "as it was"
    assert sorted(os.listdir(tree)) == ["file", "folder"]
    found = outside(CHANGES, str(tree))
    # The file is linked as "new" by then, so an exclusive create fails; tmpfs and ext4 have no common set of flags.
    assert [name for name in CHANGED if found[name] not in ("DONE", "EEXIST", "ENOTTY", "EOPNOTSUPP")] == []


SPECIAL = r"""
top = sys.argv[1]
fd = os.open(top + "/fifo", os.O_RDONLY | os.O_NONBLOCK)
attempt("fifo:write", lambda: os.write(os.open(top + "/fifo", os.O_WRONLY | os.O_NONBLOCK), b"from the job"))
attempt("fifo:both", lambda: os.write(os.open(top + "/fifo", os.O_RDWR | os.O_NONBLOCK), b"from the job"))
def again():
    held = os.open(top + "/fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.write(os.open(f"/proc/self/fd/{held}", os.O_WRONLY | os.O_NONBLOCK), b"from the job")
attempt("fifo:reopened", again)
def connect(kind, path):
    one = socket.socket(socket.AF_UNIX, kind); one.connect(path); one.send(b"from the job")
attempt("socket:stream", lambda: connect(socket.SOCK_STREAM, top + "/stream"))
attempt("socket:datagram", lambda: connect(socket.SOCK_DGRAM, top + "/datagram"))
pair = lambda kind: socket.socketpair(socket.AF_UNIX, kind)[0]
attempt("pair:datagram", lambda: pair(socket.SOCK_DGRAM).sendto(b"from the job", top + "/datagram"))
attempt("pair:stream", lambda: pair(socket.SOCK_STREAM).connect(top + "/stream"))
attempt("pair:packets", lambda: pair(socket.SOCK_SEQPACKET).connect(top + "/packets"))
attempt("device", lambda: os.open(top + "/null", os.O_WRONLY))
"""


def test_attack_16_17_no_fifo_socket_or_device_of_a_read_grant_takes_anything(
    node_name: str, tree: Path, stack: ExitStack
) -> None:
    """A read-only mount does not stop FIFOs and sockets: Landlock and the filter do; nodev stops devices."""
    os.mkfifo(tree / "fifo")
    (tree / "fifo").chmod(0o666)
    with ExitStack() as open_ones:
        fifo = os.open(tree / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        open_ones.callback(os.close, fifo)
        hosts = []
        kinds = {"stream": socket.SOCK_STREAM, "packets": socket.SOCK_SEQPACKET, "datagram": socket.SOCK_DGRAM}
        for name, kind in kinds.items():
            host = open_ones.enter_context(socket.socket(socket.AF_UNIX, kind))
            host.bind(str(tree / name))
            host.setblocking(False)
            (tree / name).chmod(0o777)
            hosts.append(host)
            if kind != socket.SOCK_DGRAM:
                host.listen()
        if LEVEL == "A":
            os.mknod(tree / "null", 0o20666, os.makedev(1, 3))
            (tree / "null").chmod(0o666)
        stopped = "EACCES" if landlock.abi() else "DONE"
        walls = dict.fromkeys(("fifo:write", "fifo:both", "fifo:reopened"), Wall.of("Landlock", stopped))
        walls |= dict.fromkeys(
            ("socket:stream", "socket:datagram", "pair:datagram"), Wall.of("seccomp", "EPERM EACCES")
        )
        walls |= dict.fromkeys(("pair:stream", "pair:packets"), Wall.of("the pair is connected", "EISCONN EINVAL"))
        walls |= {"device": Wall.of("nodev", "EACCES" if LEVEL == "A" else "ENOENT")}

        async def scenario(rig: Rig) -> None:
            found = await tried(rig, SPECIAL, str(tree), mounts=[reading(stack, tree)], allow_unix=False)
            assert broken(found, walls) == []

        in_rig(node_name, scenario)
        if landlock.abi():
            assert os.read(fifo, 100) == b"", "nothing was written, and nobody holds it for writing"
        for host in hosts:
            with pytest.raises(BlockingIOError):
                host.recv(100) if host.type == socket.SOCK_DGRAM else host.accept()
        found = outside(SPECIAL, str(tree))
        worked = {name for name, answer in found.items() if answer == "DONE"}
        assert worked >= {
            "fifo:write",
            "fifo:both",
            "fifo:reopened",
            "socket:stream",
            "socket:datagram",
            "pair:datagram",
        }


CODE = r"""
import os, sys
made = []
for place in sys.argv[1:]:
    if not os.path.isdir(place): continue
    for name in ("evil.pth", "sitecustomize.py", "__pycache__/x.pyc"):
        try: open(os.path.join(place, name), "w"); made.append(place + "/" + name)
        except OSError: pass
    for entry in sorted(os.listdir(place))[:200]:
        path = os.path.join(place, entry)
        for act in (lambda: os.chmod(path, 0o777), lambda: os.utime(path), lambda: open(path, "ab").close()):
            try: act(); made.append(path); break
            except OSError: pass
for path in ("/etc/ld.so.preload", "/etc/ld.so.cache", "/etc/passwd", "/run/passwd", "/etc/profile", "/etc/hosts"):
    try: open(path, "a").close(); made.append(path)
    except OSError: pass
print(made)
"""


def test_no_code_that_a_later_job_runs_can_be_written(node_name: str) -> None:
    """Python, site-packages, task folders, the loader's files and accounts take no write; nor does a bytecode cache."""
    own = (sys.prefix, sys.base_prefix, *worker.OWN_PATHS)
    libraries = [path for path in sys.path if path.startswith(tuple(f"{top}/" for top in own))]
    places = [*dict.fromkeys(libraries), *worker.OWN_PATHS, TASKS, "/usr/bin", "/usr/lib", "/etc"]

    async def scenario(rig: Rig) -> None:
        for options in ({}, {"task": "probe_tasks:status"}):
            if options:
                await rig.run(**options)  # a task imports its module, without a cache
            seen = await rig.run([*python(CODE), *places])
            assert seen.out == b"[]\n", f"read-only mounts of the view: {seen}"

    caches = set(Path(TASKS).rglob("__pycache__/*"))
    in_rig(node_name, scenario)
    assert set(Path(TASKS).rglob("__pycache__/*")) == caches


@pytest.mark.skipif(LEVEL == "A", reason="at level A the job's uid owns no code of the host")
def test_own_code_is_read_only_though_the_job_owns_it(node_name: str, tree: Path) -> None:
    """At level B the task folder belongs to the job's very uid: the mount alone stops it, and it does."""
    (tree / "own_tasks.py").write_text("x = 1\n")

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, CHANGES, str(tree), python_paths=(*rig.plan().python_paths, str(tree)))
        assert broken(found, CHANGED) == []

    in_rig(node_name, scenario)


def test_a_file_that_runs_as_another_user_gives_nothing(node_name: str, tree: Path, stack: ExitStack) -> None:
    """A set-user-ID program of the host, and one in a read grant, runs with the job's own uid."""
    if LEVEL == "A":
        subprocess.run(["cp", "/usr/bin/id", str(tree / "id")], check=True)
        (tree / "id").chmod(0o6755)
    script = "for each in /usr/bin/su /bin/mount /usr/bin/passwd; do [ -u $each ] && echo set; done; "
    script += f"[ -e {tree}/id ] && {tree}/id -u || id -u; {sys.executable} -I -c 'import os; print(os.geteuid())'"

    async def scenario(rig: Rig) -> None:
        plan = rig.plan()
        seen = await rig.run(["sh", "-c", script], mounts=[reading(stack, tree)], uid=plan.uid, gid=plan.gid)
        numbers = [word for word in seen.out.decode().split() if word != "set"]
        assert numbers == [str(plan.uid)] * 2, f"no_new_privs and nosuid: {seen}"

    in_rig(node_name, scenario)
    if LEVEL == "A":
        ordinary = ["setpriv", "--reuid", "65533", "--clear-groups", "--", str(tree / "id"), "-u"]
        tree.parent.chmod(0o755)
        seen = subprocess.run(ordinary, capture_output=True, check=True).stdout
        assert seen == b"0\n", "without the wall it is root"
