"""A job reaches no process but its own: not by signals, tracing, memory, descriptors, scheduling or /proc.

Strangers are stopped by the pid namespace (their numbers name nobody) and seccomp; pid 1 of the job's own world, the
mould, by seccomp, by not being dumpable, and by the kernel's care for the first process of a namespace.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.containment.rig import FIRST_UID, LEVEL, Rig, in_rig, python
from tests.security.fs_tries import PRELUDE, Wall, broken, outside, tried
from tests.security.jobs import next_is_fine

#: The uid of the job and, at level A, of the stranger: at B both are this test's own.
SAME_UID = FIRST_UID + 450
#: argv: the host's pid of a process that is none of the job's. What kills comes last.
ON_A_STRANGER = r"""
pid = int(sys.argv[1])
here, there = ctypes.create_string_buffer(8), 0x1000
vector = struct.pack("QQ", ctypes.addressof(here), 8), struct.pack("QQ", there, 8)
def memory(x86, arm):
    try: raw(x86, arm, pid, vector[0], 1, vector[1], 1, 0)
    except OSError as error:
        if error.errno != errno.EFAULT: raise  # that far comes only who may
def traced():
    raw(101, 117, 16, pid, 0, 0); os.waitpid(pid, 0x40000000); raw(101, 117, 17, pid, 0, 0)
def through_pidfd(act):
    fd = os.pidfd_open(pid)
    try: act(fd)
    finally: os.close(fd)
def owned():
    a, b = socket.socketpair()
    fcntl.fcntl(a, fcntl.F_SETOWN, pid)
    fcntl.fcntl(a, 10, signal.SIGURG)
    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)
for name in ("maps", "mem", "environ", "auxv", "fd", "root", "cwd", "exe", "ns/pid", "ns/mnt", "status", "cmdline"):
    path = f"/proc/{pid}/{name}"
    attempt("proc:" + name, lambda: os.listdir(path) if name in ("fd", "root", "cwd") else open(path, "rb").close())
attempt("proc:task", lambda: os.listdir(f"/proc/{pid}/task"))
attempt("proc:oom", lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("999"))
attempt("pidfd_open", lambda: through_pidfd(lambda fd: None))
attempt("pidfd_getfd", lambda: through_pidfd(lambda fd: os.close(raw(438, 438, fd, 0, 0))))
attempt("pidfd_setns", lambda: through_pidfd(lambda fd: raw(308, 268, fd, 0x04000000)))
attempt("kcmp", lambda: raw(312, 272, os.getpid(), pid, 2, 0, 0))
attempt("vm_readv", lambda: memory(310, 270))
attempt("vm_writev", lambda: memory(311, 271))
attempt("move_pages", lambda: raw(279, 239, pid, 0, 0, 0, 0, 0))
attempt("robust_list", lambda: raw(274, 100, pid, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8)))
attempt("prlimit", lambda: raw(302, 261, pid, 7, struct.pack("QQ", 64, 64), 0))
attempt("setpriority", lambda: raw(141, 140, 0, pid, 19))
attempt("ioprio", lambda: raw(251, 30, 1, pid, 3 << 13))
attempt("affinity", lambda: raw(203, 122, pid, 8, struct.pack("Q", 1)))
attempt("scheduler", lambda: raw(144, 119, pid, 3, struct.pack("i", 0)))
attempt("getpgid", lambda: os.getpgid(pid))
attempt("setown", owned)
attempt("trace", traced)
attempt("seize", lambda: raw(101, 117, 0x4206, pid, 0, 0))
attempt("signal:0", lambda: os.kill(pid, 0))
attempt("sigqueue", lambda: raw(129, 138, pid, signal.SIGCONT, struct.pack("iii", signal.SIGCONT, 0, -1).ljust(128)))
attempt("stop", lambda: os.kill(pid, signal.SIGSTOP))
attempt("tgkill", lambda: raw(234, 131, pid, pid, signal.SIGCONT))
attempt("pidfd_signal", lambda: through_pidfd(lambda fd: signal.pidfd_send_signal(fd, signal.SIGCONT)))
attempt("kill", lambda: os.kill(pid, signal.SIGKILL))
attempt("kill:group", lambda: os.killpg(pid, signal.SIGKILL))
"""
#: Answered by the filter, before the pid is even looked at.
BY_SECCOMP = "kcmp vm_readv vm_writev move_pages prlimit setpriority ioprio affinity scheduler trace seize"
UNSEEN = Wall.of("own /proc of the pid namespace", "ENOENT")
NOBODY = Wall.of("pid namespace", "ESRCH EPERM ENOSYS")
FILTERED = Wall.of("seccomp", "EPERM ENOSYS")
#: What an ordinary user's process can't do even to its own kind; and with Yama, not to one that is no child of it.
NEEDS_ROOT = {"pidfd_setns"}
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
TRACING = {"proc:mem", "trace", "seize", "vm_readv", "vm_writev", "kcmp", "pidfd_getfd"}


def walls(found: dict[str, str]) -> dict[str, Wall]:
    """Return the wall of each attack on a stranger."""
    filtered = dict.fromkeys(BY_SECCOMP.split(), FILTERED)
    return {name: UNSEEN if name.startswith("proc:") else filtered.get(name, NOBODY) for name in found}


def test_no_stranger_is_reached(node_name: str) -> None:
    """Agent, zygote, mould (by its host pid) and a process of the job's own uid: nothing of them is seen or touched."""
    as_job = {"user": SAME_UID, "group": SAME_UID, "extra_groups": []} if LEVEL == "A" else {}

    async def scenario(rig: Rig) -> None:
        await rig.run(["true"])
        with subprocess.Popen(["sleep", "40"], cwd="/", **as_job) as stranger:  # type: ignore[call-overload] # options
            try:
                before = Path(f"/proc/{stranger.pid}/limits").read_text()
                pids = {"agent": os.getpid(), "zygote": rig.zygote.pid, "mould": rig.slot.mould_pid}
                for name, pid in (pids | {"stranger": stranger.pid}).items():
                    own = {"uid": SAME_UID, "gid": SAME_UID} if LEVEL == "A" else {}
                    found = await tried(rig, ON_A_STRANGER, str(pid), **own)
                    assert len(found) == 38, found
                    assert broken(found, walls(found)) == [], name
                assert stranger.poll() is None
                assert Path(f"/proc/{stranger.pid}/limits").read_text() == before
            finally:
                stranger.kill()
        assert await next_is_fine(rig)

    in_rig(node_name, scenario)


