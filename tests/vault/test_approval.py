"""A person's word counts once, for one attempt, from whoever may operate; silence is a no."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import pytest

from broker.vault import approval
from broker.vault.errors import AuditError, VaultUsageError
from broker.vault.leases import Leases
from broker.vault.rules import Ask, parse
from node_agent.admission import Rules
from node_agent.control import judge
from node_agent.deciding import Answers, Decider
from node_agent.records import Notary
from node_agent.run import Run
from node_agent.sequences import Sequences
from node_agent.vaultdesk import SecretsError, VaultDesk
from node_agent.vaultnews import VaultNews
from runner.signing import Signer
from runner.wire import ids, record
from runner.wire.card import TrustedKey
from runner.wire.command import Command, Selector
from runner.wire.envelope import Domain
from runner.wire.errors import RecordError
from runner.wire.receipt import PauseReceipt
from runner.wire.spec import JobSpec
from runner.wire.states import RefuseReason

RULES = """
version = 1
[[allow]]
secrets = ["KEY"]
tenants = ["*"]
tasks = ["*"]
modes = ["get"]
approve = true
ttl_s = 60.0
"""
ASK = Ask("KEY", "get", "main", "agents", task="a:b")
JOB = ids.new_job_id("main")
NAME = ids.attempt_name(JOB, 1)
Right = Literal["enqueue", "kill", "operate"]


def waiting(decided: dict[tuple[str, str], bool] | None = None) -> Leases:
    """Return the leases of a broker with one secret that waits, from second 0 on."""
    leases = Leases(parse(RULES), None, decided)
    assert leases.open(NAME, JOB, [ASK], {"KEY"}, 0.0).lease is not None
    return leases


def code_of(leases: Leases, at_s: float = 1.0) -> str:
    """Return what the job would be told: "" if it gets the value."""
    lease = leases.get(NAME)
    assert lease is not None
    return lease.take("KEY", at_s)[1]


def said(op: str) -> dict[str, object]:
    """Return an order as it comes on a socket."""
    return {"op": op, "attempt": NAME, "name": "KEY", "by": "somebody"}


@pytest.mark.parametrize(("op", "code"), [("approve", ""), ("deny", "denied")])
def test_vault_35_a_word_counts_once(op: str, code: str) -> None:
    """Yes lets it be had, no takes it away; both are recorded, and neither can be said again."""
    leases, lines = waiting(), list[tuple[str, dict[str, object]]]()
    assert code_of(leases) == "pending"
    approval.decide(leases, lambda event, **more: lines.append((event, more)), said(op), 1.0, origin="host")
    assert code_of(leases) == code
    assert [(event, more["by"], more["origin"]) for event, more in lines] == [
        (f"secret.{'approved' if op == 'approve' else 'denied'}", "somebody", "host")
    ]
    for again in ("approve", "deny"):
        with pytest.raises(VaultUsageError):
            approval.decide(leases, lambda event, **more: None, said(again), 2.0, origin="host")


def test_silence_is_a_no() -> None:
    """When its time is over it can't be approved any more, and the job is told that it expired."""
    leases = waiting()
    assert code_of(leases, 61.0) == "expired"
    with pytest.raises(VaultUsageError):
        approval.decide(leases, lambda event, **more: None, said("approve"), 61.0, origin="host")


def test_no_record_no_yes() -> None:
    """A yes that can't be recorded is none."""

    def full(event: str, **more: object) -> None:
        raise AuditError("full")

    leases = waiting()
    with pytest.raises(AuditError):
        approval.decide(leases, full, said("approve"), 1.0, origin="host")
    assert code_of(leases) == "pending"


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((), "pending"),
        (("secret.approved",), ""),
        (("secret.denied",), "denied"),
        (("secret.approved", "lease.ended"), "pending"),
    ],
)
def test_the_next_broker_knows_what_was_said(events: tuple[str, ...], code: str) -> None:
    """A decision is read from the record after a restart, until the attempt is over."""
    lines = [{"event": event, "attempt": NAME, "name": "KEY", "why": "done"} for event in events]
    assert code_of(waiting(approval.decisions(lines))) == code


# the node's side


