"""Attacks on the broker by their row in the list of 38, as far as no other file here has them; and the traps met."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from broker.client import BrokerAway, BrokerClient
from broker.vault import peer, service
from broker.vault.orders import Seat
from broker.vault.peer import Sender
from broker.vault.redact import forms
from node_agent.containment import landlock
from tests.support.wait import wait_until
from tests.vault.conftest import LEVELS, VALUES
from tests.vault.stand import JOB_UID, OPEN_TO_ALL, Job, Stand, get_of
from tests.vault.test_desk import leased, scene

LIBC = ctypes.CDLL(None, use_errno=True)
PIDFD_GETFD = 438
NEW_USER_AND_PID = 0x3000_0000
PR_SET_DUMPABLE = 4
ROOT = os.geteuid() == 0


def in_child(work: Callable[[], int]) -> int:
    """Return the exit status of ``work`` in a forked process, which can't hang."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        code = 99
        with contextlib.suppress(BaseException):
            code = work()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sockets_of(pid: int) -> set[str]:
    """Return the names of the Unix sockets in a process's net namespace; "" for those without."""
    lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()
    return {line.split()[7] if len(line.split()) > 7 else "" for line in lines}


def test_vault_2_nothing_to_connect_to(stand: Stand) -> None:
    """The broker has two named sockets, the agents' and the operators', its own alone: jobs find no name at all."""
    assert stand.process is not None
    own = {name for name in sockets_of(stand.process.pid) if name.startswith(str(stand.home))}
    assert own == {str(stand.home / "s" / name) for name in ("broker", "vault")}
    for path in (stand.home / "s", *map(Path, own)):
        assert path.stat().st_mode & 0o077 == 0


def test_vault_5_exec(stand: Stand, level: Literal["A", "B"]) -> None:
    """Another program in the same process is the same job; its channel is served as before."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            assert job.get("KEY") == VALUES["KEY"]
            assert job.say("exec") == {"exec": True}
            assert job.get("KEY") == VALUES["KEY"]

    scene(work)


def test_vault_7a_a_stolen_channel(stand: Stand, level: Literal["A", "B"]) -> None:
    """Whoever takes the descriptor out of the job's process holds a line on which it is nobody."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            pidfd = os.pidfd_open(job.pid)
            stolen = LIBC.syscall(PIDFD_GETFD, pidfd, job.far.fileno(), 0)
            os.close(pidfd)
            assert stolen >= 0, "the theft itself has to work: the victim is dumpable"
            with socket.socket(fileno=stolen) as line:
                # No timeout: it would make the job's own end not block, too.
                line.send(b'{"op":"get","name":"KEY"}')
                assert json.loads(await asyncio.to_thread(line.recv, 4096)) == {"ok": False, "err": "not-you"}
            assert job.get("KEY") == VALUES["KEY"]

    scene(work)


def test_vault_7b_no_theft_out_of_a_domain() -> None:
    """From inside a Landlock domain the theft is refused; without one the same process succeeds."""
    if landlock.abi() < 1:
        pytest.skip("this kernel has no Landlock")
    near, far = socket.socketpair()
    with near, far:
        victim = os.getpid()

        def steal() -> int:
            pidfd = os.pidfd_open(victim)
            return 0 if LIBC.syscall(PIDFD_GETFD, pidfd, near.fileno(), 0) >= 0 else ctypes.get_errno()

        def confined() -> int:
            LIBC.prctl(38, 1, 0, 0, 0)
            landlock.restrict([])
            return steal()

        LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        assert in_child(steal) == 0
        assert in_child(confined) == 1  # EPERM


def test_vault_8a_a_number_used_again() -> None:
    """A process that got a dead one's number is another: what pins a sender is no number."""

    def work() -> int:
        uid = os.geteuid()
        if LIBC.unshare(NEW_USER_AND_PID) != 0:
            return 77
        return in_child(lambda: _same_number(uid))

    found = in_child(work)
    if found == 77:
        pytest.skip("this user makes no user and pid namespace")
    assert found == 0


