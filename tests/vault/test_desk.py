"""A job gets what it was granted and nothing else, whoever asks and however. Numbers: the vault's attack list.

The stand-ins for jobs are plain processes: at A with a uid of their own, at B in a pid namespace of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from broker.client import BrokerAway, BrokerClient, LeaseRefused
from broker.vault.desk import AGENT_GRACE_S
from runner.cli.commands import run_words
from tests.support.wait import wait_until
from tests.vault.conftest import LEVELS
from tests.vault.stand import JOB_UID, OPEN_TO_ALL, Job, Stand, get_of


@asynccontextmanager
async def leased(stand: Stand, *jobs: Job, name: str = "KEY") -> AsyncIterator[BrokerClient]:
    """Jobs with a lease for one secret each."""
    client = stand.client()
    client.start()
    try:
        for job in jobs:
            await client.open(job.ask(get_of(name)), job.fds)
        yield client
    finally:
        for job in jobs:
            await client.close(job.name)
            job.end()
        await client.stop()


def scene(work: Callable[[], Awaitable[None]]) -> None:
    """Run one test's coroutine."""

    async def run() -> None:
        await work()

    asyncio.run(run())


async def off_loop(work: Callable[[], object]) -> object:
    """Do what waits for a process beside the loop, so that the client's own work goes on."""
    return await asyncio.to_thread(work)


def test_a_job_gets_its_secret(stand: Stand, level: Literal["A", "B"]) -> None:
    """The value comes on the channel, the record says so by name, and never holds it."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            assert job.get("KEY") == b"canary-one"
            assert job.say('{"op":"list"}')["names"] == ["KEY"]

    scene(work)
    assert '"event":"secret.released"' in stand.record()
    assert "canary" not in stand.record() + (stand.home / "broker.log").read_text()


def test_vault_3_another_jobs_secret(stand: Stand, level: Literal["A", "B"]) -> None:
    """A name that was not granted, one that does not exist and one in another mode get the same answer."""

    async def work() -> None:
        job, other = Job("main-1.1", level), Job("main-2.1", level, JOB_UID + 1)
        async with leased(stand, job), leased(stand, other, name="OTHER"):
            assert [job.get(name) for name in ("OTHER", "NONE", "../key", "*")] == ["denied"] * 4
            assert other.get("OTHER") == b"canary-two"

    scene(work)


def test_vault_4_the_jobs_own_children(stand: Stand, level: Literal["A", "B"]) -> None:
    """A shell's child is the job as much as the shell: it is served."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            for depth in ("child", "grandchild"):
                assert job.say(f'{depth} {{"op":"get","name":"KEY"}}')["ok"]

    scene(work)


def test_vault_6_a_channel_in_foreign_hands(stand: Stand, level: Literal["A", "B"]) -> None:
    """Whoever holds a job's end without being inside its sandbox is nobody: another job, and we ourselves."""

    async def work() -> None:
        job, thief = Job("main-1.1", level), Job("main-2.1", level, JOB_UID + 1)
        async with leased(stand, job, thief):
            job.far.send(b'{"op":"get","name":"KEY"}')
            assert json.loads(job.far.recv(4096)) == {"ok": False, "err": "not-you"}
            assert job.get("KEY") == b"canary-one"

    scene(work)
    assert '"code":"not-you"' in stand.record()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a job a uid of its own")
def test_attack_11_jobs_are_told_apart(stand: Stand) -> None:
    """A lease at A without a uid of its own, and one at B in the broker's own pid namespace, are not opened."""

    async def work() -> None:
        job = Job("main-1.1", "B")
        client = stand.client()
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        try:
            ask = job.ask(get_of("KEY"))
            with pytest.raises(LeaseRefused, match="namespace of its own"):
                await client.open(ask, [*job.fds[:3], own])
            job.level = "A"
            with pytest.raises(LeaseRefused, match="uid of its own"):
                await client.open(job.ask(get_of("KEY")), job.fds[:3])
        finally:
            os.close(own)
            await client.stop()
            job.end()

    scene(work)


