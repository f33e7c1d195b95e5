"""Kills from afar: what counts as a receipt, and what never does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from runner import signing
from runner.errors import UsageError
from runner.signing import Signer
from runner.wire import ids, record
from runner.wire.card import NodeCard
from runner.wire.command import Command
from runner.wire.envelope import Domain
from runner.wire.receipt import Receipt
from tests.client.paper import KEYS, Fleet, PaperNode, entries
from tests.support.wait import wait_until

SHORT_S = 0.3


def killing(
    fleet: Fleet, aside: ThreadPoolExecutor, job_id: str, stream: str | None, wait: float = 5.0
) -> tuple[Future[Receipt], Command]:
    """Start a kill in another thread and return it with the command that reached the stream."""
    known = len(fleet.commands(stream))
    call = aside.submit(fleet.app.job(job_id).kill, "looping", 0.0, False, wait)
    found = wait_until(lambda: fleet.commands(stream)[known:], "the command on the stream")
    return call, found[0]


def test_a_running_job_s_node_answers(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """The command is signed for the job, goes to the node that holds it, and its receipt comes back as signed."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    node.claim(job.id)
    call, command = killing(fleet, aside, job.id, "n1")
    (entry,) = entries(fleet.store, KEYS.control("n1"))
    assert signing.verify(fleet.app.client().signer.public, Domain.COMMAND, entry[b"command"], entry[b"sig"].decode())
    assert (command.selector.kind, command.selector.value, command.reason) == ("job", job.id, "looping")
    assert fleet.store.get(KEYS.tombstone(job.id)) is not None
    node.reply(node.receipt(command.id, job.id, processes=7))
    receipt = call.result(5)
    assert (receipt.outcome, receipt.processes, receipt.survivors, receipt.node) == ("killed", 7, 0, "n1")
    assert signing.verify_receipt(node.signer.public, receipt)
    assert not signing.verify_receipt(node.signer.public, replace(receipt, processes=8))


