"""Mounts, roots, devices and handles: a job tries to change what its view is made of, or to look past it.

Stopped by seccomp, by the missing capability, and by the view that has no such node. Each attack has the arguments with
which it works in a mount namespace of its own outside, where the counter-check makes it.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from node_agent.containment.plan import Mount
from tests.containment.rig import LEVEL, Rig, granted, in_rig
from tests.security.fs_tries import Wall, broken, outside, tried

MOUNTS = r"""
top = sys.argv[1]
NOSUID, BIND, REMOUNT, REC, PRIVATE = 2, 4096, 32, 16384, 1 << 18
own = sys.argv[2]
def alone(name, act):
    # Each in a process with a mount namespace of its own, where there is a way to have one.
    def inner():
        pid = os.fork()
        if pid == 0:
            signal.alarm(5)
            try: libc.unshare(0x20000); libc.mount(None, b"/", None, REC | PRIVATE, None); act()
            except OSError as error: os._exit(error.errno)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code: raise OSError(code if code > 0 else 1000 - code, "")
    attempt(name, inner)
def call(name, *args):
    if getattr(libc, name)(*args) < 0: raise OSError(ctypes.get_errno(), "")
def mount(source, target, kind, flags, data=None): call("mount", source, target, kind, ctypes.c_ulong(flags), data)
R, W, T = (top + "/r").encode(), (top + "/w").encode(), own.encode()
alone("tmpfs", lambda: mount(b"x", T, b"tmpfs", 0))
alone("bind", lambda: mount(R, T, None, BIND))
alone("bind:over-read", lambda: mount(W, R, None, BIND))
alone("bind:recursive", lambda: mount(b"/", T, None, BIND | REC))
def writable():
    mount(R, R, None, BIND); mount(None, R, None, REMOUNT | BIND)
alone("remount", writable)
alone("remount:as-it-is", lambda: mount(None, R, None, REMOUNT | BIND))
alone("propagation", lambda: mount(None, R, None, PRIVATE))
alone("proc", lambda: mount(b"proc", T, b"proc", 0))
alone("sysfs", lambda: mount(b"sysfs", T, b"sysfs", 0))
alone("devpts", lambda: mount(b"devpts", T, b"devpts", 0))
alone("cgroup2", lambda: mount(b"c", T, b"cgroup2", 0))
alone("overlay", lambda: mount(b"o", T, b"overlay", 0, b"lowerdir=/usr,upperdir=" + W + b"/u,workdir=" + W + b"/k"))
alone("ext4", lambda: mount(b"/dev/null", T, b"ext4", 0))
alone("umount", lambda: call("umount2", R, 2))
alone("umount:proc", lambda: call("umount2", b"/proc", 2))
def new_api():
    fd = raw(430, 430, b"tmpfs", 0); raw(431, 431, fd, 6, 0, 0, 0); raw(432, 432, fd, 0, 0)
alone("fsopen", new_api)
def moved():
    tree = raw(428, 428, AT, R, 1); raw(429, 429, tree, b"", AT, T, 4)
alone("move_mount", moved)
alone("mount_setattr", lambda: raw(442, 442, AT, R, 0, struct.pack("QQQQ", 0, 1, 0, 0), 32))
alone("chroot", lambda: (os.chroot(own), os.chdir("/")))
def pivot():
    mount(T, T, None, BIND); os.chdir(own); raw(155, 41, b".", b".")
alone("pivot_root", pivot)
alone("setns", lambda: raw(308, 268, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0x20000))
alone("setns:own", lambda: raw(308, 268, os.open("/proc/self/ns/mnt", os.O_RDONLY), 0x20000))
alone("unshare", lambda: call("unshare", 0x20000))
alone("unshare:user", lambda: call("unshare", 0x10000000 | 0x20000))
# devices
for name, major, minor in (("null", 1, 3), ("mem", 1, 1), ("kmsg", 1, 11), ("fuse", 10, 229), ("disk", 254, 0)):
    alone("mknod:" + name, lambda: os.mknod(own + "/" + name, stat.S_IFCHR | 0o666, os.makedev(major, minor)))
    alone("mknod:grant:" + name, lambda: os.mknod(top + "/w/" + name, stat.S_IFCHR | 0o666, os.makedev(major, minor)))
alone("mknod:block", lambda: os.mknod(own + "/vda", stat.S_IFBLK | 0o666, os.makedev(254, 0)))
for name in sys.argv[3:]:
    attempt("open:" + name, lambda: os.open("/dev/" + name, os.O_RDWR))
