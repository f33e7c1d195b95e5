"""Whoever takes over the egress process gets nothing: no key, no record, no neighbour, no program (attack 7)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from broker.egress.calls import AUDIT_ARCH, CALLS
from broker.egress.confine import program
from node_agent.containment import landlock
from node_agent.containment.sysnumbers import NUMBERS
from runner.cli import egress
from runner.cli.store import daemon_uid
from runner.errors import ConfigError
from runner.home import Home
from tests.net.support import Process, egress_process
from tests.support import scratch, without
from tests.support.wait import wait_until

#: Runs inside the process right after it confined itself, as code of an attacker would.
INSIDE = r"""
import ctypes, errno, json, mmap, os, resource, signal, socket, sys
from pathlib import Path
from broker.egress.confine import confine
home, uid, port, confined = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "yes"
parent = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace, libc.kill, libc.process_vm_readv, libc.prlimit
if confined:
    confine(int(uid) if uid != "-" else None, (Path("/etc/hosts"), Path("/etc/resolv.conf")))
def call(function, *arguments):
    ctypes.set_errno(0)
    answer = function(*arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), "")
def spawn():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
def listen():
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        end.listen()
def opened(path, flags):
    os.close(os.open(path, flags))
attempts = {
    "key": lambda: opened(home / "keys/fleet.key", os.O_RDONLY),
    "audit": lambda: opened(home / "audit.log", os.O_WRONLY | os.O_APPEND),
    "policy": lambda: opened(home / "policy.toml", os.O_RDONLY),
    "home": lambda: os.listdir(home),
    "passwd": lambda: opened("/etc/passwd", os.O_RDONLY),
    "write": lambda: opened(home / "new", os.O_WRONLY | os.O_CREAT),
    "unlink": lambda: os.unlink(home / "gone"),
    "chmod": lambda: os.chmod(home / "policy.toml", 0o777),
    "signal": lambda: os.kill(parent, 0),
    "proc": lambda: opened(f"/proc/{parent}/environ", os.O_RDONLY),
    "own_mem": lambda: opened("/proc/self/mem", os.O_RDWR),
    "fork": spawn,
    "unix": lambda: socket.socket(socket.AF_UNIX).close(),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close(),
    "listen": listen,
    "executable": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC).close(),
    "exec": lambda: os.execv("/bin/true", ["true"]) if confined else None,
    "limits": lambda: call(libc.prlimit, parent, resource.RLIMIT_NOFILE, None, None),
    "setuid": lambda: os.setuid(0) if confined else None,
}
answers = {}
for name, attempt in attempts.items():
    try:
        attempt()
        answers[name] = ""
    except OSError as error:
        answers[name] = errno.errorcode.get(error.errno, "?")
with socket.socket() as end:
    end.connect(("127.0.0.1", port))
    answers["network"] = end.recv(5).decode()
