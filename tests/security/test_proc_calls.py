"""The calls with which sandboxes were broken: each is really made in one job, and refused.

Stopped by the seccomp filter. The arguments are such that the call does no harm where it is allowed, and that a kernel
without the filter answers something else than EPERM: so the counter-check, the same calls outside, tells the filter
from a missing capability.
"""

from __future__ import annotations

import platform
import re
import signal
from pathlib import Path

import pytest

from tests.containment.rig import LEVEL, in_rig
from tests.containment.rig import Rig as Sandbox
from tests.security.fs_tries import Wall, broken, outside, tried

#: A row: name, numbers on x86-64 and aarch64 (None: no such call there), arguments; each in a process of its own.
CALLS = r"""
def row(name, x86, arm, *args):
    if (x86 if X86 else arm) is None: return
    def alone():
        pid = os.fork()
        if pid == 0:
            signal.alarm(5); os.setsid()
            try: raw(x86, arm, *args)
            except OSError as error: os._exit(error.errno)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status: raise OSError(status if status > 0 else 1000 - status, "")
    attempt(name, alone)
buf = ctypes.create_string_buffer(4096)
NONE, NOBODY, BAD = b"/nonexistent", 0x3FFFFF, -99
DATA = buf

# namespaces
for name, flag in (("user", 0x10000000), ("pid", 0x20000000), ("mnt", 0x20000), ("net", 0x40000000),
                   ("ipc", 0x8000000), ("uts", 0x4000000), ("cgroup", 0x2000000), ("time", 0x80)):
    row("unshare:" + name, 272, 97, flag)
    if flag > 0x80: row("clone:" + name, 56, 220, flag | 17, 0, 0, 0, 0)
row("clone3", 435, 435, 0, 0)
row("setns", 308, 268, -1, 0)
# mounts and roots
row("mount", 165, 40, 0, 0, 0, 0, 0)
row("umount2", 166, 39, NONE, 0x70000000)
row("pivot_root", 155, 41, NONE, NONE)
row("chroot", 161, 51, NONE)
row("open_tree", 428, 428, -100, NONE, 0)
row("open_tree:clone", 428, 428, -100, NONE, 1)
row("move_mount", 429, 429, -1, b"", -1, b"", 0x40000000)
row("fsopen", 430, 430, b"nosuchfs", 0)
row("fsconfig", 431, 431, -1, 6, 0, 0, 0)
row("fsmount", 432, 432, -1, 0, 0)
row("fspick", 433, 433, -100, NONE, 0)
row("mount_setattr", 442, 442, -1, b"", 0x1000, 0, 0)
row("open_tree_attr", 467, 467, -100, NONE, 1, 0, 0)
row("openat2", 437, 437, -100, b"/", 0, 24)
row("open_by_handle_at", 304, 265, -1, 0, 0)
row("name_to_handle_at", 303, 264, -100, 0, 0, 0, 0)
row("fanotify_init", 300, 262, 0x7FFF0000, 0)
row("swapon", 167, 224, NONE, 0)
row("swapoff", 168, 225, NONE)
row("quotactl", 179, 60, 0x7FFFFF00, 0, 0, 0)
row("quotactl_fd", 443, 443, -1, 0x7FFFFF00, 0, 0)
# the kernel itself
row("kexec_load", 246, 104, 0, 0, 0, 0xFFFF)
row("kexec_file_load", 320, 294, -1, -1, 0, 0, 0xFFFF)
row("init_module", 175, 105, 0, 0, b"")
row("finit_module", 313, 273, -1, b"", 0xFFFF)
row("delete_module", 176, 106, b"rf_no_such_module", 0x800)
row("reboot", 169, 142, 1, 2, 3, 0)
row("bpf", 321, 280, 0x7FFF, 0, 0)
row("perf_event_open", 298, 241, 0, 0, -1, -1, 0)
row("userfaultfd", 323, 282, 1)
row("io_uring_setup", 425, 425, 1, buf)
row("io_uring_enter", 426, 426, -1, 1, 0, 0, 0, 0)
row("io_uring_register", 427, 427, -1, 0, 0, 0)
row("syslog", 103, 116, BAD, 0, 0)
row("acct", 163, 89, NONE)
row("lookup_dcookie", 212, 18, 0, buf, 1)
row("uselib", 134, None, NONE)
row("nfsservctl", 180, 42, 0, 0, 0)
row("_sysctl", 156, None, 0)
# the machine
row("iopl", 172, None, 9)
row("ioperm", 173, None, -1, 2, 1)
row("modify_ldt", 154, None, 0, buf, 64)
row("personality", 135, 92, 0x40000)
row("personality:exec", 135, 92, 0x400000)
row("settimeofday", 164, 170, struct.pack("qq", 0, 2_000_000), 0)
row("clock_settime", 227, 112, BAD, struct.pack("qq", 0, 0))
row("adjtimex", 159, 171, 0)
row("clock_adjtime", 305, 266, BAD, struct.pack("qq", 0, 0).ljust(256))
row("sethostname", 170, 161, b"x", -1)
row("setdomainname", 171, 162, b"x", -1)
row("vhangup", 153, 58)
# other processes
row("ptrace:traceme", 101, 117, 0, 0, 0, 0)
row("ptrace:attach", 101, 117, 16, NOBODY, 0, 0)
row("process_vm_readv", 310, 270, NOBODY, 0, 0, 0, 0, 1)
row("process_vm_writev", 311, 271, NOBODY, 0, 0, 0, 0, 1)
row("process_madvise", 440, 440, -1, 0, 0, 0, 1)
row("process_mrelease", 448, 448, -1, 0)
row("pidfd_getfd", 438, 438, -1, 0, 0)
row("kcmp", 312, 272, NOBODY, NOBODY, 2, 0, 0)
row("prlimit64", 302, 261, NOBODY, 7, 0, 0)
row("setpriority:process", 141, 140, 0, NOBODY, 0)
row("setpriority:user", 141, 140, 2, NOBODY, 0)
row("ioprio_set", 251, 30, 1, NOBODY, 0)
row("ioprio_set:user", 251, 30, 3, NOBODY, 0)
row("sched_setaffinity", 203, 122, NOBODY, 8, buf)
row("sched_setparam", 142, 118, NOBODY, buf)
row("sched_setscheduler", 144, 119, NOBODY, 3, buf)
row("sched_setattr", 314, 274, NOBODY, struct.pack("I", 48).ljust(48, b"\0"), 0)
row("migrate_pages", 256, 238, NOBODY, 1, buf, buf)
row("move_pages", 279, 239, NOBODY, 0, 0, 0, 0, 0)
# keys
row("add_key", 248, 217, b"user", b"rf-probe", b"x", 1, -2)
row("request_key", 249, 218, b"user", b"rf-no-such-key", 0, 0)
row("keyctl:session", 250, 219, 1, 0)
row("keyctl:process", 250, 219, 0, -2, 1)
row("keyctl:chown", 250, 219, 4, -2, -1, -1)
# terminals
row("tiocsti", 16, 29, 0, 0x5412, b"x")
row("tioclinux", 16, 29, 0, 0x541C, b"\x02")
# numbers with bits that only a careless filter looks past
if X86:
    for name, number in (("mount", 165), ("ptrace", 101), ("bpf", 321), ("keyctl", 250)):
        row("x32:" + name, 0x40000000 | number, None, 0, 0, 0, 0, 0)
row("unshare:high", 272, 97, 0x7_0000_0000 | 0x10000000)
row("clone:high", 56, 220, 0x7_0000_0000 | 0x10000000 | 17, 0, 0, 0, 0)
"""
FILTER = Wall.of("seccomp", "EPERM ENOSYS")
#: A call through another ABI may also end the process: 1000 and the signal.
FOREIGN = Wall.of("seccomp", f"EPERM ENOSYS {1000 + signal.SIGSYS}")
HEADERS = Path("/usr/include/asm-generic/unistd.h")
#: Without the filter an ordinary user gets these far on every host; the others need a capability, which is the second
#: lock, or a sysctl of the host's.
FREE = """
unshare:user clone:user clone3 setns openat2 open_tree name_to_handle_at io_uring_enter io_uring_register
personality personality:exec modify_ldt ptrace:traceme ptrace:attach process_vm_readv process_vm_writev
process_madvise process_mrelease pidfd_getfd kcmp prlimit64 setpriority:process setpriority:user ioprio_set
ioprio_set:user sched_setaffinity sched_setparam sched_setscheduler sched_setattr migrate_pages move_pages
add_key request_key keyctl:session keyctl:process tiocsti tioclinux
"""


