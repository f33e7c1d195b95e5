"""A crash leaves no core outside of the job, whatever the job does to its own limits (attack 19).

Stopped by RLIMIT_CORE = 1, which the kernel honours for a core_pattern that pipes too; 0 it does not. A job may lower
any limit of its own, so the filter keeps this one: setting it is answered as done, and nothing changes.
"""

from __future__ import annotations

import resource

from tests.containment.rig import Rig, in_rig
from tests.security.fs_tries import Wall, broken, outside, tried

CORE = r"""
import resource
x86_prlimit, arm_prlimit, x86_set, arm_set = 302, 261, 160, 164
def kept(act):
    def check():
        pid = os.fork()
        if pid == 0:
            try: act()
            except (OSError, ValueError): pass
            soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
            os._exit(0 if soft == hard == 1 else 42)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0: raise OSError(errno.EPERM, "")
    return check
def far():
    # A pointer whose low half is nought.
    import mmap
    libc.mmap.restype = ctypes.c_void_p
    at = libc.mmap(ctypes.c_void_p(0x3_0000_0000), ctypes.c_size_t(4096), 3, 0x100000 | 0x22, -1, ctypes.c_long(0))
    ctypes.memset(at, 0, 16)
    raw(x86_prlimit, arm_prlimit, 0, 4, ctypes.c_void_p(at), 0)
zero = struct.pack("QQ", 0, 0)
attempt("setrlimit", kept(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))))
attempt("soft", kept(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 1))))
attempt("prlimit", kept(lambda: raw(x86_prlimit, arm_prlimit, 0, 4, zero, 0)))
attempt("prlimit:high", kept(lambda: raw(x86_prlimit, arm_prlimit, 0, 4 | 1 << 32, zero, 0)))
attempt("prlimit:far", kept(far))
attempt("prlimit:self", kept(lambda: raw(x86_prlimit, arm_prlimit, os.getpid(), 4, zero, 0)))
attempt("setrlimit:raw", kept(lambda: raw(x86_set, arm_set, 4, zero)))
look = "ulimit -c 0; grep -q 'core file size  *1  *1 ' /proc/$$/limits || exit 42"
attempt("shell", kept(lambda: os.execvp("sh", ["sh", "-c", look])))
attempt("raise", kept(lambda: resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))))
for number, name in ((4, "core"), (7, "nofile")):
    resource.getrlimit(number)
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (60, 60)
"""


def test_attack_19_a_job_can_not_bring_its_core_back(node_name: str) -> None:
    """However a job sets its core limit, it stays 1; its other limits it may lower."""

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, CORE)
        assert broken(found, dict.fromkeys(found, Wall.of("seccomp", "EPERM"))) == []

    in_rig(node_name, scenario)


def test_attack_19_without_the_filter_it_could() -> None:
    """Counter-check: outside, a process with the limit 1 gets it down to 0, and its crash would be piped."""
    words = ["prlimit", "--core=1:1"]
    found = outside(CORE.replace('attempt("raise"', 'lambda: ("raise"'), before=words)
    assert found.pop("prlimit:self") == "DONE"
    assert set(found.values()) == {"DONE"}, found


def test_attack_19_a_crash_is_told_and_leaves_nothing(node_name: str) -> None:
    """Every signal that would dump a core ends the job as that signal; no core lies in its folders."""

    async def scenario(rig: Rig) -> None:
        crash = "(ulimit -c 0; kill -$signal $(sh -c 'echo $PPID'))"
        script = f"for signal in QUIT ILL ABRT FPE SEGV BUS SYS TRAP XCPU; do {crash}; done"
        seen = await rig.run(["sh", "-c", f"{script}; ls -A /work /tmp /dev/shm; kill -SEGV $$"])
        assert b"core" not in seen.out, seen
        assert (seen.verdict.kind, seen.verdict.signal) == ("signal", 11)

    in_rig(node_name, scenario)


def test_the_limit_is_one_in_every_worker(node_name: str) -> None:
    """Commands and tasks both start with RLIMIT_CORE = 1, soft and hard."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(["sh", "-c", "grep core /proc/self/limits"])
        assert seen.out.split()[4:6] == [b"1", b"1"], seen
        seen = await rig.run(task="probe_tasks:status")
        assert isinstance(seen.result, dict)
        assert seen.result["ok"]["core"] == [1, 1]

    in_rig(node_name, scenario)
    assert resource.RLIMIT_CORE == 4
