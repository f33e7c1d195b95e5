"""Nothing that an attempt leaves behind reaches the next one in the same mould."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from node_agent.containment import mould as moulds
from tests.containment.rig import Rig, in_rig, python

LEAVE = r"""
import array, ctypes, os, signal, socket, time
libc = ctypes.CDLL(None, use_errno=True)
for folder in ("/work", "/tmp", "/dev/shm"):
    with open(folder + "/left", "w") as file: file.write("canary")
assert libc.shmget(0x5246, 4096, 0o1666) >= 0
assert libc.msgget(0x5246, 0o1666) >= 0
name = socket.socket(socket.AF_UNIX); name.bind("\0left"); name.listen()
port = socket.create_server(("127.0.0.1", 4711))
# A listener that only a message in flight holds, in a ring of sockets that hold each other.
one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
held = array.array("i", [port.fileno(), name.fileno(), one.fileno(), two.fileno()]).tobytes()
one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, held)])
try: socket.socket(fileno=100).sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, held)])
except PermissionError: pass  # the node takes no descriptors there (Linux 6.16)
if os.fork() == 0:
    signal.alarm(30)
    os.setsid()
    if os.fork() == 0:
        signal.alarm(30)
        for number in range(1, 31):
            if number not in (signal.SIGALRM, signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_IGN)
        time.sleep(30)
    os._exit(0)
print("left")
"""
FIND = r"""
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
found = [folder for folder in ("/work", "/tmp", "/dev/shm") if os.path.exists(folder + "/left")]
found += ["shm"] * (libc.shmget(0x5246, 4096, 0o666) >= 0) + ["msg"] * (libc.msgget(0x5246, 0o666) >= 0)
for family, address in ((socket.AF_UNIX, "\0left"), (socket.AF_INET, ("127.0.0.1", 4711))):
    try: socket.socket(family).connect(address); found.append(str(address))
    except OSError: pass
me = {str(os.getpid()), str(os.getppid())}
found += [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in me | {"1"}]
print(found)
"""


def test_attack_38_nothing_of_an_attempt_is_left_for_the_next(node_name: str) -> None:
    """Files, SysV objects, sockets by name, port and message in flight, and detached processes are gone."""

    async def scenario(rig: Rig) -> None:
        seen = await rig.run(python(LEAVE))
        assert seen.out == b"left\n", seen
        assert (await rig.run(python(FIND))).out == b"[]\n"

    in_rig(node_name, scenario)


def test_attack_38_a_mould_with_a_socket_left_is_replaced(node_name: str) -> None:
    """A TCP end that waits in the net namespace costs the mould its place; sockets that are gone do not."""

    async def scenario(rig: Rig) -> None:
        clean = "import socket; a = socket.create_server(('127.0.0.1', 0)); b = socket.socketpair()"
        await rig.run(python(clean))
        mould = rig.slot.mould_pid
        assert (await rig.run(["true"])).verdict.code == 0
        assert rig.slot.mould_pid == mould
        talk = "; b = socket.create_connection(a.getsockname()); c, _ = a.accept(); b.close(); c.close()"
        await rig.run(python(f"{clean}{talk}"))
        assert rig.slot.mould_pid == mould
        assert (await rig.run(["true"])).verdict.code == 0
        assert rig.slot.mould_pid != mould

    in_rig(node_name, scenario)


def test_attack_36_zombies_without_end_do_not_hide_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast a job makes orphans, the mould looks at its lifeline between a bounded number of reaps."""
    reaped = []

    def reap() -> int:
        reaped.append(77)
        assert len(reaped) < 10_000, "the mould reaps without end"
        return 77

    monkeypatch.setattr("os.read", lambda fd, size: b"")
    mould = moulds._Mould.__new__(moulds._Mould)
    mould.__dict__.update(_signals=-1, _status=None, _worker=5, _cpu_us=0, _max_rss_bytes=0, _processes=0, _more=False)
    mould._reaper = SimpleNamespace(reap=reap, told=lambda: (0, 0, 0))  # type: ignore[assignment] # what it asks of one
    mould._left = 0
    mould._reap()
    assert mould._more
