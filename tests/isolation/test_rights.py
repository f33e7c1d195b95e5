"""A job has no right that it could use against its node: no capability, no way out, no descriptor but the planned."""

from __future__ import annotations

import json

import pytest

from tests.containment.rig import LEVEL, Rig, in_rig, python

STATUS = """
import json, os, resource, subprocess, sys
def look():
    with open("/proc/self/status") as file:
        return {line.partition(":")[0]: line.partition(":")[2].strip() for line in file}
fds = []
for name in os.listdir("/proc/self/fd"):
    try: os.fstat(int(name)); fds.append(int(name))
    except OSError: pass
code = "print(open('/proc/self/status').read())"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
below = {line.partition(":")[0]: line.partition(":")[2].strip() for line in child.stdout.splitlines()}
core = list(resource.getrlimit(resource.RLIMIT_CORE))
print(json.dumps({"status": look(), "child": below, "fds": sorted(fds), "core": core}))
"""
CALLS = r"""
import ctypes, errno, os, platform, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def raw(name, number, *args):
    answer = libc.syscall(number, *args)
    print(name, "DONE" if answer >= 0 else errno.errorcode[ctypes.get_errno()])
raw("ptrace", 101 if x86 else 117, 16, 1, 0, 0)
raw("mount", 165 if x86 else 40, b"none", b"/tmp", b"tmpfs", 0, None)
raw("umount", 166 if x86 else 39, b"/tmp", 2)
raw("pivot_root", 155 if x86 else 41, b"/tmp", b"/tmp")
raw("chroot", 161 if x86 else 51, b"/tmp")
raw("unshare_user", 272 if x86 else 97, 0x10000000)
raw("unshare_net", 272 if x86 else 97, 0x40000000)
raw("clone_user", 56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0)
raw("clone3", 435, None, 0)
raw("setns", 308 if x86 else 268, os.open("/proc/self/ns/net", os.O_RDONLY), 0)
raw("bpf", 321 if x86 else 280, 0, None, 0)
raw("userfaultfd", 323 if x86 else 282, 0)
raw("io_uring", 425, 8, None)
raw("perf", 298 if x86 else 241, None, 0, -1, -1, 0)
raw("keyctl", 250 if x86 else 219, 0, -3, 1)
raw("add_key", 248 if x86 else 217, b"user", b"a", b"b", 1, -3)
raw("vm_readv", 310 if x86 else 270, 1, None, 0, None, 0, 0)
raw("pidfd_getfd", 438, os.pidfd_open(1), 0, 0)
raw("handle", 304 if x86 else 265, -100, None, 0)
raw("open_tree", 428, -100, b"/", 1)
raw("openat2", 437, -100, b"/", None, 24)
raw("setuid_root", 105 if x86 else 146, 0)
raw("setgroups_docker", 116 if x86 else 159, 1, struct.pack("I", 0))
raw("sethostname", 170 if x86 else 161, b"x", 1)
raw("capset", 126 if x86 else 91, struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", 1, 1, 0, 0, 0, 0))
"""
#: EINVAL: an id that the job's user namespace does not even have (level B).
REFUSED = {"EPERM", "ENOSYS"} | ({"EINVAL"} if LEVEL == "B" else set())


