"""Whoever writes the store, and a node that lies: what they can't do (attacks 3, 20-25)."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from runner import keyring
from runner.errors import JobRefused, UnverifiedResultError
from runner.home import Home
from runner.job import Job
from runner.scripts import payload
from runner.signing import Signer, new_private
from runner.wire import codec, record
from runner.wire.envelope import Domain
from runner.wire.receipt import Outcome, Receipt
from runner.wire.states import State
from runner.wire.times import iso
from tests.support.fleet import CLI
from tests.support.rig import HEARTBEAT_S, Node, Rig, ends_of, rigged
from tests.support.wait import wait_until

BOMB_BYTES = 400 << 20
BOMB_RAM_BYTES = 16 << 20
HUGE_SEQ = str(2**53)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store that the test writes as it likes, with one agent of two slots."""
    with rigged() as found:
        found.start("a")
        yield found
        found.app.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    """As `rig`, for the tests that leave the agent as they found it; started once.

    Its lease outlasts a moment in which a busy machine gives it no turn: a lost lease is another test's.
    """
    with rigged(heartbeat_s=5.0) as found:
        found.start("a")
        found.app.close()
        yield found


@pytest.fixture
def steady(shared: Rig) -> Iterator[Rig]:
    """The shared rig for one test."""
    yield shared
    shared.wait_idle()
    shared.app.close()


@pytest.fixture(scope="module")
def both() -> Iterator[Rig]:
    """As `shared`, with a second agent; a lease outlasts the moment that a test stops the first."""
    with rigged(heartbeat_s=5.0) as found:
        found.start("a")
        found.start("b")
        found.app.close()
        yield found


@pytest.fixture
def pair(both: Rig) -> Iterator[Rig]:
    """The rig of two agents for one test, which may stop the first for a moment."""
    yield both
    both.wait_idle()
    both.app.close()


def signer_of(rig: Rig, node: Node) -> Signer:
    """Return a node's key: that of a node which lies."""
    return keyring.node_key(Home(rig.home), node.name)


def forge_end(rig: Rig, job: Job[None], signer: Signer, node: str, value: bytes = b'"forged"') -> None:
    """Write an end into the store as a node does, signed by ``signer``."""
    stamp = time.time_ns() // 1_000_000
    outcome = Outcome(
        job.id, 1, "finished", node, "b00t01234567", stamp, stamp, result_sha256=hashlib.sha256(value).hexdigest()
    )
    body = record.dumps(outcome)
    write(rig, rig.keys.job(job.id), rf_state="finished", status="finished", rf_outcome=body)
    write(rig, rig.keys.job(job.id), rf_outcome_sig=signer.sign(Domain.OUTCOME, body))
    rig.redis.xadd(rig.keys.results(job.id), {"type": "1", "return_value": base64.b64encode(value)})


def write(rig: Rig, key: str, **fields: str | bytes) -> None:
    """Set fields of a hash."""
    for name, value in fields.items():
        rig.redis.hset(key, name, value)


def park(rig: Rig, job: Job[None]) -> None:
    """Take a waiting job out of its lane, so that no honest node meets it."""
    for lane in rig.redis.scan_iter(f"{rig.keys.rq}queue:*"):
        rig.redis.lrem(lane, 0, job.id)


def put(rig: Rig, job: Job[None]) -> None:
    """Put a job's id into a lane, and wake the agents as an enqueue does."""
    rig.redis.lpush(rig.keys.queue("agents"), job.id)
    rig.redis.rpush(rig.keys.wake("agents"), "1")


