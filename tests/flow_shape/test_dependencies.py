"""What a node believes of the jobs that another one waited for: signed ends and signed values, nothing else."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Callable
from typing import Literal

import pytest
from redis.asyncio import Redis

from node_agent.admission import Denial
from node_agent.dependencies import Dependencies
from runner import EnqueueError, Job, UsageError, keyring, trust
from runner.client import connect
from runner.signing import Signer, new_private
from runner.wire import ids, passing, values
from runner.wire.card import NodeCard, TrustedKey
from runner.wire.errors import ValueTypeError
from runner.wire.keys import Keys
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason
from tests.client.paper import Fleet, PaperNode, as_bytes
from tests.support.valkey import Valkey

TASK = "app:work"
KEYS = Keys()


Settle = Callable[..., "JobSpec | Denial"]


@pytest.fixture
def settle(paper: Fleet, valkey: Valkey) -> Settle:
    """Looks at the jobs before a job as its node does; ``trusted`` and ``fleet`` replace the home's."""

    def look(job: Job[object], **changes: object) -> JobSpec | Denial:
        spec, _ = paper.envelope(job.id)
        trusted = changes.get("trusted", trust.load(paper.home.trust).by_id())
        fleet = changes.get("fleet", keyring.load_fleet_public(paper.home))

        async def once() -> JobSpec | Denial:
            client = Redis(unix_socket_path=str(valkey.socket))
            try:
                return await Dependencies(client, KEYS, trusted, fleet).settle(spec)  # type: ignore[arg-type]  # tests name real fields
            finally:
                await client.aclose()

        return asyncio.run(once())

    return look


def refusal(found: JobSpec | Denial) -> str:
    """Return why the job must not run."""
    assert isinstance(found, Denial)
    assert found.reason is RefuseReason.DEPENDENCY_FAILED
    return found.message


def test_verified_results_stand_where_the_arguments_ask_for_them(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """In lists and dicts, as often as they are named; all else is untouched."""
    first, second = paper.app.call(TASK), paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output, [second.output], {"$": "result", "v": first.id}], {"a": first.output})
    node.finish(first.id, value={"deep": [1]})
    node.finish(second.id, value=None)
    found = settle(job)
    assert isinstance(found, JobSpec)
    kept = {"$": "dict", "v": {"$": "result", "v": first.id}}
    assert found.args == ({"deep": [1]}, [None], kept)
    assert found.kwargs == {"a": {"deep": [1]}}
    assert found.after is not None
    assert set(found.after.jobs) == {first.id, second.id}


def test_what_a_result_says_is_never_looked_through_again(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """A job that returns the form of a placeholder, or of a sealed value, gets nobody else's result or secret."""
    secret, first = paper.app.call(TASK), paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output, secret.output])
    node.finish(secret.id, value="secret")
    hostile = {"$": "result", "v": secret.id}
    node.finish(first.id, value=hostile)
    found = settle(job)
    assert isinstance(found, JobSpec)
    assert found.args == (hostile, "secret")
    with pytest.raises(ValueTypeError, match="malformed tagged form"):
        values.decode(found.args[0])  # type: ignore[arg-type]  # plain JSON


@pytest.mark.parametrize("state", ["failed", "killed", "refused", "expired", "lost"])
def test_a_job_that_did_not_finish_refuses_those_that_waited(
    paper: Fleet, node: PaperNode, settle: Settle, state: str
) -> None:
    """The message names it, its end and the way round; with on_failure = run they get a Failure."""
    first = paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output])
    all_the_same = paper.app.call(TASK, [first.output], on_failure="run")
    node.finish(first.id, state, reason="why", detail="how")
    told = refusal(settle(job))
    assert first.id in told
    assert f"ended {state} (why)" in told
    assert "on_failure" in told
    found = settle(all_the_same)
    assert isinstance(found, JobSpec)
    assert values.decode(found.args[0], {values.type_name(passing.Failure): passing.Failure}) == passing.Failure(  # type: ignore[arg-type]  # plain JSON
        first.id, state, "why", "how"
    )


def test_attack_04_a_job_handed_out_before_its_time_does_not_run(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """Whoever writes the store may claim that a dependency finished: no node's signature, no start."""
    first = paper.app.call(TASK)
    rules: tuple[Literal["refuse", "run"], ...] = ("refuse", "run")
    for failed in rules:
        job = paper.app.call(TASK, [1], after=first, on_failure=failed)
        paper.store.hset(KEYS.job(first.id), mapping={"rf_state": "finished", "status": "finished"})
        assert f"no node that may serve job {first.id}" in refusal(settle(job))
    node.finish(paper.app.call(TASK).id)
    other = paper.app.call(TASK)
    node.finish(other.id)
    found = paper.store.hmget(KEYS.job(other.id), ["rf_outcome", "rf_outcome_sig"])
    # Another job's end, under its node's own signature.
    paper.store.expire(KEYS.job(first.id), 60)
    paper.store.hset(KEYS.job(first.id), mapping=dict(zip(("rf_outcome", "rf_outcome_sig"), found, strict=True)))  # type: ignore[arg-type]  # redis' types
    assert f"no node that may serve job {first.id}" in refusal(settle(job))


def test_attack_03_a_node_of_another_queue_can_not_end_a_job(paper: Fleet, settle: Settle) -> None:
    """The signed envelope of the other job says which lane it is in, whatever its hash says."""
    first = paper.app.call(TASK, queue="ledger")
    job = paper.app.call(TASK, [first.output])
    foreign = paper.node("n2", NodeCard("n2", "0" * 64, "A", 0, queues=("mail",)))
    paper.store.hset(KEYS.job(first.id), "origin", "mail")
    foreign.finish(first.id, value="forged")
    assert f"no node that may serve job {first.id}" in refusal(settle(job))
    mail = paper.app.call(TASK, queue="mail")
    paper.store.hset(KEYS.job(first.id), "data", as_bytes(paper.store.hget(KEYS.job(mail.id), "data")))
    assert f"job {first.id}, which this one waited for, is not signed" in refusal(settle(job))
    pinned = paper.app.call(TASK, node="n1")
    waiting = paper.app.call(TASK, [pinned.output])
    paper.node("n2").finish(pinned.id, value="forged")
    assert f"no node that may serve job {pinned.id}" in refusal(settle(waiting))


def test_attack_20_a_changed_result_is_not_passed_on(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """The stored value must have the hash that its node signed; a lost one is as bad."""
    first = paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output])
    node.finish(first.id, value=1)
    paper.store.xadd(KEYS.results(first.id), {"type": "1", "return_value": base64.b64encode(b"2").decode()})
    assert "is not the one that its node signed" in refusal(settle(job))
    paper.store.delete(KEYS.results(first.id))
    assert "is not the one that its node signed" in refusal(settle(job))