def test_a_waiting_job_is_removed_and_confirmed_by_an_agent(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """A queued job leaves its lane at once, but only an agent's signature makes the kill a fact."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    call, command = killing(fleet, aside, job.id, None)
    assert fleet.store.llen(KEYS.queue("agents")) == 0
    node.reply(node.receipt(command.id, job.id, "killed_before_start"))
    assert call.result(5).outcome == "killed_before_start"
    silent = fleet.app.command(["x"]).kill(wait=SHORT_S)
    assert (silent.outcome, silent.survivors, silent.signature) == ("unconfirmed", None, "")
    assert "any live node" in silent.reason
    fleet.store.persist(KEYS.job(job.id))
    for found in (job.id, silent.job):
        fleet.store.expire(KEYS.job(found), 600)


def test_unknown_and_ended_jobs(fleet: Fleet) -> None:
    """No job is unknown; a signed end is already_ended with its state; an end on the store's word is unconfirmed."""
    node = fleet.node("n1")
    assert fleet.app.job(ids.new_job_id()).kill().outcome == "unknown"
    job = fleet.app.command(["x"])
    node.finish(job.id, value=1)
    receipt = job.kill()
    assert (receipt.outcome, receipt.state, receipt.node) == ("already_ended", "finished", "n1")
    fleet.store.hset(KEYS.job(job.id), "rf_outcome_sig", "")
    assert job.kill().outcome == "unconfirmed"


def test_an_end_that_came_between_is_found(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """A node that ends the job but never answers does not leave the caller in doubt."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    node.claim(job.id)
    call, _ = killing(fleet, aside, job.id, "n1", SHORT_S)
    node.finish(job.id, "killed", reason="kill")
    receipt = call.result(5)
    assert (receipt.outcome, receipt.state) == ("already_ended", "killed")


def other_command(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """A receipt for an earlier command, sent again under this one."""
    node.reply(node.receipt(ids.new_command_id(), job_id), command.id)


def other_job(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """A receipt for another job."""
    node.reply(node.receipt(command.id, ids.new_job_id()))


def other_node(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """A true node that does not hold the job."""
    stranger = fleet.node("n2")
    stranger.reply(stranger.receipt(command.id, job_id))


def other_name(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """A true node in the holder's name."""
    stranger = fleet.node("n2")
    stranger.reply(replace(stranger.receipt(command.id, job_id), node="n1"))


def other_tenant(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """The holder's name with a card for other tenants."""
    stranger = fleet.node("n1", NodeCard("n1", "0" * 64, "A", 0, tenants=("other",)))
    stranger.reply(stranger.receipt(command.id, job_id))


def unsigned(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """The right words without a signature."""
    node.send(command.id, {"receipt": record.dumps(node.receipt(command.id, job_id)), "sig": ""})


def own_key(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """A key that no card names."""
    node.signer = Signer(signing.new_private())
    node.reply(node.receipt(command.id, job_id))


def other_domain(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """The holder's signature over the same bytes, given for an event (attack 26)."""
    body, _ = signing.signed_receipt(node.signer, node.receipt(command.id, job_id))
    node.send(command.id, {"receipt": body, "sig": node.signer.sign(Domain.EVENT, body)})


def changed(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """A signed unconfirmed receipt, edited to killed."""
    body, signature = signing.signed_receipt(node.signer, node.receipt(command.id, job_id, "unconfirmed"))
    node.send(command.id, {"receipt": body.replace(b"unconfirmed", b"killed"), "sig": signature})


def garbage(fleet: Fleet, node: PaperNode, command: Command, job_id: str) -> None:
    """Entries that are no replies at all."""
    for fields in ({"x": "y"}, {"receipt": b"\xff", "sig": b"\xff"}, {"done": "{}", "sig": "0" * 16 + "." + "A" * 86}):
        node.send(command.id, fields)  # type: ignore[arg-type]  # bytes and texts


@pytest.mark.parametrize(
    "forge",
    [
        other_command,
        other_job,
        other_node,
        other_name,
        other_tenant,
        unsigned,
        own_key,
        other_domain,
        changed,
        garbage,
    ],
)
def test_attack_21_a_forged_receipt_confirms_nothing(
    fleet: Fleet, aside: ThreadPoolExecutor, forge: Callable[[Fleet, PaperNode, Command, str], None]
) -> None:
    """A receipt for another command, job or node, or without the holder's signature, leaves the kill unconfirmed."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    node.claim(job.id)
    call, command = killing(fleet, aside, job.id, "n1", SHORT_S)
    forge(fleet, node, command, job.id)
    receipt = call.result(5)
    assert (receipt.outcome, receipt.survivors, receipt.signature) == ("unconfirmed", None, "")
    assert "n1" in receipt.reason


def test_a_node_that_took_the_job_over_may_answer(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """After a recovery the new holder's receipt counts, because the job is in its hands."""
    lost, heir = fleet.node("n1"), fleet.node("n2")
    job = fleet.app.command(["x"])
    lost.claim(job.id)
    call, command = killing(fleet, aside, job.id, "n1")
    heir.claim(job.id, "killing")
    heir.reply(heir.receipt(command.id, job.id))
    assert call.result(5).node == "n2"


def test_an_honest_unconfirmed_is_passed_on(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """A node that can't prove the kill says so, and the caller gets its word if nothing better comes."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    node.claim(job.id)
    call, command = killing(fleet, aside, job.id, "n1", SHORT_S)
    node.reply(node.receipt(command.id, job.id, "unconfirmed", processes=2))
    receipt = call.result(5)
    assert (receipt.outcome, receipt.signer) == ("unconfirmed", node.signer.key_id)


def start_round(
    fleet: Fleet, aside: ThreadPoolExecutor, wait: float = 5.0, **chosen: object
) -> tuple[Future[list[Receipt]], Command]:
    """Start a selector kill in another thread and return it with its command."""
    call = aside.submit(lambda: fleet.app.kill(wait=wait, reason="stop", **chosen))  # type: ignore[arg-type] # by name
    return call, wait_until(lambda: fleet.commands(None), "the command on the stream of all")[-1]


def test_a_selector_kill_hears_every_live_node(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """It ends when each live node has said its last word, and returns all receipts."""
    one, two = fleet.node("n1"), fleet.node("n2")
    one.join()
    two.join()
    jobs = [fleet.app.command(["x"], tags={"team": "acme"}) for _ in range(3)]
    for node, job in zip((one, one, two), jobs, strict=True):
        node.claim(job.id)
    call, command = start_round(fleet, aside, tag="team:acme")
    assert (command.selector.kind, command.selector.value, command.tenants) == ("tag", "team=acme", None)
    two.done(command.id, 1)
    two.reply(two.receipt(command.id, jobs[2].id))
    for job in jobs[:2]:
        one.reply(one.receipt(command.id, job.id))
    one.done(command.id, 2)
    receipts = call.result(5)
    assert {(receipt.job, receipt.outcome) for receipt in receipts} == {(job.id, "killed") for job in jobs}


def test_a_silent_or_short_node_is_named(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """A node without a last word, or with fewer true receipts than it says, is an unconfirmed receipt of its own."""
    one, two, three = (fleet.node(name) for name in ("n1", "n2", "n3"))
    for node in (one, two, three):
        node.join()
    job = fleet.app.command(["x"])
    one.claim(job.id)
    call, command = start_round(fleet, aside, SHORT_S, all=True)
    one.reply(one.receipt(command.id, job.id))
    one.done(command.id, 1)
    two.reply(replace(two.receipt(command.id, ids.new_job_id()), node="n1"))
    two.done(command.id, 1)
    three.send(command.id, {"done": "n3", "n": "0"})
    found = {receipt.node: (receipt.job, receipt.outcome) for receipt in call.result(5)}
    assert found == {"n1": (job.id, "killed"), "n2": ("", "unconfirmed"), "n3": ("", "unconfirmed")}


def test_a_selector_kill_without_live_nodes_is_not_confirmed(fleet: Fleet) -> None:
    """The cutoff is stored, and nobody pretends that it has acted; nodes that have nothing to kill confirm that."""
    receipts = fleet.app.kill(all=True)
    assert [(receipt.job, receipt.outcome) for receipt in receipts] == [("", "unconfirmed")]
    assert b"all" in fleet.store.hkeys(KEYS.cutoffs())


def test_a_tenant_s_kill_stays_in_its_tenant(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """With a tenant, the cutoff lies in that tenant's table and the command names it."""
    node = fleet.node("n1")
    node.join()
    call, command = start_round(fleet, aside, tenant="acme")
    node.done(command.id, 0)
    assert call.result(5) == []
    assert (command.selector.field, command.tenants) == ("tenant:acme", ("acme",))
    assert not fleet.store.exists(KEYS.cutoffs())
    assert b"tenant:acme" in fleet.store.hkeys(KEYS.cutoffs("acme"))


def test_a_kill_needs_exactly_one_selector(fleet: Fleet) -> None:
    """None, two, or a broken one is an error before anything is sent."""
    for chosen in (
        {},
        {"tag": "a=b", "all": True},
        {"tag": "nonsense"},
        {"queue": ""},
        {"tenant": "Bad!", "all": True},
    ):
        with pytest.raises(UsageError, match=r"exactly one|key=value|selector|tenant"):
            fleet.app.kill(wait=0, **chosen)
    with pytest.raises(UsageError, match="grace"):
        fleet.app.command(["x"]).kill(grace=-1)
    assert not fleet.store.exists(KEYS.control())


def test_akill_leaves_the_loop_free(fleet: Fleet) -> None:
    """The async twin waits beside the loop."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    node.claim(job.id)

    async def both() -> str:
        waiting = asyncio.create_task(job.akill(wait=5))
        found = await asyncio.to_thread(wait_until, lambda: fleet.commands("n1"), "the command")
        node.reply(node.receipt(found[0].id, job.id))
        return (await waiting).outcome

    assert asyncio.run(both()) == "killed"