def test_attack_20_forged_results_are_never_returned(rig: Rig) -> None:
    """Signed by nobody, by a client's key, by an unknown key or for another job: not a result."""
    done = rig.command("true")
    assert done.outcome(20).state == "finished"
    rig.nodes["a"].stop()
    client_key = keyring.load_key(rig.home / "keys" / "client.key")
    for forger in (client_key, Signer(new_private())):
        job = rig.command("true")
        park(rig, job)
        forge_end(rig, job, forger, rig.nodes["a"].name)
        with pytest.raises(UnverifiedResultError):
            job.result(timeout=5)
    copied = rig.command("true")
    park(rig, copied)
    fields = cast("dict[bytes, bytes]", rig.redis.hgetall(rig.keys.job(done.id)))
    for name in (b"rf_state", b"status", b"rf_outcome", b"rf_outcome_sig"):
        write(rig, rig.keys.job(copied.id), **{name.decode(): fields[name]})
    with pytest.raises(UnverifiedResultError):
        copied.result(timeout=5)
    bare = rig.command("true")
    park(rig, bare)
    write(rig, rig.keys.job(bare.id), rf_state="finished", status="finished")
    with pytest.raises(UnverifiedResultError):
        bare.result(timeout=5)


def test_attack_20_a_changed_value_is_not_the_result(steady: Rig) -> None:
    """The value of a truly finished job is replaced in the store: not returned."""
    job = steady.command("true")
    assert job.result(timeout=20) is None
    steady.redis.xadd(steady.keys.results(job.id), {"type": "1", "return_value": base64.b64encode(b'"other"')})
    with pytest.raises(UnverifiedResultError):
        job.result(timeout=5)


def test_attack_20_no_unsigned_job_and_no_wider_grant_runs(rig: Rig) -> None:
    """A job without a signature, one with a changed word, one with a wider grant: refused before a byte runs."""
    rig.nodes["a"].stop()
    jobs = []
    for change in ("unsigned", "word", "grant"):
        job, marker = rig.pulse(f"unsigned-{change}")
        park(rig, job)
        data = payload.parse(cast("bytes", rig.redis.hget(rig.keys.job(job.id), "data")))
        body, label = data.envelope, data.signature
        if change == "unsigned":
            label = label.partition(".")[0] + "." + "A" * 86
        elif change == "word":
            body = body.replace(b"pulse.py", b"other.py")
        else:
            body = body.replace(str(rig.work).encode(), b"/")
        rig.redis.hset(rig.keys.job(job.id), "data", payload.pack(body, label))
        put(rig, job)
        jobs.append((job, marker))
    rig.restart(rig.nodes["a"])
    for job, marker in jobs:
        outcome = job.outcome(20)
        assert (outcome.state, outcome.reason, marker.stat().st_size) == ("refused", "bad_signature", 0)


def test_attack_20_a_killed_job_stays_killed_without_its_tombstone(steady: Rig) -> None:
    """Tombstone deleted and the id put back into its lane: it does not run again, and the signed end stays."""
    blockers = [steady.command("sleep", "30") for _ in range(steady.slots)]
    for blocker in blockers:
        steady.wait_state(blocker, "running")
    job, marker = steady.pulse("back")
    assert job.kill().outcome == "killed_before_start"
    steady.redis.delete(steady.keys.tombstone(job.id))
    put(steady, job)
    for blocker in blockers:
        blocker.kill()
    last = steady.command("true")
    assert last.outcome(20).state == "finished"
    assert (job.outcome(5).state, marker.stat().st_size) == ("killed", 0)
    assert ends_of(steady, [job]) == {job.id: ("killed", 1)}


class Parrot:
    """Answers every kill of one job with a receipt of its own as soon as the tombstone shows the command."""

    def __init__(self, rig: Rig, job: Job[None], make: object) -> None:
        self._rig, self._job, self._make = rig, job, make
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        client = self._rig.store.client()
        try:
            key = self._rig.keys.tombstone(self._job.id)
            text = cast("bytes", wait_until(lambda: client.get(key), "the tombstone"))
            command = cast("dict[str, str]", codec.load(text.partition(b" ")[2]))["id"]
            body, label = self._make(command)  # type: ignore[operator]  # a function of the command's id
            client.xadd(self._rig.keys.replies(command), {"receipt": body, "sig": label})
        finally:
            client.close()


