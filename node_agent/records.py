"""Port: runner.signing. The node's signed words: outcomes, events and receipts.

Called by the supervisor and control, after the proof. What goes out with a turn is signed together when that turn is
sent (`Page`): one signature for several records costs little more than for one. Must never claim more than the proof:
an unproved kill is ``unconfirmed``, with no count of survivors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final, Protocol

from node_agent.run import KillOrder, Proof, Run, now_ms
from runner import signing
from runner.signing import Signer
from runner.wire import ids, record
from runner.wire.envelope import Domain
from runner.wire.event import Event, EventType
from runner.wire.receipt import Outcome, PauseReceipt, Receipt
from runner.wire.times import iso

__all__ = ["Late", "Notary", "Noted", "Signed", "Witness"]

#: Most records of a turn under one signature: each doubling makes every signature text 43 characters longer.
PAGE_RECORDS: Final = 8


@dataclass(frozen=True, slots=True)
class Signed:
    """Bytes as they travel, and the signature text over them."""

    payload: bytes
    signature: str


class Page:
    """Records that get one signature, when the text of the first of them is asked for."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._records: list[tuple[Domain, bytes]] = []
        self._texts: list[str] = []

    @property
    def full(self) -> bool:
        """Whether nothing more can be added."""
        return bool(self._texts) or len(self._records) >= PAGE_RECORDS

    def add(self, domain: Domain, payload: bytes) -> Late:
        """Add a record; return its signature to come."""
        self._records.append((domain, payload))
        return Late(self, len(self._records) - 1)

    def text(self, number: int) -> str:
        """Return the signature of one record, always the same."""
        if not self._texts:
            self._texts = self._signer.sign_all(self._records)
            self._records.clear()
        return self._texts[number]


class Late:
    """A signature text that is made when it is first asked for."""

    __slots__ = ("_number", "_page")

    def __init__(self, page: Page, number: int) -> None:
        self._page = page
        self._number = number

    def __str__(self) -> str:
        return self._page.text(self._number)


@dataclass(frozen=True, slots=True)
class Noted:
    """Bytes as they travel in a turn, and the signature text over them."""

    payload: bytes
    signature: Late


class Witness(Protocol):
    """Who records what is signed (kernel/witness.py). Each method returns the head of the record that holds it."""

    def event(self, kind: EventType, job: str, attempt: int, detail: dict[str, str | int | float | bool]) -> str:
        """Record an event."""

    def receipt(self, receipt: Receipt) -> str:
        """Record a receipt of a kill."""

    def held(self, run: Run, op: str, holder: str, command: str, by: str, why: str) -> bool:
        """Record a pause or resume before it acts; return whether it is recorded."""

    def failed(self, run: Run) -> tuple[str, ...]:
        """Record the last calls of an attempt that did not end well; return the newest."""