@pytest.mark.parametrize("kind", ["command", "task"])
def test_attack_44_no_capability_and_no_extra_descriptor(node_name: str, kind: str) -> None:
    """All five capability sets are empty, in children too; no_new_privs, seccomp and the descriptors are as planned."""

    async def scenario(rig: Rig) -> None:
        if kind == "task":
            seen = await rig.run(task="probe_tasks:status")
            assert isinstance(seen.result, dict), seen
            told = seen.result["ok"]
            processes = [told["status"]]
        else:
            told = json.loads((await rig.run(python(STATUS))).out)
            processes = [told["status"], told["child"]]
        for status in processes:
            sets = {name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
            assert set(sets.values()) == {0}, sets
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
            assert status["Uid"].split()[0] != "0"
            if LEVEL == "A":
                assert status["Groups"].split() == []
        assert told["fds"] == [0, 1, 2, 100] + [102] * (kind == "task")
        assert told["core"] == [1, 1], "attack 19: a limit of 0 does not stop a core_pattern that pipes"

    in_rig(node_name, scenario)


def test_calls_that_lead_out_are_refused(node_name: str) -> None:
    """Namespaces, mounts, tracing, keys, handles, io_uring, ids and capabilities: nothing is granted."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(python(CALLS))
        answers = dict(line.split() for line in seen.out.decode().splitlines())
        assert len(answers) == CALLS.count("\nraw("), seen
        assert {name: answer for name, answer in answers.items() if answer not in REFUSED} == {}

    in_rig(node_name, scenario)


def test_attack_44_credentials_and_raw_sockets_can_not_be_forged(node_name: str) -> None:
    """A job can't send another's credentials over its channel, nor open packet, netfilter or vsock sockets."""

    async def scenario(rig: Rig) -> None:
        code = """
import os, socket, struct
channel = socket.socket(fileno=100)
for pid, uid in ((1, os.getuid()), (os.getpid(), 0)):
    try:
        channel.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, struct.pack("iii", pid, uid, os.getgid()))])
        print("SENT")
    except OSError as error: print(error.errno)
for family, kind, protocol in ((17, 3, 0), (16, 3, 12), (40, 1, 0), (38, 5, 0), (2, 3, 1)):
    try: socket.socket(family, kind, protocol); print("OPEN", family)
    except OSError as error: print(error.errno)
socket.socket(16, 3, 0)
"""
        seen = await rig.run(python(code))
        assert set(seen.out.split()) <= {b"1", b"97", b"22"}, seen
        assert len(seen.out.split()) == 7, seen

    in_rig(node_name, scenario)


@pytest.mark.parametrize("cwd", ["/work", "/tmp", "/"])
def test_attack_46_no_path_leads_outside(node_name: str, cwd: str) -> None:
    """Working folder, /proc/self/root, /proc/self/cwd, /proc/1/root and any number of `..` end in the view."""

    async def scenario(rig: Rig) -> None:
        code = """
import os, sys
root = os.stat("/")
up = "../" * 40
for path in ("/proc/self/root", up, "/proc/self/cwd/" + up, "/proc/self/fd/100/../..", "/proc/1/root", "/proc/1/cwd"):
    try: print(os.path.samestat(os.stat(path), root) and os.listdir(path) == os.listdir("/"))
    except OSError as error: print(error.errno)
for path in ("/etc/shadow", "/root", "/home", "/var", "/sys", "/proc/1/root/etc/shadow"):
    # A Python below /root or /home shows its own way there, and nothing beside it.
    own = {place.split("/")[2] for place in (sys.prefix, sys.base_prefix) if place.startswith(path + "/")}
    try: (set(os.listdir(path)) - own if os.path.isdir(path) else open(path)) and print("SEEN", path)
    except OSError: pass
"""
        seen = await rig.run(python(code), cwd=cwd)
        answers = seen.out.decode().split()
        assert answers[:3] == ["True"] * 3, seen
        assert set(answers[3:]) <= {"1", "2", "13", "20", "True"}, seen
        assert "SEEN" not in seen.out.decode()

    in_rig(node_name, scenario)


def test_attack_19_a_crash_leaves_no_core(node_name: str) -> None:
    """A job that crashes is told as a signal and leaves no core file in its workspace."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(["sh", "-c", "sh -c 'kill -SEGV $$'; ls /work /tmp | grep -c core; kill -SEGV $$"])
        assert seen.out.split()[-1] == b"0"
        assert (seen.verdict.kind, seen.verdict.signal) == ("signal", 11)

    in_rig(node_name, scenario)
