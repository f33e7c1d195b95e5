"""What goes wrong around the broker: nothing is released unrecorded, and no job starts that needs a secret (line 6)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.client import ANSWER_S, BrokerAway, LeaseRefused
from broker.vault import audit as audits
from broker.vault.audit import Audit
from broker.vault.disk import Folder
from broker.vault.errors import AuditError
from broker.vault.keystore import Keystore
from broker.vault.reserve import RESERVE_FILE, SLICE_BYTES, Reserve
from tests.support import scratch
from tests.vault.conftest import LEVELS, VALUES
from tests.vault.stand import JOB_UID, Job, Stand, get_of
from tests.vault.test_desk import leased, off_loop, scene

KEY_TEXT = "AGE-SECRET-KEY-"
#: A real full disk: a tmpfs of 2 MiB in a mount namespace of its own, with a reserve, filled to the last byte.
ON_A_FULL_DISK = r"""
import ctypes, os, sys
from pathlib import Path
from broker.vault.audit import Audit, verify
from broker.vault.disk import Folder
from broker.vault.errors import AuditError
from broker.vault.reserve import Reserve
libc = ctypes.CDLL(None, use_errno=True)
place = sys.argv[1].encode()
assert libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None) == 0
assert libc.mount(b"none", place, b"tmpfs", 0, b"size=2m,mode=700") == 0
folder = Folder(Path(sys.argv[1]))
reserve = Reserve(folder, 256 << 10)
held = reserve.held
record = Audit(folder, bytes(32), more_room=reserve.give)
record.write("before")
with open(Path(sys.argv[1]) / "filler", "wb", 0) as filler:
    try:
        while True:
            filler.write(bytes(4096))
    except OSError:
        pass
written = 0
try:
    while True:
        record.write("after", text="x" * 1000)
        written += 1
except AuditError:
    pass
head, lines = verify((Path(sys.argv[1]) / "audit.log").read_bytes(), bytes(32))
print(held, written, head.count, reserve.held)
"""


@pytest.fixture
def folder() -> Iterator[Folder]:
    """An empty folder of the vault's kind."""
    with scratch.folder() as path, contextlib.closing(Folder(path)) as made:
        yield made


