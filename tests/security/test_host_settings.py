"""The host's own settings: /proc, /sys, clocks, names, modules, the kernel's log (attack 51).

Stopped by no capability, another uid or a user namespace, by a view without /sys, and by seccomp.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.containment.rig import LEVEL, Rig, in_rig
from tests.security.fs_tries import Wall, broken, tried

SETTINGS = r"""
def write(path, text=b""):
    fd = os.open(path, os.O_WRONLY)
    try: os.write(fd, text) if text else None
    finally: os.close(fd)
def read(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try: os.read(fd, 64)
    finally: os.close(fd)
sysctls, written, shown, folders = (argument.split() for argument in sys.argv[1:5])
def same(name):
    # Its own value: a setting that lets itself be opened by all may still refuse the write.
    with open("/proc/sys/" + name, "rb", 0) as file: value = file.read()
    write("/proc/sys/" + name, value or b"0")
for name in sysctls: attempt("sysctl:" + name, lambda: same(name))
for name in written: attempt("write:" + name, lambda: write("/proc/" + name))
for name in shown: attempt("read:" + name, lambda: read("/proc/" + name))
for name in folders: attempt("sys:" + name, lambda: os.listdir("/sys/" + name))
attempt("own:uid_map", lambda: write("/proc/self/uid_map", b"0 0 1\n"))
attempt("own:setgroups", lambda: write("/proc/self/setgroups", b"allow"))
attempt("own:lower-oom", lambda: write("/proc/self/oom_score_adj", b"-900"))
attempt("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
attempt("hostname", lambda: socket.sethostname("x"))
attempt("syslog", lambda: raw(103, 116, 3, ctypes.create_string_buffer(100), 100))
attempt("nice", lambda: os.nice(-5))
attempt("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("setuid", lambda: os.setuid(0))
attempt("setgid", lambda: os.setgid(0))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("chown", lambda: (open("/work/f", "w").close(), os.chown("/work/f", 0, 0)))
attempt("mlock", lambda: raw(151, 230, 1))
attempt("ioprio", lambda: raw(251, 30, 1, 0, (1 << 13) | 1))
"""
SYSCTLS = """
kernel/core_pattern kernel/core_uses_pid kernel/hostname kernel/modprobe kernel/hotplug kernel/sysrq kernel/panic
kernel/pid_max kernel/randomize_va_space kernel/yama/ptrace_scope kernel/unprivileged_bpf_disabled kernel/msgmax
kernel/perf_event_paranoid kernel/dmesg_restrict kernel/shmmax kernel/ns_last_pid kernel/keys/maxkeys kernel/cad_pid
kernel/poweroff_cmd vm/drop_caches vm/overcommit_memory vm/memfd_noexec vm/mmap_min_addr fs/protected_hardlinks
fs/suid_dumpable fs/file-max fs/binfmt_misc/register fs/inotify/max_user_instances user/max_user_namespaces
user/max_inotify_instances debug/exception-trace
"""
WRITTEN = """
sysrq-trigger kcore kmsg mem mtrr kpagecount kpageflags kpagecgroup vmallocinfo slabinfo timer_list sched_debug keys
acpi/wakeup scsi/scsi irq/default_smp_affinity fs/jbd2/x bus/pci/00/00.0 1/oom_score_adj 1/mem 1/environ
1/root/x 1/cwd/x 1/exe 1/fd/0 1/maps 1/stack 1/io 1/timerslack_ns 1/attr/current 1/uid_map 1/setgroups 1/ns/user
"""
SHOWN = "kcore kmsg kpagecount vmallocinfo 1/mem 1/environ 1/maps 1/stack 1/syscall 1/auxv"
FOLDERS = "kernel/security power/state class bus module firmware devices fs/fuse/connections"
REFUSED = "EPERM EACCES EROFS ENOENT ENOSYS EIO"


def test_attack_51_nothing_of_the_host_can_be_set_or_read(node_name: str) -> None:
    """Sysctls, sysrq, kcore, the log, clocks, names, ids and pid 1's entries are refused or not there."""
    before = {path: path.read_bytes() for path in SAMPLES if path.exists()}

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, SETTINGS, SYSCTLS, WRITTEN, SHOWN, FOLDERS)
        layers = {
            "sysctl": "no capability, Landlock",
            "sys": "view",
            "own": "no capability",
            "read": "uid, hidden pid 1",
        }
        walls = {name: Wall.of(layers.get(name.partition(":")[0], "no capability, seccomp"), REFUSED) for name in found}
        # At level B these ids do not even exist in the job's user namespace.
        for name in ("setuid", "setgid", "setgroups", "chown"):
            walls[name] = Wall.of("no capability, seccomp", f"{REFUSED} EINVAL")
        walls["mlock"] = Wall.of("rlimit", "ENOMEM EPERM")
        assert len(found) > 95
        assert broken(found, walls) == []

    in_rig(node_name, scenario)
    assert {path: path.read_bytes() for path in before} == before


#: What a job that got through would have changed; read again afterwards.
SAMPLES = [
    Path("/proc/sys") / name
    for name in ("kernel/core_pattern", "kernel/sysrq", "kernel/modprobe", "vm/overcommit_memory")
]


def test_the_hosts_names_stay(node_name: str) -> None:
    """A job has the host name ``job``, no domain, and the mould's name space: the host keeps its own."""
    name = socket.gethostname()

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(["sh", "-c", "hostname; cat /proc/sys/kernel/hostname; uname -n"])
        assert seen.out == b"job\n" * 3

    in_rig(node_name, scenario)
    assert socket.gethostname() == name
    assert LEVEL in ("A", "B")
    assert os.uname().nodename == name