# handles: a file named past every folder
handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
number = ctypes.c_int(0)
alone("handle:name", lambda: raw(303, 264, AT, b"/usr", handle, ctypes.byref(number), 0))
def opened():
    raw(303, 264, AT, b"/usr", handle, ctypes.byref(number), 0)
    raw(304, 265, os.open("/usr", os.O_RDONLY), handle, 0)
alone("handle:open", opened)
alone("fanotify", lambda: raw(300, 262, 0, 0))
alone("swap", lambda: raw(167, 224, b"/dev/null", 0))
alone("quota", lambda: raw(179, 60, 0x80000100, b"/dev/root", 0, 0))
"""
FILTER = Wall.of("seccomp", "EPERM ENOSYS")
NODES = Wall.of("view (no such device node)", "ENOENT ENOTDIR")
RIGHT = Wall.of("Landlock, no capability", "EACCES EPERM")
DEVICES = (
    *("mem", "kmsg", "fuse", "kvm", "port", "vda", "loop-control", "net/tun", "vhost-net", "ptmx", "tty", "console"),
    *("mapper/control", "uinput", "snapshot", "autofs", "vsock", "userfaultfd", "dri/card0", "cpu_dma_latency"),
)
WALLS = dict.fromkeys(
    (
        *("tmpfs", "bind", "bind:over-read", "bind:recursive", "remount", "remount:as-it-is", "propagation", "proc"),
        *(
            "sysfs",
            "devpts",
            "cgroup2",
            "overlay",
            "ext4",
            "umount",
            "umount:proc",
            "fsopen",
            "move_mount",
            "setns:own",
        ),
        *("mount_setattr", "chroot", "pivot_root", "unshare", "unshare:user", "handle:name", "handle:open", "fanotify"),
        *("swap", "quota"),
    ),
    FILTER,
) | {"setns": Wall.of("seccomp, non-dumpable mould", "EPERM EACCES ENOENT"), "mknod:block": RIGHT}
WALLS |= {f"mknod{where}:{name}": RIGHT for where in ("", ":grant") for name in ("null", "mem", "kmsg", "fuse", "disk")}
WALLS |= {f"open:{name}": NODES for name in DEVICES}
#: What surely works outside, in a mount namespace of one's own; the rest also takes a kernel or a host that has it.
WORKS = {"tmpfs", "bind", "bind:over-read", "remount", "fsopen", "move_mount", "chroot", "pivot_root"}
WORKS |= {"unshare", "handle:name"} | ({"mknod:null", "mknod:grant:mem", "umount:proc"} if LEVEL == "A" else set())


@pytest.fixture
def top(home: Path) -> Path:
    """Folders ``r`` and ``w`` to grant, and ``own`` for the counter-check."""
    for name in ("r", "w", "own", "w/u", "w/k"):
        (home / name).mkdir()
        (home / name).chmod(0o777)
    return home


def test_nothing_of_the_view_can_be_mounted_over_or_away(node_name: str, top: Path) -> None:
    """Every way to mount, unmount, re-root, make a device or open by handle is refused, with working arguments."""

    async def scenario(rig: Rig) -> None:
        with ExitStack() as stack:
            mounts = [
                (Mount(str(top / "w"), "write", "dir"), stack.enter_context(granted(top / "w", "write"))),
                (Mount(str(top / "r"), "read", "dir"), stack.enter_context(granted(top / "r", "read"))),
            ]
            found = await tried(rig, MOUNTS, str(top), "/tmp", *DEVICES, mounts=mounts)
        assert broken(found, WALLS) == []
        # The next attempt has the same view as ever.
        assert (await rig.run(["sh", "-c", "ls /work /tmp; mount | wc -l"])).verdict.code == 0

    in_rig(node_name, scenario)
    assert not [path for path in (top / "w").rglob("*") if not path.is_dir()]


def test_without_the_walls_the_mounts_work(top: Path) -> None:
    """Counter-check: outside, with a mount namespace of one's own, the same calls do what a job must not do."""
    before = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    found = outside(MOUNTS, str(top), str(top / "own"), before=before)
    if (left := top / "w" / "k" / "work").exists():
        left.chmod(0o700)  # the overlay's own, which nobody may enter
    assert {name for name in WORKS if found[name] != "DONE"} == set()