def _same_number(uid: int) -> int:
    def born() -> tuple[int, int]:
        Path("/proc/sys/kernel/ns_last_pid").write_text("41")
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return pid, os.pidfd_open(pid)

    first, old = born()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    second, new = born()
    seat = Seat("A", uid)
    checks = (
        first == second,
        not seat.holds(Sender(second, uid, old)),
        seat.holds(Sender(second, uid, new)),
        not peer.alive(old) and peer.alive(new),
    )
    return 0 if all(checks) else 1 + checks.index(False)


def test_vault_8b_a_channel_outlives_nobody(stand: Stand, level: Literal["A", "B"]) -> None:
    """When the job's process has ended, a copy of its end is dead for whoever holds it, whatever its number."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            assert job.get("KEY") == VALUES["KEY"]
            os.kill(job.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: _dead(job.far), "the copy is dead")

    scene(work)


def _dead(line: socket.socket) -> bool:
    try:
        line.send(b'{"op":"list"}', socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BrokenPipeError:
        return True
    except BlockingIOError:
        return False
    return False


def test_vault_n1_forged_senders(stand: Stand, level: Literal["A", "B"]) -> None:
    """A process without capabilities can't say that it is another one; the kernel refuses the message itself."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            forged = job.say(f"forge {os.getpid() if level == 'A' else 4}")
            # At level B it is root of its own namespace here (a sandbox drops that) and may name its own kin alone.
            assert "errno" in forged or forged == {"ok": False, "err": "not-you"} or "closed" in forged
            assert forged.get("ok") is not True
            assert job.get("KEY") == VALUES["KEY"]

    scene(work)


def test_vault_n2_a_sender_from_outside() -> None:
    """One whose number this pid namespace can't express is nobody, unless the kernel pins it; then its place counts."""
    uid = os.geteuid()
    assert not Seat("A", uid).holds(Sender(0, uid, None))
    assert not Seat("B", uid, (1, 1)).holds(Sender(0, uid, None))
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def receives() -> int:
        message = peer.receive(near)
        if message is None or message.sender.pid != 0:
            return 1
        own = os.stat("/proc/self/ns/pid_for_children")
        return int(Seat("B", message.sender.uid, (own.st_dev, own.st_ino)).holds(message.sender))

    with near, far:
        peer.arm(near, rights=False)
        far.send(b"x")
        found = in_child(lambda: 77 if LIBC.unshare(NEW_USER_AND_PID) else in_child(receives))
    if found == 77:
        pytest.skip("this user makes no user and pid namespace")
    assert found == 0


@pytest.mark.skipif(not ROOT, reason="a server of another user needs a second uid")
def test_vault_10_a_replaced_socket(own: Stand) -> None:
    """An agent says nothing to a server that is neither root's nor its own user's; with the true one it goes on."""
    assert own.stop() == 0
    path = own.home / "s" / "broker"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    own.home.chmod(0o711)
    path.parent.chmod(0o777)
    program = f"import socket; s=socket.socket(1,5); s.bind({str(path)!r}); s.listen(); print(); s.accept()[0].recv(9)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, user=JOB_UID, group=JOB_UID) as fake:
        assert fake.stdout is not None
        fake.stdout.readline()
        assert not asyncio.run(_pings(own.client()))
        fake.kill()
    path.unlink()
    path.parent.chmod(0o700)
    own.home.chmod(0o700)
    own.start()
    assert asyncio.run(_pings(own.client()))


async def _pings(client: BrokerClient) -> bool:
    try:
        return await client.ping()
    except BrokerAway:
        return False
    finally:
        await client.stop()


