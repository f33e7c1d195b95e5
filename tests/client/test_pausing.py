"""Pauses from afar: what counts as an answer, and that nobody's silence does."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import pytest

from runner import signing
from runner.errors import UsageError
from runner.wire import ids, record
from runner.wire.command import Command
from runner.wire.envelope import Domain
from runner.wire.receipt import KillDone, PauseReceipt
from runner.wire.times import iso
from tests.client.paper import KEYS, Fleet, PaperNode, entries, now_ms
from tests.support.wait import wait_until

SHORT_S = 0.3


def answer(
    node: PaperNode, command: Command, job: str, outcome: Literal["paused", "resumed"] = "paused", *, to: str = ""
) -> None:
    """Send a signed answer of a node."""
    receipt = PauseReceipt(
        job=job,
        command=command.id,
        op="pause",
        outcome=outcome,
        state="paused",
        done_at=iso(now_ms()),
        nonce=ids.new_nonce(),
        node=node.name,
        processes=3,
    )
    body, signature = signing.signed_receipt(node.signer, receipt)
    node.send(to or command.id, {"paused": body, "sig": signature})


def pausing(
    fleet: Fleet, aside: ThreadPoolExecutor, job: str, wait: float = 5.0
) -> tuple[Future[PauseReceipt], Command]:
    """Start a pause in another thread; return it with the command that reached the node."""
    call = aside.submit(fleet.app.job(job).pause, "look", wait)
    return call, wait_until(lambda: fleet.commands("n1"), "the command")[0]


def test_the_node_that_holds_the_job_answers(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """The command is signed, has a sequence and its place; the answer comes back as signed, and verifies alone."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    node.claim(job.id)
    call, command = pausing(fleet, aside, job.id)
    (entry,) = entries(fleet.store, KEYS.control("n1"))
    assert entry[b"why"] == b"pause"
    assert signing.verify(fleet.app.client().signer.public, Domain.COMMAND, entry[b"command"], entry[b"sig"].decode())
    assert (command.op, command.selector.value, command.sequence > 0) == ("pause", job.id, True)
    answer(node, command, job.id)
    receipt = call.result(5)
    assert (receipt.outcome, receipt.processes, receipt.node) == ("paused", 3, "n1")
    assert signing.verify_receipt(node.signer.public, receipt)
    assert fleet.store.get(KEYS.tombstone(job.id)) is None, "a pause leaves no mark behind"


def test_what_does_not_run_is_told_without_asking_a_node(fleet: Fleet) -> None:
    """Unknown, waiting and ended jobs have their own outcome, and no command goes out."""
    node = fleet.node("n1")
    assert fleet.app.job(ids.new_job_id()).pause().outcome == "unknown"
    job = fleet.app.command(["x"])
    assert (job.pause().outcome, job.resume().outcome) == ("not_running", "not_running")
    node.finish(job.id)
    assert (job.pause().outcome, job.pause().signature) == ("already_ended", "")
    assert fleet.commands("n1") == []


@pytest.mark.parametrize("forge", ["other command", "other job", "other node", "unsigned", "as a kill's receipt"])
def test_attack_21_a_forged_answer_pauses_nothing(fleet: Fleet, aside: ThreadPoolExecutor, forge: str) -> None:
    """Only a PauseReceipt for this command and job, signed by its holder, counts; all else is unconfirmed."""
    node, job = fleet.node("n1"), fleet.app.command(["x"])
    node.claim(job.id)
    call, command = pausing(fleet, aside, job.id, SHORT_S)
    if forge == "other command":
        answer(node, fleet_command(command), job.id, to=command.id)
    elif forge == "other job":
        answer(node, command, ids.new_job_id())
    elif forge == "other node":
        answer(fleet.node("n2"), command, job.id)
    elif forge == "unsigned":
        node.send(command.id, {"paused": b"{}", "sig": ""})
    else:
        node.reply(node.receipt(command.id, job.id))
    receipt = call.result(5)
    assert (receipt.outcome, receipt.signature) == ("unconfirmed", "")
    assert "n1" in receipt.reason


def fleet_command(command: Command) -> Command:
    """Return another command like this one."""
    return record.loads(Command, record.dumps(command).replace(command.id.encode(), ids.new_command_id().encode()))


def test_a_selector_waits_for_every_live_node(fleet: Fleet, aside: ThreadPoolExecutor) -> None:
    """All receipts that each node counted; a silent one is named as unconfirmed."""
    first, second = fleet.node("n1"), fleet.node("n2")
    for node in (first, second):
        node.join()
    job = fleet.app.command(["x"])
    first.claim(job.id)
    call = aside.submit(lambda: fleet.app.pause(all=True, wait=1.0))
    command = wait_until(lambda: fleet.commands(None), "the command")[-1]
    answer(first, command, job.id)
    body = record.dumps(KillDone(command.id, "n1", first.boot, 1))
    first.send(command.id, {"done": body, "sig": first.signer.sign(Domain.RECEIPT, body)})
    found = call.result(5)
    assert sorted((one.job, one.outcome, one.node) for one in found) == [
        ("", "unconfirmed", "n2"),
        (job.id, "paused", "n1"),
    ]


def test_one_selector_is_needed(fleet: Fleet) -> None:
    """None or two are an error before anything is sent."""
    with pytest.raises(UsageError, match="pause takes exactly one"):
        fleet.app.pause()
    with pytest.raises(UsageError, match="resume takes exactly one"):
        fleet.app.resume(tag="a=b", all=True)
    assert fleet.commands(None) == []
