"""Port: runner.signing. The node's signed words: outcomes, events and receipts.

Called by the supervisor and control, after the proof. Must never claim more than the proof: an unproved kill is
``unconfirmed``, with no count of survivors.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime

from node_agent.run import KillOrder, Proof, Run, now_ms
from runner import signing
from runner.signing import Signer
from runner.wire import ids, record
from runner.wire.envelope import Domain
from runner.wire.event import Event, EventType
from runner.wire.receipt import Outcome, PauseReceipt, Receipt

__all__ = ["Notary", "Signed", "iso"]


@dataclass(frozen=True, slots=True)
class Signed:
    """Bytes as they travel, and the signature text over them."""

    payload: bytes
    signature: str


@dataclass(frozen=True, slots=True)
class Notary:
    """Signs for one boot of one node."""

    signer: Signer
    node: str
    boot: str
    level: str

    def outcome(self, outcome: Outcome) -> Signed:
        """Sign how a job ended."""
        payload = record.dumps(outcome)
        return Signed(payload, self.signer.sign(Domain.OUTCOME, payload))

    def event(
        self, kind: EventType, *, job: str = "", attempt: int = 0, detail: dict[str, str | int | float | bool]
    ) -> Signed:
        """Sign one event of this node, dated now."""
        event = Event(kind, now_ms(), job=job, attempt=attempt, node=self.node, boot=self.boot, detail=detail)
        payload = record.dumps(event)
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

    def _signed(self, receipt: Receipt) -> Receipt:
        _, signature = signing.signed_receipt(self.signer, receipt)
        return dataclasses.replace(receipt, signer=self.signer.key_id, signature=signature)


def iso(stamp_ms: int) -> str:
    """Return Unix milliseconds as ISO 8601 UTC."""
    return datetime.fromtimestamp(stamp_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