@pytest.mark.parametrize("size", [70_000, 150_000])
def test_vault_11_oversized(stand: Stand, level: Literal["A", "B"], size: int) -> None:
    """A record over the limit is refused, and the channel lives on."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job):
            assert job.say(f"big {size}")["err"] == "too-big"
            assert job.get("KEY") == b"canary-one"

    scene(work)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\xff",
        b"[" * 60_000,
        b'{"op":NaN}',
        b"[]",
        b'"get"',
        b'{"op":"get"}',
        b'{"op":"get","name":5}',
        b'{"op":"__init__"}',
        b'{"op":"open","attempt":"x"}',
        b'{"op":"close","attempt":"main-1.1"}',
    ],
)
def test_vault_12_garbage(stand: Stand, raw: bytes) -> None:
    """What is no request is refused by a code, an agent's words mean nothing here, and the channel lives on."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(stand, job):
            assert job.say(f"raw {raw.hex()}")["err"] == "garbage"
            assert job.get("KEY") == b"canary-one"

    scene(work)


def test_vault_12_too_much_garbage(stand: Stand) -> None:
    """A job that sends nothing but garbage loses its channel; the next job does not notice."""

    async def work() -> None:
        job, other = Job("main-1.1", LEVELS[0]), Job("main-2.1", LEVELS[0], JOB_UID + 1)
        async with leased(stand, job, other):
            answers = [job.say('{"op":"x"}') for _ in range(60)]
            assert "err" not in answers[-1]
            assert other.get("KEY") == b"canary-one"

    scene(work)


def test_vault_9_descriptors_for_the_broker(stand: Stand) -> None:
    """A job can't fill the broker's descriptor table: what it sends along does not stay."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        assert stand.process is not None
        folder = Path(f"/proc/{stand.process.pid}/fd")
        async with leased(stand, job):
            before = len(list(folder.iterdir())) if os.geteuid() == 0 else 0
            for _ in range(20):
                job.say("stuff")
            assert job.get("KEY") == b"canary-one"
            if before:
                assert len(list(folder.iterdir())) == before

    scene(work)


def test_vault_16_a_job_that_does_not_read(stand: Stand) -> None:
    """It loses its channel; the others are served meanwhile."""

    async def work() -> None:
        job, other = Job("main-1.1", LEVELS[0]), Job("main-2.1", LEVELS[0], JOB_UID + 1)
        async with leased(stand, job, other) as client:
            job.say("flood 5000")
            assert await client.ping()
            assert other.get("KEY") == b"canary-one"

    scene(work)


def test_vault_17_after_the_end(stand: Stand, level: Literal["A", "B"]) -> None:
    """When the agent says so, the channel is dead for everybody who holds a copy."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(stand, job) as client:
            assert job.get("KEY") == b"canary-one"
            await client.close(job.name)
            assert "err" not in job.say('{"op":"get","name":"KEY"}')

    scene(work)


@pytest.mark.parametrize(("limit", "code"), [("uses = 2", "used-up"), ("ttl_s = 0.2", "expired")])
def test_vault_17_limits(own: Stand, limit: str, code: str) -> None:
    """A secret that is used up, or whose time is over, is not handed out again."""
    own.write_rules(OPEN_TO_ALL + limit)
    assert own.operator(op="reload")["ok"]

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job):
            assert job.get("KEY") == b"canary-one"
            wait_until(lambda: job.get("KEY") == code, "the limit")

    scene(work)


def test_vault_18_a_restart_is_invisible(own: Stand, level: Literal["A", "B"]) -> None:
    """A request waits for the next broker and is answered; uses that were spent stay spent, whoever says otherwise."""
    own.write_rules(OPEN_TO_ALL + "uses = 3")
    own.operator(op="reload")

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(own, job):
            assert job.get("KEY") == b"canary-one"
            assert job.get("KEY") == b"canary-one"
            assert own.stop(signal.SIGKILL) == -signal.SIGKILL
            waiting = asyncio.create_task(off_loop(lambda: job.get("KEY")))
            await off_loop(own.start)
            assert await waiting == b"canary-one"
            assert await off_loop(lambda: job.get("KEY")) == "used-up"

    scene(work)