def test_a_job_signed_by_a_key_that_this_node_does_not_trust_proves_nothing(
    paper: Fleet, node: PaperNode, settle: Settle
) -> None:
    """Unknown, revoked, without the right to enqueue, or of another tenant: nothing then says who may speak of it."""
    first = paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output])
    node.finish(first.id, value=1)
    (key,) = trust.load(paper.home.trust).keys
    changes: list[dict[str, object]] = [{"revoked": True}, {"may": ("kill",)}, {"tenants": ("other",)}]
    for change in changes:
        changed: TrustedKey = dataclasses.replace(key, **change)  # type: ignore[arg-type]  # real fields
        assert "is not signed by a key of this node" in refusal(settle(job, trusted={key.id: changed}))
    assert "is not signed by a key of this node" in refusal(settle(job, trusted={}))
    assert isinstance(settle(job), JobSpec)


def test_a_home_without_the_fleets_key_refuses(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """The message names the file to copy; a card of another fleet is no card."""
    first = paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output])
    node.finish(first.id, value=1)
    assert "keys/fleet.pub" in refusal(settle(job, fleet=None))
    assert "no node that may serve" in refusal(settle(job, fleet=Signer(new_private()).public))


def test_results_are_bounded_together(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """A job is passed no more than its own arguments might have held."""
    half = "x" * (passing.MAX_PASSED_BYTES // 2)
    first, second = paper.app.call(TASK), paper.app.call(TASK)
    job = paper.app.call(TASK, [first.output, second.output])
    one = paper.app.call(TASK, [first.output])
    for each in (first, second):
        node.finish(each.id, value=half)
    assert f"more than {passing.MAX_PASSED_BYTES} bytes" in refusal(settle(job))
    assert isinstance(settle(one), JobSpec)
    third = paper.app.call(TASK)
    many = paper.app.call(TASK, [third.output])
    node.finish(third.id, value=[0] * (passing.MAX_PASSED_VALUES + 1))
    assert f"{passing.MAX_PASSED_VALUES} values" in refusal(settle(many))


def test_a_result_too_deep_for_its_place_is_refused(paper: Fleet, node: PaperNode, settle: Settle) -> None:
    """Nesting adds up; what could not be sent is refused before a sandbox is made."""
    value: object = 1
    for _ in range(25):
        value = [value]
    place: object = (first := paper.app.call(TASK)).output
    for _ in range(10):
        place = [place]
    job = paper.app.call(TASK, [place])
    node.finish(first.id, value=value)
    assert "can't stand where the arguments ask for it" in refusal(settle(job))


def test_a_forgotten_job_refuses_those_that_waited(paper: Fleet, settle: Settle) -> None:
    """After its seven days nobody can say any more how it ended."""
    first = paper.app.call(TASK)
    job = paper.app.call(TASK, [1], after=first, on_failure="run")
    paper.store.delete(KEYS.job(first.id))
    assert f"knows no job {first.id} any more" in refusal(settle(job))
    assert connect(paper.app.place).fields(KEYS.job(job.id), ["rf_after"]) == {"rf_after": b"run"}


def test_a_client_is_told_which_job_it_can_not_wait_for(paper: Fleet) -> None:
    """Unknown jobs, those of another tenant, and one that too many wait for; nothing is enqueued then."""
    unknown = ids.new_job_id()
    with pytest.raises(EnqueueError, match=f"nothing was enqueued: no job {unknown} to wait for"):
        paper.app.call(TASK, after=unknown)
    with pytest.raises(UsageError, match="a job waits for other jobs of its own tenant"):
        paper.app.call(TASK, after=[ids.new_job_id("other")])
    with pytest.raises(UsageError, match="a job id is TENANT-ULID"):
        paper.app.call(TASK, after="first")
    assert paper.app.jobs() == []
    first = paper.app.call(TASK)
    paper.store.sadd(KEYS.then(first.id), *(str(number) for number in range(1000)))
    paper.store.expire(KEYS.then(first.id), 60)
    with pytest.raises(EnqueueError, match=f"1,000 jobs wait for job {first.id} already"):
        paper.app.call(TASK, [first.output])
    assert [view.job for view in paper.app.jobs()] == [first.id]
    assert paper.app.call(TASK, after=(), on_failure="run").status().state == "queued"