@contextlib.contextmanager
def full_disk(stand: Stand) -> Iterator[None]:
    """Let the broker's record grow by no byte: the kernel refuses each write to it, as a full disk does."""
    assert stand.process is not None
    size = (stand.home / "vault" / "audit.log").stat().st_size
    _, hard = resource.prlimit(stand.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(stand.process.pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(stand.process.pid, resource.RLIMIT_FSIZE, (hard, hard))


def test_vault_33_no_record_no_release(own: Stand) -> None:
    """While the record can't be written nothing is released and no lease is opened; then all goes on, unbroken."""

    async def work() -> None:
        job, late = Job("main-1.1", LEVELS[0]), Job("main-2.1", LEVELS[0], JOB_UID + 1)
        async with leased(own, job) as client:
            assert job.get("KEY") == b"canary-one"
            with full_disk(own):
                assert job.get("KEY") == "unavailable"
                with pytest.raises(LeaseRefused, match="record"):
                    await client.open(late.ask(get_of("KEY")), late.fds)
                assert not own.operator(op="put", name="NEW", value="bmV3", note="")["ok"]
            assert job.get("KEY") == b"canary-one"
            await client.open(late.ask(get_of("KEY")), late.fds)
            assert late.get("KEY") == b"canary-one"
        late.end()

    scene(work)
    assert own.record().count('"event":"secret.released"') == 3
    with Keystore(own.home / "vault" if own.stop() == 0 else own.home) as store:
        head, _ = audits.verify(own.record().encode(), store.audit_seed())
    assert head.count > 3


def test_vault_trap_8_a_refusal_that_can_not_be_recorded(own: Stand) -> None:
    """Its answer is the same, nothing is released in its place, and the broker lives on."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job):
            with full_disk(own):
                assert [job.get("NOTHING"), job.get("KEY"), job.get("NOTHING")] == ["denied", "unavailable", "denied"]
                assert job.say("no JSON")["err"] == "garbage"
            assert job.get("KEY") == b"canary-one"

    scene(work)
    assert own.record().count('"event":"secret.released"') == 1
    assert '"name":"NOTHING"' not in own.record()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_broker_that_ends_or_stands_still(own: Stand, number: signal.Signals) -> None:
    """No lease is opened meanwhile; a live job's question waits, and is answered by the broker that goes on."""

    async def work() -> None:
        job, late = Job("main-1.1", LEVELS[0]), Job("main-2.1", LEVELS[0], JOB_UID + 1)
        async with leased(own, job) as client:
            assert own.process is not None
            own.process.send_signal(number)
            if number == signal.SIGKILL:
                own.process.wait()
            with pytest.raises(BrokerAway):
                await client.open(late.ask(get_of("KEY")), late.fds)
            if number == signal.SIGKILL:
                await off_loop(own.start)
            else:
                own.process.send_signal(signal.SIGCONT)
            assert await off_loop(lambda: job.get("KEY")) == b"canary-one"
        late.end()

    scene(work)


def test_ends_do_not_wait_for_a_stopped_broker(own: Stand) -> None:
    """With a broker that stands still many attempts end in the time of one question, and their channels are dead."""

    async def work() -> None:
        jobs = [Job(f"main-{number}.1", LEVELS[0], JOB_UID + number) for number in range(4)]
        async with leased(own, *jobs) as client:
            assert own.process is not None
            own.process.send_signal(signal.SIGSTOP)
            began_s = time.monotonic()
            await asyncio.gather(*(client.close(job.name) for job in jobs))
            assert time.monotonic() - began_s < 2 * ANSWER_S
            assert {job.get("KEY") for job in jobs} <= {"closed", "None"}
            own.process.send_signal(signal.SIGCONT)

    scene(work)


def unreadable_key(home: Path) -> None:
    """Take the key away."""
    (home / "vault" / "key").unlink()


def open_key(home: Path) -> None:
    """Let others read the key."""
    (home / "vault" / "key").chmod(0o604)


def wrong_key(home: Path) -> None:
    """Put another thing in the key's place."""
    (home / "vault" / "key").write_text("no identity\n")


def broken_rules(home: Path) -> None:
    """Break the policy."""
    (home / "vault-policy.toml").write_text("version = 1\n[[allow]]\nsecrets = 3\n")


def edited_record(home: Path) -> None:
    """Change a line of the record."""
    (home / "vault" / "audit.log").write_bytes(b'{"n":1} ' + b"0" * 64 + b"\n")


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (unreadable_key, "vault restore"),
        (open_key, "chmod 600"),
        (wrong_key, "no age identity"),
        (broken_rules, "secrets"),
        (edited_record, "was changed"),
    ],
)
def test_a_vault_that_is_not_sound_is_not_served(fault: Callable[[Path], None], word: str) -> None:
    """The broker exits 78 with the fault and its fix, before it serves anybody: every open finds no broker."""
    with scratch.folder() as home:
        stand = Stand(home, VALUES)
        fault(home)
        done = subprocess.run(
            [sys.executable, "-I", "-m", "broker.vault", "--home", str(home)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert done.returncode in {75, 78}
        assert word in done.stderr
        assert KEY_TEXT not in done.stderr.replace("(AGE-SECRET-KEY-…)", "")

        async def work() -> None:
            job = Job("main-1.1", LEVELS[0])
            with pytest.raises(BrokerAway):
                await stand.client().open(job.ask(get_of("KEY")), job.fds)
            job.end()

        scene(work)


def test_attack_40_the_reserve(folder: Folder) -> None:
    """On a full disk the record lives on what was kept back, slice by slice; when that is gone, it says no."""
    reserve = Reserve(folder, 2 * SLICE_BYTES)
    assert reserve.held == 2 * SLICE_BYTES
    room = 0

    def write(fd: int, data: bytes | memoryview) -> int:
        nonlocal room
        kept = 2 * SLICE_BYTES - reserve.held
        if room + len(data) > kept // SLICE_BYTES * 250:
            raise OSError(errno.ENOSPC, "full")
        room += len(data)
        return os.write(fd, data)

    record = Audit(folder, bytes(32), write=write, more_room=reserve.give)
    for _ in range(4):
        record.write("said")
    assert reserve.held == 0
    with pytest.raises(AuditError):
        record.write("said")
    record.close()
    assert audits.verify(folder.read("audit.log", 1 << 20), bytes(32))[0].count == 4
    reserve.fill()
    assert reserve.held == 2 * SLICE_BYTES
    assert (folder.path / RESERVE_FILE).stat().st_mode & 0o777 == 0o600
    reserve.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk to fill")
def test_attack_40_a_disk_that_is_really_full() -> None:
    """A job has filled the file system: hundreds of lines still fit, then nothing does, and the chain holds."""
    with scratch.folder() as place:
        done = subprocess.run(
            [sys.executable, "-I", "-c", ON_A_FULL_DISK, str(place)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert done.returncode == 0, done.stderr
    held, written, count, left = map(int, done.stdout.split())
    assert held == 256 << 10
    assert written > 150
    assert (count, left) == (written + 1, 0)