def test_vault_19_an_agent_that_dies(own: Stand) -> None:
    """Its leases end after the grace, and the record says why."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        client = own.client()
        await client.open(job.ask(get_of("KEY")), job.fds)
        await client.stop()
        assert job.get("KEY") == b"canary-one"
        await off_loop(lambda: wait_until(lambda: '"why":"agent gone"' in own.record(), "the grace", AGENT_GRACE_S + 5))
        assert "err" not in job.say('{"op":"get","name":"KEY"}')
        job.end()

    scene(work)


def test_vault_20_the_kernel_revokes(own: Stand, level: Literal["A", "B"]) -> None:
    """A lease ends with the job's first process, whatever the agent says or does not say."""

    async def work() -> None:
        job = Job("main-1.1", level)
        async with leased(own, job):
            assert job.get("KEY") == b"canary-one"
            os.kill(job.pid, signal.SIGKILL)
            started_s = time.monotonic()
            await off_loop(lambda: wait_until(lambda: '"why":"exit"' in own.record(), "the end of the lease"))
            assert time.monotonic() - started_s < 1
            assert own.operator(op="status")["leases"] == 0

    scene(work)


def test_vault_35_a_person_has_to_say_yes(own: Stand) -> None:
    """Until an operator approves, the answer is pending; the approval is in the record and holds for one attempt."""
    own.write_rules(OPEN_TO_ALL + "approve = true")
    own.operator(op="reload")

    async def work() -> None:
        job, other = Job("main-1.1", LEVELS[0]), Job("main-2.1", LEVELS[0], JOB_UID + 1)
        async with leased(own, job, other):
            assert [job.get("KEY"), other.get("KEY")] == ["pending", "pending"]
            assert [one["attempt"] for one in own.operator(op="pending")["pending"]] == ["main-1.1", "main-2.1"]
            assert own.operator(op="approve", attempt="main-1.1", name="KEY")["ok"]
            assert [job.get("KEY"), other.get("KEY")] == [b"canary-one", "pending"]

    scene(work)
    assert not own.operator(op="approve", attempt="main-9.1", name="KEY")["ok"]


def test_a_reload_only_narrows(own: Stand) -> None:
    """New rules take away what they no longer allow; broken ones change nothing; wider ones give a live job no more."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job):
            own.write_rules("version = 1\nnonsense")
            assert own.operator(op="reload")["err"] == "rules"
            assert job.get("KEY") == b"canary-one"
            own.write_rules(OPEN_TO_ALL.replace('["*"]', '["OTHER"]', 1))
            assert own.operator(op="reload")["revoked"] == 1
            assert job.get("KEY") == "denied"
            own.write_rules(OPEN_TO_ALL)
            assert own.operator(op="reload")["ok"]
            assert job.get("KEY") == "denied"

    scene(work)


def test_what_is_not_allowed_opens_no_lease(own: Stand) -> None:
    """A job with one secret that it may not have, or that is not there, gets none; the message is for the operator."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        client = own.client()
        with pytest.raises(LeaseRefused, match="ringfence vault set NONE"):
            await client.open(job.ask(get_of("KEY"), get_of("NONE")), job.fds)
        own.write_rules("version = 1")
        own.operator(op="reload")
        with pytest.raises(LeaseRefused, match="no rule"):
            await client.open(job.ask(get_of("KEY")), job.fds)
        await client.stop()
        job.end()

    scene(work)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_vault_1_strangers(own: Stand) -> None:
    """Another user can't connect at all, and one who gets past the folder is not heard."""
    (own.home / "s").chmod(0o711)
    for name in ("broker", "vault"):
        (own.home / "s" / name).chmod(0o666)
    (own.home).chmod(0o711)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os.setuid(JOB_UID)
        code = 1
        try:
            own.operator(op="list")
        except (OSError, ValueError):
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert '"event":"secret.put"' not in own.record()


