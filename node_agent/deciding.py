"""A signed yes or no to a secret that a job on this node waits for: checked, handed to the broker, answered.

Called by control, after the command's signature, audience and right were checked. Must never pass a decision on for
another attempt than the one that was signed, or one that was carried out before.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from node_agent.records import Notary
from node_agent.run import Run, now_ms
from node_agent.sequences import Sequences
from node_agent.telling import Desk
from node_agent.vaultdesk import SecretsError, VaultDesk
from node_agent.vaultnews import VaultNews
from runner.wire import ids
from runner.wire.command import Command
from runner.wire.receipt import PauseReceipt

__all__ = ["Decider"]

_Outcome = Literal["approved", "denied", "refused", "not_running"]
_OLD: Final = "a later order of this key came first, or its clock is wrong: look, and order again"
_NO_DESK: Final = "this node gives no job a secret: its isolation level is below B"


class Answers(Desk, Protocol):
    """Where answers go: Mail."""

    def paused(self, receipt: PauseReceipt) -> None:
        """Answer a command."""


class Decider:
    """One boot's. ``vault`` is None where no job gets a secret."""

    def __init__(
        self, notary: Notary, desk: Answers, sequences: Sequences, vault: VaultDesk | None, news: VaultNews
    ) -> None:
        self._notary, self._desk, self._sequences = notary, desk, sequences
        self._vault, self._news = vault, news

    async def decide(self, command: Command, key_id: str, run: Run | None) -> None:
        """Carry out a decision on the job's running attempt and answer it."""
        outcome, reason = await self._outcome(command, key_id, run)
        job = command.selector.value
        op: Literal["approve", "deny"] = "approve" if command.op == "approve" else "deny"
        attempt = 0 if run is None else run.attempt
        self._desk.paused(
            self._notary.pause_receipt(job, command.id, op, outcome, attempt=attempt, reason=reason, by=command.by)
        )

    async def _outcome(self, command: Command, key_id: str, run: Run | None) -> tuple[_Outcome, str]:
        if self._sequences.take(key_id, command, now_ms()) == "old":
            return "refused", _OLD
        if run is None or run.spec is None:
            return "not_running", ""
        if run.attempt != command.attempt:
            return "refused", f"attempt {run.attempt} runs, not {command.attempt}: look at what it asks for, and decide"
        if self._vault is None:
            return "refused", _NO_DESK
        approved, name = command.op == "approve", command.secret or ""
        by = f"{command.by} (key {key_id}, command {command.id})"
        try:
            await self._vault.decide(ids.attempt_name(run.job_id, run.attempt), name, approved=approved, by=by)
        except SecretsError as error:
            return "refused", str(error)
        self._news.decided(run.spec, run.attempt, name, approved=approved, by=command.by)
        return ("approved" if approved else "denied"), ""
