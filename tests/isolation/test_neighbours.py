"""A job harms nobody: not its mould, not other processes of its user, not services of the host."""

from __future__ import annotations

import resource
import socket
import subprocess
from pathlib import Path

from tests.containment.rig import Rig, in_rig, python

ON_THE_MOULD = r"""
import ctypes, errno, os, platform, resource, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
def raw(name, number, *args):
    answer = libc.syscall(number, *args)
    print(name, "DONE" if answer >= 0 else errno.errorcode[ctypes.get_errno()])
new = struct.pack("QQ", 7, 7)
raw("prlimit", 302 if x86 else 261, 1, 7, new, None)
raw("affinity", 203 if x86 else 122, 1, 8, struct.pack("Q", 1))
raw("scheduler", 144 if x86 else 119, 1, 3, struct.pack("i", 0))
raw("priority", 141 if x86 else 140, 0, 1, 19)
raw("priority_user", 141 if x86 else 140, 2, 0, 19)
raw("ioprio", 251 if x86 else 30, 1, 1, 3 << 13)
raw("ioprio_user", 251 if x86 else 30, 3, 0, 3 << 13)
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
    try: os.kill(1, number)
    except OSError: pass
print("prlimit_own", "DONE" if resource.prlimit(0, resource.RLIMIT_NOFILE) else "")
"""


def test_attack_37_the_mould_stands_whatever_a_job_sends_it(node_name: str) -> None:
    """Limits, scheduling and signals of a job don't reach pid 1; the same mould serves the next attempt."""

    async def scenario(rig: Rig) -> None:
        await rig.run(["true"])
        mould = rig.slot.mould_pid
        assert mould is not None
        before = [Path(f"/proc/{mould}/{name}").read_text() for name in ("limits",)]
        seen = await rig.run(python(ON_THE_MOULD))
        answers = dict(line.split() for line in seen.out.decode().splitlines())
        assert answers.pop("prlimit_own") == "DONE"
        assert len(answers) == 7, seen
        assert set(answers.values()) == {"EPERM"}, answers
        assert [Path(f"/proc/{mould}/{name}").read_text() for name in ("limits",)] == before
        assert (await rig.run(["true"])).verdict.code == 0
        assert rig.slot.mould_pid == mould

    in_rig(node_name, scenario)


def test_attack_37_a_mould_with_other_limits_is_replaced(node_name: str) -> None:
    """If a mould's limits did change, it refuses the attempt, which then runs in a new mould with the right limits."""

    async def scenario(rig: Rig) -> None:
        await rig.run(["true"])
        mould = rig.slot.mould_pid
        assert mould is not None
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(mould, resource.RLIMIT_NOFILE, (200, hard))
        assert (await rig.run(["true"])).verdict.code == 0
        assert rig.slot.mould_pid != mould

    in_rig(node_name, scenario)


def test_a_kill_of_everyone_harms_no_one_outside(node_name: str) -> None:
    """kill(-1, SIGKILL) in a job ends the job's processes only."""

    async def scenario(rig: Rig) -> None:
        with subprocess.Popen(["sleep", "30"]) as other:
            code = "import os; os.fork() or __import__('time').sleep(20); os.kill(-1, 9); print('alone')"
            seen = await rig.run(python(code))
            assert seen.verdict.kind == "exit"
            assert seen.out == b"alone\n"
            assert other.poll() is None
            mould = rig.slot.mould_pid
            assert mould is not None
            other.kill()
        seen = await rig.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"])
        assert int(seen.out) <= 4
        assert rig.slot.mould_pid == mould

    in_rig(node_name, scenario)


def test_no_network_but_an_empty_loopback(node_name: str) -> None:
    """A service on the host's loopback is not reachable; the job's own loopback works."""

    async def scenario(rig: Rig) -> None:
        code = """
import socket, sys
own = socket.create_server(("127.0.0.1", 0)); socket.create_connection(own.getsockname()); print("own")
for host, port in (("127.0.0.1", int(sys.argv[1])), ("1.1.1.1", 53)):
    try: socket.create_connection((host, port), 1); print("REACHED", host)
    except OSError as error: print(error.errno)
print(sorted(name for _, name in socket.if_nameindex()))
"""
        with socket.create_server(("127.0.0.1", 0)) as server:
            seen = await rig.run([*python(code), str(server.getsockname()[1])])
        assert b"REACHED" not in seen.out
        assert seen.out.startswith(b"own\n111\n101\n"), seen

    in_rig(node_name, scenario)


def test_attack_17_no_datagram_pair_and_no_unix_socket_with_host_grants(node_name: str) -> None:
    """socketpair works for STREAM and SEQPACKET only; socket(AF_UNIX) is refused when the plan says so."""

    async def scenario(rig: Rig) -> None:
        code = """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
    try: socket.socketpair(socket.AF_UNIX, kind); print("pair")
    except OSError as error: print(error.errno)
try: socket.socket(socket.AF_UNIX); print("unix")
except OSError as error: print(error.errno)
"""
        assert (await rig.run(python(code), allow_unix=False)).out.split() == [b"pair", b"pair", b"1", b"1"]
        assert (await rig.run(python(code), allow_unix=True)).out.split() == [b"pair", b"pair", b"1", b"unix"]

    in_rig(node_name, scenario)
