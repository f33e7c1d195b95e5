"""Pauses and resumes are taken once, in order, from keys that may give them, for jobs that they reach."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from node_agent.sequences import SLACK_MS, Sequences
from runner import keyring, orders, signing
from runner.home import Home
from runner.job import Job
from runner.signing import Signer
from runner.wire import record
from runner.wire.command import Command, Selector
from runner.wire.envelope import Domain
from tests.support import rig as rigs
from tests.support.rig import Node, Rig
from tests.support.wait import wait_until

NOW_MS = 1_900_000_000_000


def order(sequence: int, selector: str = "tag:a=b", command: str = "") -> Command:
    """Return a pause of that number."""
    kind, _, value = selector.partition(":")
    chosen = Selector(kind, value)  # type: ignore[arg-type]  # tests name real kinds
    return Command(command or secrets.token_hex(8), "pause", chosen, NOW_MS, NOW_MS + 3_600_000, sequence=sequence)


def test_attack_27_an_order_is_taken_once_and_never_after_a_later_one(tmp_path: Path) -> None:
    """Per key and selector: newer is new, the same again is a repeat, older or equal is old, also after a restart."""
    book = Sequences(tmp_path / "book", NOW_MS)
    first, second = order(10), order(11)
    assert book.take("k1", first, NOW_MS) == "new"
    assert book.take("k1", first, NOW_MS) == "repeat"
    assert book.take("k1", second, NOW_MS) == "new"
    assert [book.take("k1", one, NOW_MS) for one in (first, order(11), order(9))] == ["old"] * 3
    assert book.take("k2", first, NOW_MS) == "new", "keys do not disturb each other"
    assert book.take("k1", order(5, "task:m:f x\ny"), NOW_MS) == "new", "nor do selectors"
    book.close()
    again = Sequences(tmp_path / "book", NOW_MS)
    assert [again.take("k1", one, NOW_MS) for one in (first, order(11))] == ["old"] * 2
    assert again.take("k1", order(5, "task:m:f x\ny"), NOW_MS) == "old"
    again.close()
    later = Sequences(tmp_path / "book", NOW_MS + 3_600_000)
    assert later.take("k1", replace(first, expires_at_ms=NOW_MS + 7_200_000), NOW_MS + 3_600_000) == "new"
    later.close()


def test_attack_27_a_clock_far_ahead_can_not_lock_later_orders_out(tmp_path: Path) -> None:
    """A sequence from the future, and an order past its expiry, are refused without being noted."""
    book = Sequences(tmp_path / "book", NOW_MS)
    assert book.take("k1", order((NOW_MS + SLACK_MS + 1) * 1000), NOW_MS) == "old"
    assert book.take("k1", order(7), NOW_MS + 3_600_000) == "old"
    assert book.take("k1", order(7), NOW_MS) == "new"
    book.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store and a home; the test starts the agent."""
    with rigs.rigged(slots=2) as found:
        yield found


def running(rig: Rig) -> tuple[Node, Job[None]]:
    """Start an agent and a job that waits."""
    node = rig.start("one")
    job = rig.command("sh", "-c", "echo up; sleep 60")
    rig.wait_output(job, "up")
    return node, job