def test_no_broker_no_lease(tmp_path: Path) -> None:
    """Without a broker the agent is told so at once."""

    async def work() -> None:
        client = BrokerClient(tmp_path / "nobody")
        assert not await client.ping()
        job = Job("main-1.1", LEVELS[0])
        with pytest.raises(BrokerAway):
            await client.open(job.ask(get_of("KEY")), job.fds)
        job.end()
        await client.stop()

    scene(work)


def test_a_stopped_broker_is_away(own: Stand) -> None:
    """A broker that does not answer counts as none within two seconds, and is there again when it goes on."""

    async def work() -> None:
        client = own.client()
        assert await client.ping()
        assert own.process is not None
        own.process.send_signal(signal.SIGSTOP)
        started_s = time.monotonic()
        assert not await client.ping()
        assert time.monotonic() - started_s < 3
        own.process.send_signal(signal.SIGCONT)
        assert await client.ping()
        await client.stop()

    scene(work)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every process; the second phase is an ordinary user")
def test_vault_21_trap_6_its_own_user_cannot_look_in(stand: Stand) -> None:
    """Memory, environment and descriptors of the broker are closed to its own uid (which root is not bound by)."""
    assert stand.process is not None
    pid = stand.process.pid
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        # The parent, an ordinary process of the same user, shows that the look itself works.
        os.close(os.open(f"/proc/{os.getppid()}/environ", os.O_RDONLY))
        opened = 0
        for name in ("mem", "environ", "maps"):
            try:
                os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
                opened += 1
            except OSError:
                continue
        os._exit(opened)
    assert os.waitpid(child, 0)[1] == 0


def test_output_is_scrubbed(own: Stand) -> None:
    """What a job prints, and a file that it wrote, come without the value it was handed; the record counts."""

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job) as client:
            pairs = [os.pipe() for _ in range(4)]
            (out_read, out), (err_read, err), (agent_out, to_out), (agent_err, to_err) = pairs
            await client.streams(job.name, (out_read, err_read, to_out, to_err, to_err))
            for fd in (out_read, err_read, to_out, to_err, err, agent_err):
                os.close(fd)
            os.write(out, b"the key is canary-one\n")
            os.close(out)
            with os.fdopen(agent_out, "rb") as file:
                assert file.read() == b"the key is [secret:KEY]\n"
            source, target = os.memfd_create("in"), os.memfd_create("out")
            os.write(source, b"canary-one")
            await client.clean(job.name, source, target)
            assert os.pread(target, 100, 0) == b"[secret:KEY]"
            os.close(source)
            os.close(target)
            with pytest.raises(LeaseRefused):
                await client.clean("main-9.1", 0, 1)

    scene(work)
    assert '"event":"secret.masked","attempt":"main-1.1","hits":1,"names":["KEY"]' in own.record()


def test_the_command_line_reaches_a_running_broker(own: Stand, capfd: pytest.CaptureFixture[str]) -> None:
    """While the broker has the vault open, `ringfence vault` has it do the work; what it put is what jobs get."""
    place = ["--home", str(own.home), "vault"]
    value = own.home / "value"
    value.write_bytes(b"canary-three")
    assert run_words([*place, "set", "NEW", "--file", str(value)]) == 0
    assert run_words([*place, "rm", "OTHER"]) == 0
    assert run_words([*place, "rotate"]) == 0
    capfd.readouterr()
    assert run_words([*place, "list", "--json"]) == 0
    assert [one["name"] for one in json.loads(capfd.readouterr().out)] == ["KEY", "NEW"]
    assert run_words([*place, "audit"]) == 0
    assert "secret.removed" in capfd.readouterr().out
    assert run_words([*place, "explain", "NEW", "--task", "a:b", "--mode", "get"]) == 0
    assert run_words([*place, "explain", "NEW", "--task", "a:b", "--mode", "env"]) == 1
    assert run_words([*place, "rollback", "NONE", "1"]) == 78

    async def work() -> None:
        job = Job("main-1.1", LEVELS[0])
        async with leased(own, job, name="NEW"):
            assert job.get("NEW") == b"canary-three"

    scene(work)
