"""Ends and values are believed only under the signature of a node that may serve the job."""

from __future__ import annotations

import asyncio
import base64
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from runner import keyring, results
from runner.errors import (
    JobExpired,
    JobFailed,
    JobKilled,
    JobLost,
    JobNotFoundError,
    JobRefused,
    ResultExpiredError,
    ResultTimeoutError,
    UnverifiedResultError,
)
from runner.home import Home
from runner.wire import ids, record, values
from runner.wire.card import NodeCard
from runner.wire.envelope import Domain
from runner.wire.event import Event
from tests.client.paper import KEYS, Fleet, PaperNode, as_bytes, now_ms
from tests.support import scratch
from tests.support.wait import wait_until


@dataclass
class Answer:
    """A task's own record."""

    text: str


def card(**facts: object) -> NodeCard:
    """A card with these limits; key and date come later."""
    return NodeCard(**{"node": "n1", "public": "0" * 64, "level": "A", "not_after_ms": 0, **facts})  # type: ignore[arg-type] # by name


def test_a_value_comes_back(fleet: Fleet) -> None:
    """A finished job gives its value; its record class only if the caller names it."""
    node, job = fleet.node("n1"), fleet.app.command(["true"])
    node.claim(job.id)
    node.finish(job.id, value=values.encode([Answer("yes"), 2]))
    assert job.result(timeout=5) == [{"text": "yes"}, 2]
    assert job.result(timeout=0, types=[Answer]) == [Answer("yes"), 2]
    assert fleet.app.job(job.id).result(timeout=0) == [{"text": "yes"}, 2]


