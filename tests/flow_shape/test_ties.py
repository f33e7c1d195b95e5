"""A job waits for the very jobs that its client saw: two under one id, and what a node makes of it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable

import pytest
from redis.asyncio import Redis

from node_agent.admission import Denial
from node_agent.dependencies import Dependencies
from runner import Job, UnverifiedResultError, chain, group, keyring, trust
from runner.client import disconnect
from runner.digests import Digests
from runner.scripts import payload
from runner.signing import Signer, new_private
from runner.wire import record
from runner.wire.card import TrustedKey
from runner.wire.envelope import Domain
from runner.wire.errors import RecordError
from runner.wire.flow import After
from runner.wire.keys import Keys
from runner.wire.spec import JobSpec
from tests.client.paper import Fleet, PaperNode, as_bytes
from tests.support.valkey import Valkey

TASK = "app:work"
KEYS = Keys()
FIRST, SECOND, THIRD = (f"main-01arz3ndektsv4rrffq69g5fa{letter}" for letter in "vwx")


@pytest.fixture
def thief(paper: Fleet) -> TrustedThief:
    """A second key that every node takes jobs of the same tenant from."""
    return TrustedThief(paper)


class TrustedThief:
    """Signs whatever it likes, for its own tenant."""

    def __init__(self, paper: Fleet) -> None:
        self._paper, self._signer = paper, Signer(new_private())
        (own,) = trust.load(paper.home.trust).keys
        key = dataclasses.replace(own, id=self._signer.key_id, public=self._signer.public)
        self.trusted: dict[str, TrustedKey] = {own.id: own, key.id: key}

    def put(self, job: Job[object]) -> bytes:
        """Put an own, validly signed job under another one's id; returns what lay there."""
        spec, _ = self._paper.envelope(job.id)
        envelope = record.dumps(dataclasses.replace(spec, args=("mine",), nonce="f" * len(spec.nonce)), bare=True)
        forged = payload.pack(envelope, self._signer.sign(Domain.JOB, envelope))
        old = as_bytes(self._paper.store.hget(KEYS.job(job.id), "data"))
        self.restore(job, forged)
        return old

    def restore(self, job: Job[object], data: bytes) -> None:
        """Put a payload under a job's id."""
        self._paper.store.hset(KEYS.job(job.id), "data", data)


Settle = Callable[[Job[object]], "JobSpec | Denial"]


@pytest.fixture
def settle(paper: Fleet, valkey: Valkey, thief: TrustedThief) -> Settle:
    """Looks at the jobs before a job as a node does that trusts both keys."""

    def look(job: Job[object]) -> JobSpec | Denial:
        spec, _ = paper.envelope(job.id)

        async def once() -> JobSpec | Denial:
            client = Redis(unix_socket_path=str(valkey.socket))
            try:
                fleet = keyring.load_fleet_public(paper.home)
                return await Dependencies(client, KEYS, thief.trusted, fleet).settle(spec)
            finally:
                await client.aclose()

        return asyncio.run(once())

    return look


def refusal(found: JobSpec | Denial) -> str:
    """Return why the job must not run."""
    assert isinstance(found, Denial)
    return found.message


def test_attack_04_another_key_signs_a_job_under_a_dependencys_id(
    paper: Fleet, node: PaperNode, thief: TrustedThief, settle: Settle
) -> None:
    """It has run, its node signed its end; neither with its own payload nor with the victim's does that count."""
    first = paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output])
    genuine = thief.put(first)
    node.finish(first.id, value="forged")
    assert f"under the id of job {first.id} lies another job" in refusal(settle(job))
    thief.restore(first, genuine)
    assert f"the signed end of job {first.id} is that of another job" in refusal(settle(job))
    with pytest.raises(UnverifiedResultError, match="that of another job under its id"):
        first.result(timeout=5)
    node.finish(first.id, value="genuine")
    assert first.result(timeout=5) == "genuine"
    found = settle(job)
    assert isinstance(found, JobSpec)
    assert found.args == ("genuine",)


def test_attack_04_an_end_must_be_that_of_the_stored_job_where_its_hash_is_not_known(
    paper: Fleet, node: PaperNode, thief: TrustedThief, settle: Settle
) -> None:
    """An id given by hand names whatever job lies there, but never the end of one and the payload of another."""
    first = paper.app.call(TASK)
    disconnect(paper.app.place)
    job = paper.app.call(TASK, after=first.id)
    assert paper.envelope(job.id)[0].after == After((first.id,))
    genuine = thief.put(first)
    node.finish(first.id, value="forged")
    thief.restore(first, genuine)
    assert "is that of another job" in refusal(settle(job))
    node.finish(first.id, value="x", envelope_sha256=None)
    assert "is that of another job" in refusal(settle(job))
    node.finish(first.id, value="genuine")
    assert isinstance(settle(job), JobSpec)


def test_an_end_before_anything_was_verified_names_no_envelope(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """A kill or a loss before the start is believed; one that names another job is not."""
    first = paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output], on_failure="run")
    node.finish(first.id, "killed", reason="kill", envelope_sha256=None)
    assert isinstance(settle(job), JobSpec)
    node.finish(first.id, "failed", reason="exception", envelope_sha256="0" * 64)
    assert "is that of another job" in refusal(settle(job))


def step(*_: object) -> int:
    """Do nothing."""
    return 1


def test_every_member_of_a_flow_is_tied_to_those_before_it(paper: Fleet) -> None:
    """Also across batches, and to a job from before: each hash is that of the envelope in the store."""
    task = paper.app.task(step)
    before = paper.app.call(TASK)
    shape = chain(task.si().set(after=before), group(task.s() for _ in range(210)), task.s(), task.s())
    jobs = shape.apply_async().jobs
    specs = {job.id: paper.envelope(job.id) for job in (before, *jobs)}
    hashes = {job: hashlib.sha256(data.envelope).hexdigest() for job, (_, data) in specs.items()}
    waits = [spec.after for spec, _ in specs.values() if spec.after is not None]
    assert [len(after.jobs) for after in waits].count(210) == 1
    assert len(waits) == len(jobs) == 213
    for after in waits:
        assert after.envelopes == tuple(hashes[job] for job in after.jobs)


def test_a_client_remembers_some_and_keeps_what_was_signed(paper: Fleet) -> None:
    """The oldest are forgotten; two under one id are none; a hash that was signed once is not replaced."""
    digests = Digests(2)
    spec = dataclasses.replace(paper.envelope(paper.app.call(TASK).id)[0], after=After((FIRST, SECOND, THIRD)))
    assert digests.tied(spec) == spec
    for number, job in enumerate((FIRST, SECOND, THIRD)):
        digests.note(job, b"%d" % number)
    tied = digests.tied(spec).after
    assert tied is not None
    second, third = (hashlib.sha256(b"%d" % number).hexdigest() for number in (1, 2))
    assert tied.envelopes == ("", second, third)
    assert (digests.of(FIRST), digests.of(THIRD)) == (None, third)
    digests.note(THIRD, b"other")
    assert digests.of(THIRD) is None
    assert digests.tied(dataclasses.replace(spec, after=tied)).after == tied


@pytest.mark.parametrize("envelopes", [("",), ("", "0" * 63), ("", "G" * 64), ("0" * 64, "", "")])
def test_a_hash_for_each_job_or_none(envelopes: tuple[str, ...]) -> None:
    """Anything else is no job."""
    with pytest.raises(RecordError, match="hash"):
        After((FIRST, SECOND), envelopes=envelopes)