hosts = os.open("/etc/hosts", os.O_RDONLY)
answers["hosts"] = "read" if os.read(hosts, 10) is not None else ""
print(json.dumps(answers))
"""


def inside(home: Path, *, confined: bool) -> dict[str, str]:
    """Run the attempts in a process as the egress process is; return what came of each."""
    uid = daemon_uid(egress.EGRESS_UID)
    for name in ("keys/fleet.key", "audit.log", "policy.toml", "gone"):
        path = home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
        path.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            end, _ = server.accept()
            with end:
                end.sendall(b"hello")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        words = [sys.executable, "-I", "-B", "-c", INSIDE, str(home), "-" if uid is None else str(uid)]
        words += [str(server.getsockname()[1]), "yes" if confined else "no"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env={}, cwd="/", timeout=30)
        assert done.returncode == 0, done.stderr
        thread.join(5)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_attack_07_the_confined_process_reaches_nothing_but_the_network() -> None:
    """Keys, audit, policy, home, files, signals, /proc, programs, other sockets: refused. TCP and hosts: as needed."""
    if not landlock.abi():
        pytest.skip("this kernel has no Landlock: the egress process says that it is weak")
    with scratch.folder(mode=0o711) as home:
        found = inside(home, confined=True)
        assert found.pop("network") == "hello"
        assert found.pop("hosts") == "read"
        assert {name for name, error in found.items() if error not in {"EACCES", "EPERM"}} == set(), found


def test_attack_07_the_same_attempts_work_unconfined() -> None:
    """The counter-check: without the confinement every attempt succeeds, so the test above can fail."""
    with scratch.folder(mode=0o711) as home:
        found = inside(home, confined=False)
        assert found.pop("network") == "hello"
        assert found.pop("hosts") == "read"
        assert {name for name, error in found.items() if error} == set(), found


def test_attack_07_the_running_process_is_confined() -> None:
    """Of the real process the kernel says: no privilege, no new ones, a filter; as root a user of its own."""
    with scratch.folder(mode=0o711) as folder, egress_process(folder / "h") as process:
        facts = egress.describe(process.home) if os.geteuid() == 0 and landlock.abi() else None
        if facts is None:
            with pytest.raises(ConfigError, match="weak: "):
                egress.describe(process.home)
        status = Path(f"/proc/{process.pid}/status").read_text()
        for line in ("NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"):
            assert line in status
        uid = int(status.partition("Uid:\t")[2].split()[0])
        expected = daemon_uid(egress.EGRESS_UID)
        assert uid == (os.geteuid() if expected is None else expected)
        if os.geteuid() == 0:
            # The interpreter's own word on its locale is all there is.
            assert Path(f"/proc/{process.pid}/environ").read_bytes() in (b"", b"LC_CTYPE=C.UTF-8\0")
            assert "Groups:\t\n" in status.replace("Groups:\t \n", "Groups:\t\n")


def test_attack_07_another_user_s_agent_is_turned_away() -> None:
    """Only root and the user who made the socket are served."""
    if os.geteuid() != 0:
        pytest.skip("needs root to be another user")
    with scratch.folder(mode=0o777) as folder, egress_process(folder / "h") as process:
        egress.describe(process.home)
        folder.chmod(0o777)
        for path in (process.home.path, process.home.sockets):
            path.chmod(0o777)
        process.path.chmod(0o666)
        code = (
            "import os, socket, sys\nos.setresuid(65533, 65533, 65533)\n"
            "end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\nend.connect(sys.argv[1])\n"
            "try:\n    end.send(b'{\"op\":\"hello\"}'); print(end.recv(100))\nexcept OSError: print(b'')\n"
        )
        done = subprocess.run([sys.executable, "-c", code, str(process.path)], capture_output=True, check=True)
        assert done.stdout.strip() == b"b''"


@pytest.mark.parametrize("feature", ["seccomp", "capset"])
def test_attack_07_no_confinement_no_service(feature: str) -> None:
    """A kernel that refuses a step of the confinement has no egress process: it ends before it reads a byte."""
    with scratch.folder(mode=0o711) as folder, egress.listening(Home(folder)) as held:
        words = [sys.executable, "-I", without.__file__, feature, *egress.program(held).words]
        done = subprocess.run(
            words, pass_fds=held, env={}, cwd="/", capture_output=True, text=True, check=False, timeout=30
        )
        assert done.returncode == 1
        assert f"PermissionError: [Errno 1] {feature}" in done.stderr


def test_attack_07_a_kernel_without_landlock_is_called_weak() -> None:
    """Everything else holds, and doctor tells the rest."""
    with scratch.folder(mode=0o711) as folder:
        process = Process(Home(folder), (), (), folder / "log")
        with egress.listening(process.home) as held:
            process.inherit = held
            process.words = (sys.executable, "-I", without.__file__, "landlock", *egress.program(held).words)
            process.start()
            try:
                wait_until(lambda: "no Landlock" in said(process.home), "the egress process to say so", 30)
                assert "weak: " in said(process.home)
            finally:
                process.stop()


def said(home: Home) -> str:
    """Return what doctor says of the egress process."""
    try:
        return egress.describe(home)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_the_list_and_nothing_else(machine: str) -> None:
    """Each listed call is allowed, every other number refused, another machine's calls end the process."""
    steps = program(machine)

    def judge(arch: int, number: int, arguments: tuple[int, ...] = (0,) * 6) -> int:
        words = {0: number, 4: arch, **{16 + 8 * at: value for at, value in enumerate(arguments)}}
        at = loaded = 0
        while True:
            code, value, if_true, if_false = steps[at]
            at += 1
            if code == 0x20:
                loaded = words[value]
            elif code == 0x06:
                return value
            else:
                hit = loaded == value if code == 0x15 else bool(loaded & value)
                at += if_true if hit else if_false

    arch, allow, refuse, kill = AUDIT_ARCH[machine], 0x7FFF0000, 0x00050001, 0x80000000
    good = {"socket": (2, 0, 0, 0, 0, 0), "ioctl": (0, 0x5421, 0, 0, 0, 0)}
    for name, number in CALLS[machine].items():
        assert judge(arch, number, good.get(name, (0,) * 6)) == allow, name
    for number in set(range(600)) - set(CALLS[machine].values()):
        assert judge(arch, number) == refuse, number
    for name, arguments in {
        "socket": [(1, 0, 0), (16, 3, 0), (17, 3, 0), (40, 1, 0)],
        "ioctl": [(0, 0x5412, 0)],
        "mmap": [(0, 1, 4), (0, 1, 7)],
        "mprotect": [(0, 1, 4)],
    }.items():
        for each in arguments:
            assert judge(arch, CALLS[machine][name], (*each, 0, 0, 0)) == refuse, (name, each)
    assert judge(arch ^ 1, CALLS[machine]["read"]) == kill
    # The same numbers as the jobs' own table, where both have a call.
    shared = CALLS[machine].keys() & NUMBERS[machine].keys()
    assert shared
    assert {name for name in shared if CALLS[machine][name] != NUMBERS[machine][name]} == set()