def test_waiting_ends_with_the_job(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """result() called before the end returns within milliseconds of it; the store is not polled meanwhile."""
    node, job = fleet.node("n1"), fleet.app.command(["true"])
    waiting = aside.submit(job.result, 10)
    wait_until(lambda: fleet.store.info("clients")["blocked_clients"] == 1, "the call to wait in the store")
    node.claim(job.id)
    before = time.monotonic()
    node.finish(job.id, value=7)
    assert waiting.result(5) == 7
    assert time.monotonic() - before < 0.5


def test_every_end_has_its_error(fleet: Fleet) -> None:
    """Each end without a value raises its own error, with the evidence that the node signed."""
    node = fleet.node("n1")
    for state, error in (
        ("failed", JobFailed),
        ("killed", JobKilled),
        ("refused", JobRefused),
        ("expired", JobExpired),
        ("lost", JobLost),
    ):
        job = fleet.app.command(["true"])
        node.claim(job.id)
        node.finish(job.id, state, reason="exit", exit_code=3, tail="last words", error={"type": "E"})
        with pytest.raises(error, match=r"\(exit\)") as caught:
            job.result(timeout=5)
        assert (caught.value.job, caught.value.reason, caught.value.evidence.tail) == (job.id, "exit", "last words")
    assert job.outcome(timeout=0).exit_code == 3


def test_a_job_that_goes_on_times_out(fleet: Fleet) -> None:
    """No end in time is ResultTimeoutError (a TimeoutError); an unknown id is JobNotFoundError."""
    job = fleet.app.command(["true"])
    with pytest.raises(TimeoutError, match="it goes on"):
        job.result(timeout=0.05)
    with pytest.raises(ResultTimeoutError):
        job.result(timeout=0)
    for call in (lambda found: found.result(timeout=0), lambda found: found.status(), lambda found: list(found.logs())):
        with pytest.raises(JobNotFoundError):
            call(fleet.app.job(ids.new_job_id()))


def test_what_has_expired_is_told_from_what_never_was(fleet: Fleet) -> None:
    """A job that the store once held is ResultExpiredError, by result, status and logs; it is a JobNotFoundError."""
    job = fleet.app.command(["true"])
    fleet.store.delete(KEYS.job(job.id))
    for call in (lambda found: found.result(timeout=0), lambda found: found.status(), lambda found: list(found.logs())):
        with pytest.raises(ResultExpiredError, match="has expired"):
            call(fleet.app.job(job.id))
        with pytest.raises(JobNotFoundError) as caught:
            call(fleet.app.job(ids.new_job_id()))
        assert not isinstance(caught.value, ResultExpiredError)


def forge_state(fleet: Fleet, job_id: str, node: PaperNode) -> None:
    """The store says finished, nobody signed."""
    fleet.store.hset(KEYS.job(job_id), mapping={"rf_state": "finished", "status": "finished"})
    fleet.store.expire(KEYS.job(job_id), 600)


def forge_value(fleet: Fleet, job_id: str, node: PaperNode) -> None:
    """Another value behind a true outcome."""
    node.finish(job_id, value="true")
    fleet.store.xadd(KEYS.results(job_id), {"type": "1", "return_value": base64.b64encode(b'"lie"').decode()})


def forge_outcome(fleet: Fleet, job_id: str, node: PaperNode) -> None:
    """A failure turned into a success after the signature."""
    node.finish(job_id, "failed", reason="exit")
    body = as_bytes(fleet.store.hget(KEYS.job(job_id), "rf_outcome"))
    fleet.store.hset(KEYS.job(job_id), "rf_outcome", body.replace(b"failed", b"finished"))


def forge_job(fleet: Fleet, job_id: str, node: PaperNode) -> None:
    """Another job's outcome."""
    other = fleet.app.command(["true"])
    node.finish(other.id, value=1)
    fleet.store.xadd(KEYS.results(job_id), {"type": "1", "return_value": base64.b64encode(b"1").decode()})
    fleet.store.expire(KEYS.results(job_id), 600)
    names = ["rf_state", "rf_outcome", "rf_outcome_sig"]
    found = fleet.store.hmget(KEYS.job(other.id), names)
    fleet.store.hset(KEYS.job(job_id), mapping=dict(zip(names, found, strict=True)))  # type: ignore[arg-type] # by name


def forge_card(fleet: Fleet, job_id: str, node: PaperNode) -> None:
    """A node whose card another fleet signed."""
    with scratch.folder() as folder:
        keyring.init(Home(folder))
        stranger = PaperNode(Home(folder), fleet.store, "n9")
        stranger.finish(job_id, value=1)


def forge_old_card(fleet: Fleet, job_id: str, node: PaperNode) -> None:
    """A node whose card is no longer published."""
    node.finish(job_id, value=1)
    fleet.store.delete(KEYS.cards())


def forge_node_name(fleet: Fleet, job_id: str, node: PaperNode) -> None:
    """A node that speaks in another node's name."""
    outcome = node.finish(job_id, value=1)
    node.store_end(job_id, replace(outcome, node="n2"), b"1")


@pytest.mark.parametrize(
    "forge",
    [forge_state, forge_value, forge_outcome, forge_job, forge_card, forge_old_card, forge_node_name],
)
def test_attack_20_a_forged_end_is_no_result(fleet: Fleet, forge: object) -> None:
    """Whoever writes the store can't make a result: result() raises, status() says that nothing is verified."""
    node, job = fleet.node("n1"), fleet.app.command(["true"])
    forge(fleet, job.id, node)  # type: ignore[operator] # by name
    for handle in (job, fleet.app.job(job.id)):
        with pytest.raises(UnverifiedResultError):
            handle.result(timeout=5)
        assert handle.status().result is None


@pytest.mark.parametrize(
    ("facts", "options"),
    [
        ({"tenants": ("other",)}, {}),
        ({"queues": ("cheap",)}, {}),
        ({}, {"node": "n2"}),
        ({}, {"labels": {"zone": "b"}}),
        ({"labels": {"zone": "a"}}, {"labels": {"zone": "b"}}),
        ({"level": "B"}, {"min_level": "A"}),
    ],
)
def test_attack_03_a_node_that_may_not_serve_the_job_signs_nothing(
    fleet: Fleet, facts: dict[str, object], options: dict[str, object]
) -> None:
    """A true node of the fleet that pops a foreign lane by hand produces no result, whatever the lane's name says."""
    node = fleet.node("n1", card(**facts))
    job = fleet.app.command(["true"], **options)  # type: ignore[arg-type] # by name
    node.finish(job.id, value=1)
    fleet.store.hset(KEYS.job(job.id), "origin", "cheap")
    for handle in (job, fleet.app.job(job.id)):
        with pytest.raises(UnverifiedResultError):
            handle.result(timeout=5)


def test_a_node_that_meets_every_requirement_counts(fleet: Fleet) -> None:
    """The same requirements, met by the card."""
    node = fleet.node("n1", card(tenants=("main",), queues=("q",), labels={"zone": "b", "gpu": "no"}))
    job = fleet.app.command(["true"], queue="q", node="n1", labels={"zone": "b"}, min_level="A")
    node.finish(job.id, value=1)
    assert job.result(timeout=5) == 1
    view = job.status()
    assert (view.state, view.verified, view.result, view.node) == ("finished", True, 1, "n1")


def test_async_twins(fleet: Fleet) -> None:
    """aresult, astatus and alogs do not hold the loop, and a wait can be cancelled."""
    node, job = fleet.node("n1"), fleet.app.job(fleet.app.command(["true"]).id)
    other = fleet.app.command(["true"])
    fleet.store.xadd(KEYS.log(job.id), {"f": "1", "o": "0", "d": b"out"})
    fleet.store.expire(KEYS.log(job.id), 600)

    async def all_of_them() -> tuple[object, str, list[tuple[int, bytes]]]:
        value = asyncio.create_task(job.aresult(timeout=10))
        await asyncio.sleep(0)
        await asyncio.to_thread(node.finish, job.id, value=5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other.aresult(), 0.05)
        parts = [part async for part in job.alogs(follow=True)]
        return await value, (await job.astatus()).state, parts

    assert asyncio.run(all_of_them()) == (5, "finished", [(1, b"out")])


def test_logs_are_followed_until_the_end(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """Output comes live and in order, a cut is marked, and the end of the job ends the reading at once."""
    node, job = fleet.node("n1"), fleet.app.command(["true"])
    key = KEYS.log(job.id)
    node.claim(job.id)
    live = iter(job.logs(follow=True))
    for number, data in ((1, b"one"), (2, b"two")):
        waiting = aside.submit(next, live)
        fleet.store.xadd(key, {"f": number, "o": 0, "d": data})
        fleet.store.expire(key, 600)
        assert waiting.result(5) == (number, data)
    rest = aside.submit(list, live)
    fleet.store.xadd(key, {"f": 0, "o": 0, "d": b"", "skipped": 77})
    fleet.store.xadd(key, {"f": 1, "o": 0, "d": b"three"})
    before = time.monotonic()
    node.finish(job.id, value=None)
    assert rest.result(5) == [(0, b"[77 bytes of output were not kept]"), (1, b"three")]
    assert time.monotonic() - before < 0.5
    assert [part for _, part in job.logs()][:2] == [b"one", b"two"]


def test_one_read_of_the_fields_serves_a_wait(fleet: Fleet) -> None:
    """The end of a job that has ended costs a bounded number of round trips (no polling)."""
    node, job = fleet.node("n1"), fleet.app.command(["true"])
    node.finish(job.id, value=1)
    before = fleet.store.info("stats")["total_commands_processed"]
    assert results.wait(fleet.app.client(), job.id, None, 0).value == b"1"
    assert fleet.store.info("stats")["total_commands_processed"] - before < 20


def test_events_are_signed_or_the_store_s_own(fleet: Fleet) -> None:
    """A job's events come in order; an unsigned end, or one signed by a stranger, is not among them."""
    node, job = fleet.node("n1"), fleet.app.command(["true"])
    fleet.app.command(["other"])

    def write(kind: str, signer: PaperNode | None, name: str = "n1") -> None:
        event = Event(kind, now_ms(), job=job.id, attempt=1, node=name)
        body = record.dumps(event)
        signature = signer.signer.sign(Domain.EVENT, body) if signer else ""
        fleet.store.xadd(KEYS.events("main"), {"event": body, "sig": signature})

    write("job.ended", None)
    write("job.started", node)
    write("job.started", None)
    write("job.retried", None)
    write("node.down", None)
    write("job.ended", node, "n2")
    write("job.ended", node)
    seen = [(event.type, event.verified) for event in job.events(follow=True)]
    assert seen == [("job.queued", False), ("job.started", True), ("job.ended", True)]
    types = [event.type for event in fleet.app.events()]
    assert types == ["job.queued", "job.queued", "job.started", "job.ended"]
