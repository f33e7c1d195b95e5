"""Who takes over the broker gets its vault and nothing more: no program, process, network or other file (attack 7)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from broker.egress.calls import AUDIT_ARCH, CALLS
from broker.vault import confine
from node_agent.containment import landlock
from node_agent.containment.sysnumbers import NUMBERS
from runner.cli.broker import VAULT_UID
from runner.cli.store import daemon_uid
from tests.support import scratch, without
from tests.vault.stand import Job, Stand
from tests.vault.test_desk import leased, scene
from tests.vault.test_doctor import seccomp_of

#: Runs as code of an attacker would, inside a process that wears what the broker wears.
INSIDE = r"""
import ctypes, errno, json, mmap, os, resource, socket, subprocess, sys
from pathlib import Path
from broker.vault import confine
place, uid, worn = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "yes"
parent = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(4, 0, 0, 0, 0), libc.prctl(38, 1, 0, 0, 0)
libc.ptrace, libc.process_vm_readv, libc.prlimit
if uid != "-":
    os.setgroups([]), os.setresgid(int(uid), int(uid), int(uid)), os.setresuid(int(uid), int(uid), int(uid))
if worn:
    confine.wear(place, os.getpid(), fenced=uid != "-")
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
def opened(path, flags):
    os.close(os.open(path, flags, 0o600))
attempts = {
    "exec": lambda: os.execv("/bin/true", ["true"]) if worn else None,
    "fork": spawn,
    "inet": lambda: socket.socket().close(),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close(),
    "executable": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC).close(),
    "limits": lambda: call(libc.prlimit, parent, resource.RLIMIT_NOFILE, None, None),
    "setuid": lambda: os.setuid(os.getuid()),
    "dumpable": lambda: call(libc.prctl, 4, 1, 0, 0, 0),
    "signal": lambda: os.kill(parent, 0),
    "chmod": lambda: os.chmod(place / "vault", 0o700),
    "client key": lambda: opened(place / "keys" / "client.key", os.O_WRONLY),
    "new file": lambda: opened(place / "new", os.O_WRONLY | os.O_CREAT),
    "passwd": lambda: opened("/etc/passwd", os.O_RDONLY),
    "vault": lambda: (opened(place / "vault" / "x", os.O_WRONLY | os.O_CREAT), os.unlink(place / "vault" / "x")),
    "rules": lambda: opened(place / "vault-policy.toml", os.O_RDONLY),
    "unix": lambda: socket.socket(socket.AF_UNIX).close(),
}
answers = {}
for name, attempt in attempts.items():
    try:
        attempt()
        answers[name] = ""
    except OSError as error:
        answers[name] = errno.errorcode.get(error.errno, "?")
print(json.dumps(answers))
"""
#: What only Landlock keeps from it, and what it has to keep.
FENCED = ("client key", "new file", "passwd")
KEPT = {"vault": "", "rules": "", "unix": ""}


def inside(place: Path, *, worn: bool) -> dict[str, str]:
    """Run the attempts as the broker's user on this host; return what came of each."""
    uid = daemon_uid(VAULT_UID)
    (place / "keys").mkdir()
    for name in ("keys/client.key", "vault-policy.toml"):
        (place / name).write_text("x")
    (place / "vault").mkdir()
    for path in (place, *place.rglob("*")):
        os.chown(path, -1 if uid is None else uid, -1)
    words = [sys.executable, "-I", "-B", "-c", INSIDE, str(place), "-" if uid is None else str(uid)]
    done = subprocess.run(
        [*words, "yes" if worn else "no"], capture_output=True, text=True, check=False, env={}, cwd="/", timeout=30
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


def test_attack_07_the_broker_from_inside() -> None:
    """No program, process, foreign file or network; its vault, its rules and local sockets are what is left."""
    with scratch.folder() as place:
        answers = inside(place, worn=True)
    kept = {name: answers.pop(name) for name in KEPT}
    assert kept == KEPT
    fenced = {name: answers.pop(name) for name in FENCED}
    assert set(answers.values()) <= {"EPERM", "EACCES"}
    if daemon_uid(VAULT_UID) is not None and landlock.abi():
        assert set(fenced.values()) == {"EACCES"}


def test_attack_07_the_attempts_work_without_the_walls() -> None:
    """What is refused above is done by the same process where it wears nothing: the attempts are real."""
    with scratch.folder() as place:
        answers = inside(place, worn=False)
    harmless = {name: code for name, code in answers.items() if name not in {"limits", "signal"}}
    assert set(harmless.values()) == {""}


def test_attack_07_no_filter_no_broker() -> None:
    """On a host that takes no filter the broker says so and ends, before it serves anybody."""
    with scratch.folder() as home:
        Stand(home, {})
        words = [sys.executable, "-I", "-m", "broker.vault", "--home", str(home)]
        done = subprocess.run(
            [sys.executable, without.__file__, "seccomp", *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert done.returncode == 78, done.stderr
        assert "ringfence: broker: " in done.stderr
        assert not (home / "s" / "broker").exists()


def test_attack_07_what_runs_wears_it(stand: Stand) -> None:
    """The kernel says so of the running broker and of its scrubber: filtered, no new privileges, no core, no look."""
    told = stand.operator(op="status")
    for pid in (told["pid"], told["scrubber_pid"]):
        rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert (seccomp_of(pid), rows["NoNewPrivs"].strip()) == ("2", "1")
        limits = Path(f"/proc/{pid}/limits").read_text() if os.geteuid() == 0 else "Max core file size 1 "
        assert next(row for row in limits.splitlines() if "core" in row).split()[4] == "1"
    assert told["dumpable"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a process's own user can't count the descriptors of an undumpable one")
def test_attack_51_stuffed_descriptors(stand: Stand, level: Literal["A", "B"]) -> None:
    """Descriptors that a job sends on its channel never stay in the broker; the job itself is served on."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            assert stand.process is not None
            held = Path(f"/proc/{stand.process.pid}/fd")
            assert job.say('{"op":"list"}')["ok"]
            before = len(os.listdir(held))
            for _ in range(20):
                job.say("stuff")
            # An operator's line of the test before may still be on its way out.
            assert len(os.listdir(held)) <= before
            assert job.get("KEY") == b"canary-one"

    scene(work)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_the_machines(machine: str) -> None:
    """Every call by its number on both machines, each number once, none of a call that starts or reaches a process."""
    column = tuple(AUDIT_ARCH).index(machine)
    more = {name: row[column] for name, row in confine._MORE.items() if row[column]}
    assert {name: NUMBERS[machine].get(name, number) for name, number in more.items()} == more
    numbers = (CALLS[machine] | more).values()
    assert len(numbers) == len(set(numbers))
    assert not {"execve", "clone", "clone3", "fork", "ptrace", "process_vm_readv", "bpf"} & more.keys()
    assert confine.program(machine, 1)