@dataclass
class Told:
    """Stands for mail, news and the vault desk: keeps what it is told."""

    receipts: list[PauseReceipt] = field(default_factory=list)
    handed: list[tuple[str, str, bool, str]] = field(default_factory=list)
    refusal: SecretsError | None = None

    def paused(self, receipt: PauseReceipt) -> None:
        """Take an answer."""
        self.receipts.append(receipt)

    def decided(self, *_: object, **__: object) -> None:
        """Take news."""

    async def decide(self, attempt: str, name: str, *, approved: bool, by: str) -> None:
        """Take a decision."""
        if self.refusal is not None:
            raise self.refusal
        self.handed.append((attempt, name, approved, by))


def command(op: str = "approve", attempt: int = 1, sequence: int | None = None) -> Command:
    """Return a command of now."""
    now_us = time.time_ns() // 1000
    return Command(
        id=ids.new_command_id(),
        op=op,  # type: ignore[arg-type]  # one of the literals
        selector=Selector("job", JOB),
        issued_at_ms=now_us // 1000,
        expires_at_ms=now_us // 1000 + 60_000,
        sequence=now_us if sequence is None else sequence,
        secret="KEY",
        attempt=attempt,
        by="me",
    )


@pytest.fixture
def decide(tmp_path: Path) -> Iterator[Callable[[Told, Command, int | None], str]]:
    """Have a node with one running attempt decide; returns the receipt's outcome."""
    notary = Notary(Signer(bytes(range(32))), "n1", "abcdef", "B")
    sequences = Sequences(tmp_path / "sequences", 0)

    def decided(told: Told, order: Command, running: int | None = 1) -> str:
        async def work() -> None:
            run = None if running is None else Run(JOB, running, 0, 1, spec=cast("JobSpec", object()))
            desk, news = cast("VaultDesk", told), cast("VaultNews", told)
            await Decider(notary, cast("Answers", told), sequences, desk, news).decide(order, "key", run)

        asyncio.run(work())
        return told.receipts[-1].outcome

    yield decided
    sequences.close()


Decide = Callable[..., str]


def test_a_decision_reaches_the_broker_once(decide: Decide) -> None:
    """It names the attempt, the secret, and who; an older one of the same key does not come after it."""
    told, order = Told(), command()
    assert decide(told, order) == "approved"
    assert told.handed == [(NAME, "KEY", True, f"me (key key, command {order.id})")]
    assert decide(told, command("deny", sequence=order.sequence - 1)) == "refused"
    assert len(told.handed) == 1


@pytest.mark.parametrize(("running", "outcome"), [(2, "refused"), (None, "not_running")])
def test_a_decision_is_for_the_attempt_that_was_signed(decide: Decide, running: int | None, outcome: str) -> None:
    """What was approved for the first attempt, and is sent again, does not open the second's."""
    told = Told()
    assert decide(told, command(), running) == outcome
    assert told.handed == []


def test_what_the_broker_refuses_is_told(decide: Decide) -> None:
    """Nothing waits, or no broker answers: the receipt says refused, and why."""
    told = Told(refusal=SecretsError(RefuseReason.SECRET_DENIED, "nothing waits"))
    assert decide(told, command()) == "refused"
    assert told.receipts[-1].reason == "nothing waits"


@pytest.mark.parametrize(("may", "good"), [(("operate",), True), (("kill", "enqueue"), False)])
def test_only_who_may_operate_decides(may: tuple[Right, ...], good: bool) -> None:
    """A key that may kill and enqueue can't give a job a secret; one that may operate can."""
    signer = Signer(bytes(range(32)))
    key = TrustedKey(signer.key_id, signer.public, may, ("*",), ("*",))
    rules = Rules("n1", {key.id: key}, None, None)  # type: ignore[arg-type]  # not looked at here
    for op in ("approve", "deny"):
        payload = record.dumps(command(op))
        signature = signer.sign(Domain.COMMAND, payload)
        order = record.loads(Command, payload)
        found = judge(order, payload, signature, rules, order.issued_at_ms, expires=True)
        assert (found is not None) == good
        assert judge(order, payload, signature, rules, order.expires_at_ms + 1, expires=True) is None
        assert judge(order, payload + b" ", signature, rules, order.issued_at_ms, expires=True) is None


@pytest.mark.parametrize(
    "change", [{"secret": None}, {"attempt": None}, {"op": "pause"}, {"selector": Selector("all")}]
)
def test_a_decision_is_whole(change: dict[str, object]) -> None:
    """A decision without secret, attempt or job is no command, and nothing else carries them."""
    fields = {name: getattr(command(), name) for name in Command.__slots__}
    with pytest.raises(RecordError):
        Command(**{**fields, **change})