def test_vault_13_half_a_message(stand: Stand) -> None:
    """What is sent in pieces is two wrong messages, answered at once; nothing waits for the rest of it."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(stand, job):
            for half in (b'{"op":"get",', b'"name":"KEY"}'):
                assert job.say(f"raw {half.hex()}") == {"ok": False, "err": "garbage"}
            assert job.get("KEY") == VALUES["KEY"]

    scene(work)


def test_vault_14_many_idle_channels(stand: Stand) -> None:
    """Hundreds of jobs that say nothing cost the one that asks nothing but descriptors; figures: `make bench`."""
    count = 300

    async def work() -> None:
        job, ends = Job("main-1.1", LEVELS[0]), []
        async with leased(stand, job) as client:
            try:
                for number in range(count):
                    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    ends += [near, far]
                    name = f"main-{number + 2}.1"
                    asked = job.ask(get_of("KEY"))
                    fds = [near.fileno(), *job.fds[1:]]
                    await client.open(replace(asked, attempt=name), fds)
                assert job.get("KEY") == VALUES["KEY"]
                assert stand.operator(op="status")["leases"] > count
            finally:
                for number in range(count):
                    await client.close(f"main-{number + 2}.1")
                for end in ends:
                    end.close()

    scene(work)


def test_vault_15_a_crowd_at_the_door(stand: Stand) -> None:
    """Two hundred connections that never speak keep no agent from its answer."""
    crowd = []
    try:
        for _ in range(200):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            crowd.append(line)
            # Waits where the door is full, as nobody has to who asks for no wait.
            line.connect(str(stand.home / "s" / "broker"))
        assert asyncio.run(_pings(stand.client()))
    finally:
        for line in crowd:
            line.close()


def test_vault_22_no_core(own: Stand) -> None:
    """A crash leaves no image of its memory: no dump, a limit that pipes obey too, and nobody may look at it."""
    assert own.process is not None
    limits = Path(f"/proc/{own.process.pid}/limits").read_text()
    assert next(line for line in limits.splitlines() if line.startswith("Max core")).split()[4:6] == ["1", "1"]
    assert own.operator(op="status")["dumpable"] == 0
    os.kill(own.process.pid, signal.SIGSEGV)
    status = os.waitpid(own.process.pid, 0)[1]
    own.process.returncode = -signal.SIGSEGV
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert not os.WCOREDUMP(status)


def test_vault_23_swap(stand: Stand) -> None:
    """Its memory is locked, or its log says that it may be swapped and what helps."""
    assert stand.process is not None
    status = Path(f"/proc/{stand.process.pid}/status").read_text()
    locked = int(next(line for line in status.splitlines() if line.startswith("VmLck")).split()[1])
    assert locked > 4096 or "memory may be swapped: raise LimitMEMLOCK" in (stand.home / "broker.log").read_text()


def test_vault_24_failures_carry_nothing(own: Stand) -> None:
    """Broken files, wrong words and a broker that is killed: no form of a value is in its record or its log."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job):
            assert job.get("KEY") == VALUES["KEY"]
            file = next((own.home / "vault" / "secrets").glob("KEY@*"))
            file.write_bytes(file.read_bytes()[:-3])
            assert job.get("KEY") == "unavailable"
            job.say(json.dumps({"op": "get", "name": VALUES["KEY"].decode()}))
            job.say(json.dumps({"op": VALUES["KEY"].decode()}))

    scene(work)
    own.stop(signal.SIGKILL)
    texts = own.record() + (own.home / "broker.log").read_text()
    assert "nothing released" in texts
    # What a job itself says as a name is the job's own word: it stands there, as one.
    told = texts.replace(f'"name":"{VALUES["KEY"].decode()}"', "")
    assert not [form for form in forms(VALUES["KEY"]) if form in told.encode()]


@pytest.mark.skipif(not ROOT, reason="a job of another user needs a second uid")
def test_vault_36_trap_4_a_leaked_line_of_the_agent(stand: Stand) -> None:
    """What a job says on its agent's own connection is ignored and recorded; the agent is not cut off for it."""

    async def work() -> None:
        client = stand.client()
        assert await client.ping()
        assert client._socket is not None
        program = (
            'import socket,sys; socket.socket(fileno=int(sys.argv[1])).send(b\'{"op":"close","attempt":"main-1.1"}\')'
        )
        fd = client._socket.fileno()
        words = [sys.executable, "-c", program, str(fd)]
        subprocess.run(words, pass_fds=[fd], user=JOB_UID, group=JOB_UID, check=True, timeout=10)
        assert await client.ping()
        await client.stop()

    scene(work)
    assert f'"event":"agent.foreign_word","uid":{JOB_UID}' in stand.record()