def entries(rig: Rig, stream: str) -> list[dict[bytes, bytes]]:
    """Return the entries of a control stream."""
    return [fields for _, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", rig.redis.xrange(stream))]


def deliver(rig: Rig, stream: str, fields: dict[bytes, bytes]) -> None:
    """Write an entry as the store's master can, and wait until the agent has dealt with it."""
    rig.redis.xadd(stream, fields)  # type: ignore[arg-type]  # redis' field type is invariant

    def served() -> bool:
        groups = cast("list[dict[str, object]]", rig.redis.xinfo_groups(stream))
        newest = cast("list[tuple[bytes, object]]", rig.redis.xrevrange(stream, count=1))[0][0]
        return all(group["pending"] == 0 and group["last-delivered-id"] == newest for group in groups)

    wait_until(served, "the agent to have served the entry")


def test_attack_27_replayed_orders_change_nothing(rig: Rig) -> None:
    """The store repeats an old pause and an old resume: the job stays as the operator's last word left it."""
    node, job = running(rig)
    stream = rig.keys.control(node.name)
    assert job.pause().outcome == "paused"
    assert job.resume().outcome == "resumed"
    pause, resume = entries(rig, stream)
    deliver(rig, stream, pause)
    rig.wait_state(job, "running")
    assert job.pause().outcome == "paused"
    deliver(rig, stream, resume)
    rig.wait_state(job, "paused")
    told = [event.type for event in job.events() if event.type in {"job.paused", "job.resumed"}]
    assert told == ["job.paused", "job.resumed", "job.paused"]


def test_attack_27_an_order_in_another_s_place_does_nothing(rig: Rig) -> None:
    """A pause delivered as a kill kills nothing, and a kill delivered as a pause neither."""
    node, job = running(rig)
    stream = rig.keys.control(node.name)
    signer = rig.app.client().signer
    for op, why in (("pause", b"held"), ("pause", b"removed"), ("pause", b"cutoff"), ("kill", b"pause")):
        command = orders.command(op, Selector("job", job.id), None)  # type: ignore[arg-type]  # the literals above
        payload = record.dumps(command)
        fields = {b"command": payload, b"sig": signer.sign(Domain.COMMAND, payload).encode(), b"why": why}
        deliver(rig, stream, {**fields, b"job": job.id.encode()})
        assert rig.state(job) == "running", (op, why)


@pytest.mark.parametrize(
    ("may", "tenants", "acts"),
    [
        (("kill",), ("main",), True),
        (("operate",), ("*",), True),
        (("enqueue",), ("*",), False),
        (("kill", "operate"), ("other",), False),
    ],
)
def test_attack_28_who_may_pause_what(rig: Rig, may: tuple[str, ...], tenants: tuple[str, ...], acts: bool) -> None:
    """A key pauses jobs of its own tenants, with the right to kill or to operate; every selector keeps to that."""
    signer = Signer(signing.new_private())
    keyring.trust(Home(rig.home), signer.public, may=may, tenants=tenants)
    node, job = running(rig)
    for chosen, stream in (
        (Selector("job", job.id), rig.keys.control(node.name)),
        (Selector("all"), rig.keys.control()),
    ):
        command = orders.command("pause", chosen, None)
        payload = record.dumps(command)
        fields = {b"command": payload, b"sig": signer.sign(Domain.COMMAND, payload).encode(), b"why": b"pause"}
        deliver(rig, stream, {**fields, b"job": job.id.encode() if chosen.kind == "job" else b""})
    if acts:
        rig.wait_state(job, "paused")
    else:
        assert rig.state(job) == "running"


def test_an_owner_s_key_does_not_lift_an_operator_s_pause(rig: Rig) -> None:
    """What a key with `operate` paused, a key without it can't let go on; the operator can."""
    owner = Signer(signing.new_private())
    keyring.trust(Home(rig.home), owner.public, may=("kill",), tenants=("main",))
    node, job = running(rig)
    assert job.pause().outcome == "paused"
    command = orders.command("resume", Selector("job", job.id), None)
    payload = record.dumps(command)
    fields = {b"command": payload, b"sig": owner.sign(Domain.COMMAND, payload).encode(), b"why": b"pause"}
    deliver(rig, rig.keys.control(node.name), {**fields, b"job": job.id.encode()})
    answer = cast("list[tuple[bytes, dict[bytes, bytes]]]", rig.redis.xrange(rig.keys.replies(command.id)))[0][1]
    assert b'"outcome":"refused"' in answer[b"paused"]
    rig.wait_state(job, "paused")
    assert job.resume().outcome == "resumed"