def test_without_the_walls_a_stranger_is_reached() -> None:
    """Counter-check: the same attempts, outside, by a process of the same uid: each of them works."""
    with subprocess.Popen(["sleep", "40"], cwd="/", start_new_session=True) as stranger:
        try:
            found = outside(ON_A_STRANGER, str(stranger.pid))
        finally:
            stranger.kill()
    failed = {name: answer for name, answer in found.items() if answer != "DONE"}
    excused = NEEDS_ROOT if LEVEL == "B" else set()
    if LEVEL == "B" and YAMA.exists() and YAMA.read_text().strip() != "0":
        excused |= TRACING
    assert set(failed) <= excused, failed


ON_PID_1 = r"""
def read(name):
    path = "/proc/1/" + name
    if name in ("fd", "fdinfo", "root", "cwd", "map_files", "task/1/fd"): os.listdir(path)
    else: open(path, "rb").read(1)
def write(name, text):
    with open("/proc/1/" + name, "w") as file: file.write(text)
closed = "mem maps smaps smaps_rollup environ auxv pagemap stack syscall personality io fd fdinfo map_files root cwd"
for name in closed.split() + ["exe", "mountinfo", "mounts", "mountstats", "task/1/fd", "task/1/mem", "timerslack_ns"]:
    attempt("read:" + name, lambda: read(name))
for name in ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time", "user", "uts"):
    attempt("ns:" + name, lambda: os.close(os.open("/proc/1/ns/" + name, os.O_RDONLY)))
for name, text in (("mem", "x"), ("oom_score_adj", "1000"), ("comm", "x"), ("clear_refs", "1"), ("timerslack_ns", "1"),
                   ("coredump_filter", "0"), ("uid_map", "0 0 1"), ("setgroups", "allow"), ("loginuid", "0")):
    attempt("write:" + name, lambda: write(name, text))
own = os.pidfd_open(1)
attempt("pidfd_getfd", lambda: raw(438, 438, own, 3, 0))
attempt("process_madvise", lambda: raw(440, 440, own, struct.pack("QQ", 0x1000, 4096), 1, 20, 0))
attempt("process_mrelease", lambda: raw(448, 448, own, 0))
attempt("trace", lambda: raw(101, 117, 16, 1, 0, 0))
attempt("seize", lambda: raw(101, 117, 0x4206, 1, 0, 0))
attempt("kcmp", lambda: raw(312, 272, os.getpid(), 1, 2, 0, 0))
here = ctypes.create_string_buffer(8)
one = struct.pack("QQ", ctypes.addressof(here), 8)
attempt("vm_readv", lambda: raw(310, 270, 1, one, 1, one, 1, 0))
attempt("vm_writev", lambda: raw(311, 271, 1, one, 1, one, 1, 0))
"""
#: Nothing here is answered: pid 1 takes no signal of its own namespace that it has no handler for, and it has none.
SIGNALS_TO_PID_1 = r"""
def quietly(act):
    try: act()
    except OSError: pass
own = os.pidfd_open(1)
for number in signal.valid_signals():
    quietly(lambda: os.kill(1, number))
    quietly(lambda: signal.pidfd_send_signal(own, number))
    quietly(lambda: raw(234, 131, 1, 1, number))
    quietly(lambda: raw(129, 138, 1, number, struct.pack("iii", number, 0, -1).ljust(128)))
    # A descriptor that sends it when something can be read, and a child that sends it when it ends as an orphan.
    a, b = socket.socketpair()
    quietly(lambda: (fcntl.fcntl(a, fcntl.F_SETOWN, 1), fcntl.fcntl(a, 10, number),
                     fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC), b.send(b"x")))
    if os.fork() == 0:
        quietly(lambda: raw(56, 220, number, 0, 0, 0, 0))
        os._exit(0)
    quietly(lambda: raw(56, 220, 0x8000 | number, 0, 0, 0, 0) or os._exit(0))
print("sent", len(signal.valid_signals()))
"""


def test_attack_43_the_mould_is_shut(node_name: str) -> None:
    """pid 1 of the job's world can't be read, written, traced, entered or slowed, though at level B it has its uid."""

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, ON_PID_1)
        assert len(found) == 49, found
        closed = Wall.of("not dumpable, Landlock, seccomp", "EACCES EPERM ENOSYS ENOENT EINVAL")
        assert broken(found, dict.fromkeys(found, closed)) == []

    in_rig(node_name, scenario)


def test_attack_37_no_signal_ends_the_mould(node_name: str) -> None:
    """Every signal, in seven ways, and the same mould serves the next attempt."""

    async def scenario(rig: Rig) -> None:
        await rig.run(["true"])
        mould = rig.slot.mould_pid
        seen = await rig.run(python(PRELUDE + SIGNALS_TO_PID_1))
        assert seen.out.startswith(b"sent 6"), seen
        assert await next_is_fine(rig)
        assert rig.slot.mould_pid == mould, "pid 1's own protection: it took a signal of the job"

    in_rig(node_name, scenario)