def test_vault_trap_2_closing_is_not_revoking(stand: Stand) -> None:
    """A lease that ends is dead for the job although its agent still holds a copy of the broker's end."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        copy = os.dup(job.broker_end.fileno())
        try:
            async with leased(stand, job) as client:
                assert job.get("KEY") == VALUES["KEY"]
                await client.close(job.name)
                assert job.get("KEY") == "closed"
        finally:
            os.close(copy)

    scene(work)


def test_vault_trap_3_whether_it_blocks_is_shared(stand: Stand) -> None:
    """An agent that makes its copy of a channel block holds up nobody: the broker never asks whether it does."""

    async def work() -> None:
        job, other = Job("main-1.1", LEVELS[0]), Job("main-2.1", LEVELS[0], JOB_UID + 1)
        async with leased(stand, job, other) as client:
            flags = fcntl.fcntl(job.broker_end, fcntl.F_GETFL)
            fcntl.fcntl(job.broker_end, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
            assert job.get("KEY") == VALUES["KEY"]
            assert await client.ping()
            assert other.get("KEY") == VALUES["KEY"]

    scene(work)


def test_vault_trap_5_no_number_of_a_descriptor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every pidfd has one inode (before 6.9) nobody is taken for somebody: the self-test compares none."""
    real = os.fstat

    def same(fd: int) -> os.stat_result:
        found = real(fd)
        if os.readlink(f"/proc/self/fd/{fd}").startswith(("anon_inode:[pidfd]", "pidfd:")):
            return os.stat_result((found.st_mode, 1, *found[2:]))
        return found

    monkeypatch.setattr(os, "fstat", same)

    def tested() -> int:
        service.self_test()
        return 0

    assert in_child(tested) == 0


def test_vault_trap_7_made_unreadable_after_the_exec(stand: Stand) -> None:
    """An exec makes a process readable again; this one is not when it serves (its files in /proc are root's)."""
    assert stand.process is not None
    assert os.stat(f"/proc/{stand.process.pid}/environ").st_uid == 0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as plain:
        assert os.stat(f"/proc/{plain.pid}/environ").st_uid == os.geteuid()  # the counter-check
        assert stand.operator(op="status")["dumpable"] == 0


def test_vault_trap_9_limits_only_as_far_as_they_go() -> None:
    """Without the right to raise hard limits (root in a container lacks it, too) the broker takes what there is."""

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
        if ROOT:
            os.setresuid(JOB_UID, JOB_UID, JOB_UID)
        weak = service.harden()
        return 0 if resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128) and weak else 1

    assert in_child(work) == 0


def test_vault_18_a_restart_gives_no_more_time(own: Stand) -> None:
    """A lease's time runs from the attempt's start, also over a broker that was started anew meanwhile."""
    own.write_rules(OPEN_TO_ALL + "ttl_s = 0.5\n")
    assert own.operator(op="reload")["ok"]

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job):
            assert job.get("KEY") == VALUES["KEY"]
            await asyncio.to_thread(wait_until, lambda: job.get("KEY") == "expired", "its time is over")
            own.stop()
            own.start()
            assert await asyncio.to_thread(job.get, "KEY") == "expired"

    scene(work)


def test_vault_19_an_agent_that_comes_back_at_once(own: Stand) -> None:
    """On a new line, before the end of the old one is heard: the same lease, and what was spent stays spent."""
    own.write_rules(OPEN_TO_ALL + "uses = 2\n")
    assert own.operator(op="reload")["ok"]

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job) as client:
            assert job.get("KEY") == VALUES["KEY"]
            former, client._socket = client._socket, None
            assert former is not None
            assert await client.ping()
            former.close()
            assert await client.ping()
            assert [job.get("KEY"), job.get("KEY")] == [VALUES["KEY"], "used-up"]

    scene(work)
    assert own.record().count('"lease.adopted"') == 1
    assert '"lease.ended","attempt":"main-1.1","why":"done"' in own.record()
