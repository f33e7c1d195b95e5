"""A suspended queue waits, and nothing else does; who may not operate is refused; no old order comes back (A-F05)."""

from __future__ import annotations

import json
import subprocess
from typing import Any, cast

import pytest

from runner import operating
from runner.signing import Signer
from tests.operate.keys import KILLER, TENANT, client_of
from tests.support.fleet import CLI
from tests.support.rig import Rig
from tests.support.wait import wait_until


def test_a_suspended_queue_waits_and_the_others_do_not(pair: Rig) -> None:
    """Every node confirms; its jobs wait, of any priority, say why and can be killed; unsuspended they run."""
    receipts = pair.app.suspend("slow", reason="their database is away")
    assert {(one.node, one.outcome) for one in receipts} == {(node.name, "done") for node in pair.nodes.values()}
    waiting = [pair.command("true", queue="slow"), pair.command("true", queue="slow", priority=500)]
    for _ in range(3):
        assert pair.command("true").outcome(20).state == "finished"
    assert [pair.state(job) for job in waiting] == ["queued", "queued"]
    assert "suspended" in (waiting[0].status().waiting or "")
    assert waiting[1].kill(wait=20).outcome == "killed_before_start"
    assert {one.outcome for one in pair.app.unsuspend("slow")} == {"done"}
    assert waiting[0].outcome(20).state == "finished"


@pytest.mark.parametrize("signer", [KILLER, TENANT])
def test_who_may_not_operate_changes_nothing(pair: Rig, signer: Signer) -> None:
    """A key without the right, and one of a tenant alone (attack 28), neither drain nor suspend: jobs run on."""
    node = pair.nodes["a"].name
    with client_of(pair, signer) as client:
        wait_s = 0.3 if signer is KILLER else 10
        drained = operating.drain(client, node, wait_s=wait_s)
        held = operating.suspend(client, "agents", wait_s=wait_s)
    outcomes = {drained.outcome, *(one.outcome for one in held)}
    assert outcomes == ({"unconfirmed"} if signer is KILLER else {"refused"})
    assert pair.command("true", node=node).outcome(20).state == "finished"
    pair.redis.delete(pair.keys.suspended())


def test_attack_20_an_entry_that_nobody_signed_suspends_nothing(pair: Rig) -> None:
    """Who can write the store can hide work in other ways, but not make agents believe that an operator did."""
    pair.redis.hset(pair.keys.suspended(), "agents", "sig {}")
    pair.app.suspend("other")
    assert pair.command("true").outcome(20).state == "finished"
    pair.app.unsuspend("other")
    pair.redis.delete(pair.keys.suspended())


def test_attack_27_a_repeated_drain_does_not_come_back(pair: Rig) -> None:
    """The very entry of a drain, added again after the undrain, is answered and not carried out."""
    node = pair.nodes["a"].name
    stream = pair.keys.control(node)
    pair.app.drain(node)
    (first, *_) = cast("list[Any]", pair.redis.xrevrange(stream, count=1))
    pair.app.undrain(node)
    again = cast("bytes", pair.redis.xadd(stream, first[1]))
    acked = f"the entry {again.decode()} to be served"
    wait_until(lambda: pair.redis.xinfo_groups(stream)[0]["last-delivered-id"] == again, acked, 5)
    assert pair.command("true", node=node).outcome(20).state == "finished"


def test_a_node_that_is_not_there_is_told_from_one_that_is_silent(pair: Rig) -> None:
    """Unknown and away are answered by the store's word, and never as done."""
    with client_of(pair, KILLER) as client:
        assert operating.drain(client, "nobody", wait_s=1).outcome == "unknown"


def test_the_commands_say_what_the_nodes_said(pair: Rig) -> None:
    """drain, undrain and suspend print one receipt a node; 0 is a confirmed order."""
    node = pair.nodes["b"].name
    done = command(pair, "drain", node, "--json")
    (receipt,) = json.loads(done.stdout)
    assert (done.returncode, receipt["state"], receipt["node"]) == (0, "drained", node), done.stderr
    assert command(pair, "undrain", node).returncode == 0


def command(rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one command of Ringfence on the rig's home."""
    full = [*CLI, "--home", str(rig.home), *words]
    return subprocess.run(full, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