@pytest.fixture(scope="module")
def unguarded() -> dict[str, str]:
    """What the same calls answer outside."""
    return outside(CALLS)


def test_no_call_that_breaks_sandboxes_is_allowed(node_name: str, unguarded: dict[str, str]) -> None:
    """Every row answers EPERM or ENOSYS in a job, and something else where no filter stands before it."""

    async def scenario(rig: Sandbox) -> None:
        found = await tried(rig, CALLS)
        assert set(found) == set(unguarded)
        assert len(found) > 90, found
        walls = {name: FOREIGN if name.startswith("x32:") else FILTER for name in found}
        assert broken(found, walls) == []

    in_rig(node_name, scenario)


def test_without_the_filter_they_are_answered(unguarded: dict[str, str]) -> None:
    """Counter-check: outside, only what this kernel lacks or what takes a capability is refused in the same words."""
    absent = {name for name, answer in unguarded.items() if answer == "ENOSYS"}
    refused = {name for name, answer in unguarded.items() if answer == "EPERM"}
    assert refused & (set(FREE.split()) if LEVEL == "B" else set(unguarded)) == set()
    told_apart = set(unguarded) - absent - refused
    assert len(told_apart) > (75 if LEVEL == "A" else 35), (absent, refused)
    assert {"unshare:user", "ptrace:traceme", "keyctl:process", "prlimit64"} <= told_apart


@pytest.mark.skipif(not HEADERS.exists(), reason="the kernel's headers are not installed")
def test_the_numbers_are_the_kernels() -> None:
    """The table's numbers are those of the kernel's own headers: a wrong one would be refused for the wrong reason."""
    generic = _numbers(HEADERS)
    here = next(iter(Path("/usr/include").glob("*/asm/unistd_64.h")), None) if platform.machine() == "x86_64" else None
    native = {} if here is None else _numbers(here)
    wrong = []
    for name, x86, arm in re.findall(r'^row\("(\w+)[:\w]*", (\d+|None), (\d+|None)', CALLS, re.MULTILINE):
        for table, number in ((native, x86), (generic, arm)):
            if number != "None" and name in table and table[name] != int(number):
                wrong.append((name, number, table[name]))
    assert wrong == []


def _numbers(header: Path) -> dict[str, int]:
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    return {name: int(number) for name, number in found}