def receipt_for(job: Job[None], command: str, node: str, outcome: str = "killed") -> Receipt:
    now = iso(time.time_ns() // 1_000_000)
    return Receipt(job.id, command, outcome, "killed", now, now, "0" * 32, 1, node, "b00t01234567")  # type: ignore[arg-type] # any outcome


@pytest.mark.parametrize("what", ["copied", "other-node", "client", "other-job"])
def test_attack_21_a_foreign_receipt_confirms_nothing(pair: Rig, what: str) -> None:
    """A receipt of another command or job, of another node, or of no node: `kill` exits with 3."""
    holder, other = pair.nodes["a"], pair.nodes["b"]
    first = pair.command("sleep", "30", node=holder.name)
    pair.wait_state(first, "running")
    real = first.kill()
    job = pair.command("sleep", "30", node=holder.name)
    pair.wait_state(job, "running")
    holder.signal(signal.SIGSTOP)

    def make(command: str) -> tuple[bytes, str]:
        if what == "copied":
            return record.dumps(dataclasses.replace(real, signature="")), real.signature
        told = receipt_for(first if what == "other-job" else job, command, holder.name)
        signer = signer_of(pair, holder)
        if what == "other-node":
            told, signer = dataclasses.replace(told, node=other.name), signer_of(pair, other)
        elif what == "client":
            signer = keyring.load_key(pair.home / "keys" / "client.key")
        body = record.dumps(dataclasses.replace(told, signer=signer.key_id))
        return body, signer.sign(Domain.RECEIPT, body)

    with Parrot(pair, job, make):
        done = subprocess.run(
            [*CLI, "--home", str(pair.home), "kill", job.id, "--wait", "1"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip # several to a line
    holder.signal(signal.SIGCONT)
    assert done.returncode == 3, (done.stdout, done.stderr)


@pytest.mark.parametrize("selector", ["all", "tag"])
def test_attack_22_no_hash_field_makes_a_job_immune(steady: Rig, selector: str) -> None:
    """A number from the future, none at all, and no selectors in the hash: waiting and running jobs are hit alike."""
    fields: list[dict[str, str]] = [{"rf_seq": HUGE_SEQ}, {"rf_seq": ""}, {"rf_sel": ""}]
    jobs = []
    for number, lie in enumerate(fields * 2):
        job, marker = steady.pulse(f"immune-{selector}-{number}", tags={"crew": "x"})
        write(steady, steady.keys.job(job.id), **lie)
        jobs.append((job, marker))
    wait_until(lambda: sum(marker.stat().st_size > 0 for _, marker in jobs) == steady.slots, "both slots to be busy")
    for job, _ in jobs:
        write(steady, steady.keys.job(job.id), rf_sel="", rf_seq=HUGE_SEQ)
    if selector == "all":
        steady.app.kill(all=True)
    else:
        steady.app.kill(tag="crew=x")
    for job, _ in jobs:
        assert job.outcome(20).state == "killed"
    assert sum(marker.stat().st_size > 0 for _, marker in jobs) == steady.slots
    assert set(ends_of(steady, [job for job, _ in jobs]).values()) == {("killed", 1)}
    assert steady.command("true", tags={"crew": "x"}).outcome(20).state == "finished"


def test_attack_23_a_forged_cutoff_bricks_nothing(steady: Rig) -> None:
    """A cutoff above the counter, and one in another tenant's table, hit no job."""
    write(steady, steady.keys.cutoffs(), **{"all": f"{HUGE_SEQ} sig command", "#": "7"})
    write(steady, steady.keys.cutoffs("other"), **{"all": "1 sig command", "tenant:main": "1 sig command", "#": "7"})
    job = steady.command("true")
    assert job.outcome(20).state == "finished"
    steady.redis.delete(steady.keys.cutoffs(), steady.keys.cutoffs("other"))


@pytest.mark.parametrize("when", ["now", "after-restart", "store-wiped"])
def test_attack_24_a_replay_is_refused_on_its_node(rig: Rig, when: str) -> None:
    """The hash of an ended job put back as it was: refused(replayed); the ledger is on the node's disk."""
    node = rig.nodes["a"]
    node.stop()
    job, marker = rig.pulse("replay", "once")
    kept = cast("dict[bytes, bytes]", rig.redis.hgetall(rig.keys.job(job.id)))
    rig.restart(node)
    assert job.outcome(20).state == "finished"
    size = marker.stat().st_size
    rig.wait_idle()
    if when == "after-restart":
        wait_until(lambda: "\nE " in rig.ledger(node), "the end to be in the ledger", 5)
        node.crash()
        rig.restart(node)
    elif when == "store-wiped":
        boot = rig.boot(node)
        for key in list(rig.redis.scan_iter(f"{rig.keys.rf}*")):
            rig.redis.delete(key)
        wait_until(lambda: rig.boot(node) not in {"", boot}, "a new boot", 5 * HEARTBEAT_S)
        rig.redis.sadd(rig.keys.lanes(), "agents")
        rig.redis.set(rig.keys.seq(), "100")
    rig.redis.delete(rig.keys.job(job.id), rig.keys.results(job.id))
    write(rig, rig.keys.job(job.id), **{name.decode(): value for name, value in kept.items()})
    put(rig, job)
    with pytest.raises(JobRefused) as refused:
        job.result(timeout=20)
    assert refused.value.reason == "replayed"
    assert marker.stat().st_size == size


def test_attack_25_a_bomb_costs_little_and_the_lease_lives(rig: Rig) -> None:
    """A hash of 400 kB that unpacks to 400 MB: refused(bad_hash), little memory, no renewal missed."""
    node = rig.nodes["a"]
    boot = rig.boot(node)
    victim, _ = rig.pulse("neighbour")
    rig.wait_output(victim, "up")
    before = peak_bytes(node)
    packer = zlib.compressobj(9)
    block = b"\0" * (1 << 20)
    bomb = b"".join(packer.compress(block) for _ in range(BOMB_BYTES >> 20)) + packer.flush()
    for _ in range(5):
        job = rig.command("true", node="nobody")
        park(rig, job)
        write(rig, rig.keys.job(job.id), data=bomb, origin="agents")
        put(rig, job)
        rig.wait_state(job, "refused", "finished")
        assert rig.redis.hget(rig.keys.job(job.id), "rf_reason") == b"bad_hash"
    assert peak_bytes(node) - before < BOMB_RAM_BYTES
    assert (rig.boot(node), rig.state(victim), rig.attempt(victim)) == (boot, "running", 1)
    assert victim.kill().outcome == "killed"


def peak_bytes(node: Node) -> int:
    """Return the most memory that the agent ever had."""
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_attack_03_a_node_that_takes_a_foreign_lane_produces_no_result(rig: Rig) -> None:
    """A fleet node pops a job that is pinned to another one and signs its end: not a result."""
    liar = rig.start("b")
    holder = rig.nodes["a"]
    holder.stop()
    job = rig.command("true", node=holder.name)
    park(rig, job)
    forge_end(rig, job, signer_of(rig, liar), liar.name)
    with pytest.raises(UnverifiedResultError):
        job.result(timeout=5)
    forge_end(rig, job, signer_of(rig, liar), holder.name)
    with pytest.raises(UnverifiedResultError):
        job.result(timeout=5)


def test_attack_03_a_job_moved_to_another_lane_is_refused(steady: Rig) -> None:
    """A job that is pinned elsewhere is pushed into a lane that this node serves: refused, whatever the hash says."""
    job = steady.command("true", node="elsewhere")
    park(steady, job)
    steady.redis.hset(steady.keys.job(job.id), "origin", "agents")
    steady.redis.sadd(steady.keys.lanes(), "agents")
    put(steady, job)
    steady.wait_state(job, State.REFUSED)
    reason = cast("bytes", steady.redis.hget(steady.keys.job(job.id), "rf_reason"))
    assert reason in {b"bad_signature", b"bad_hash"}