@dataclass(frozen=True, slots=True)
class Notary:
    """Signs for one boot of one node."""

    signer: Signer
    node: str
    boot: str
    level: str
    witness: Witness | None = None
    #: The page that is being filled, as its only item.
    _pages: list[Page] = field(default_factory=list, repr=False, compare=False)

    def outcome(self, outcome: Outcome) -> Noted:
        """Sign, with the turn, how a job ended."""
        return self._noted(Domain.OUTCOME, record.dumps(outcome))

    def turn_event(
        self, kind: EventType, *, job: str, attempt: int, detail: dict[str, str | int | float | bool]
    ) -> Noted:
        """Sign one event of this node, dated now, with the turn that takes it along."""
        return self._noted(Domain.EVENT, self._event(kind, job, attempt, detail))

    def event(
        self, kind: EventType, *, job: str = "", attempt: int = 0, detail: dict[str, str | int | float | bool]
    ) -> Signed:
        """Sign one event of this node, dated now."""
        payload = self._event(kind, job, attempt, detail)
        return Signed(payload, self.signer.sign(Domain.EVENT, payload))

    def receipt(self, run: Run, order: KillOrder, proof: Proof) -> Receipt:
        """Return the signed receipt of one kill order for an attempt that this boot held."""
        verdict, proved = proof.verdict, proof.real
        if not proved:
            outcome = "unconfirmed"
        elif proof.ending.state != "killed":
            outcome = "already_ended"
        else:
            outcome = "killed" if run.started_at_ms is not None else "killed_before_start"
        return self._signed(
            Receipt(
                job=run.job_id,
                command=order.command,
                outcome=outcome,  # type: ignore[arg-type]  # one of the literals above
                state=proof.ending.state if proved else "killing",
                requested_at=iso(order.requested_at_ms),
                done_at=iso(proof.done_at_ms),
                nonce=ids.new_nonce(),
                attempt=run.attempt,
                node=self.node,
                boot=self.boot,
                processes=verdict.usage.processes if verdict is not None else 0,
                survivors=0 if proved else None,
                method=verdict.method if verdict is not None else "none",
                level=self.level,
                kill_ms=round(verdict.kill_ms, 3) if verdict is not None else 0.0,
                total_ms=float(max(0, proof.done_at_ms - order.requested_at_ms)),
                reason=order.reason,
                by=order.by,
                forced=run.forced,
            )
        )

    def answer(self, job_id: str, order: KillOrder, outcome: str, state: str, attempt: int = 0) -> Receipt:
        """Return a signed receipt for a job of which no process runs here (already ended, unknown, never started)."""
        done_at_ms = now_ms()
        return self._signed(
            Receipt(
                job=job_id,
                command=order.command,
                outcome=outcome,  # type: ignore[arg-type]  # callers pass one of the literals
                state=state,
                requested_at=iso(order.requested_at_ms),
                done_at=iso(done_at_ms),
                nonce=ids.new_nonce(),
                attempt=attempt,
                node=self.node,
                boot=self.boot,
                level=self.level,
                total_ms=float(max(0, done_at_ms - order.requested_at_ms)),
                reason=order.reason,
                by=order.by,
            )
        )

    def pause_receipt(
        self,
        job_id: str,
        command: str,
        op: str,
        outcome: str,
        *,
        state: str = "",
        attempt: int = 0,
        processes: int = 0,
        method: str = "none",
        took_ms: float = 0.0,
        reason: str = "",
        by: str = "",
    ) -> PauseReceipt:
        """Return a signed answer to a pause or resume."""
        receipt = PauseReceipt(
            job=job_id,
            command=command,
            op=op,  # type: ignore[arg-type]  # callers pass one of the literals
            outcome=outcome,  # type: ignore[arg-type]  # as above
            state=state,
            done_at=iso(now_ms()),
            nonce=ids.new_nonce(),
            attempt=attempt,
            node=self.node,
            boot=self.boot,
            processes=processes,
            method=method,
            level=self.level,
            took_ms=round(took_ms, 3),
            reason=reason,
            by=by,
        )
        _, signature = signing.signed_receipt(self.signer, receipt)
        return dataclasses.replace(receipt, signer=self.signer.key_id, signature=signature)

    def _event(self, kind: EventType, job: str, attempt: int, detail: dict[str, str | int | float | bool]) -> bytes:
        if self.witness is not None:
            # An end takes the record's head along, so that whoever reads it holds an anchor (attack 31).
            head = self.witness.event(kind, job, attempt, detail)
            detail = {**detail, "flight": head} if kind is EventType.JOB_ENDED else detail
        return record.dumps(Event(kind, now_ms(), job, attempt, self.node, self.boot, detail))

    def _noted(self, domain: Domain, payload: bytes) -> Noted:
        if not self._pages or self._pages[0].full:
            self._pages[:] = [Page(self.signer)]
        return Noted(payload, self._pages[0].add(domain, payload))

    def _signed(self, receipt: Receipt) -> Receipt:
        if self.witness is not None:
            receipt = dataclasses.replace(receipt, flight=self.witness.receipt(receipt))
        _, signature = signing.signed_receipt(self.signer, receipt)
        return dataclasses.replace(receipt, signer=self.signer.key_id, signature=signature)
