"""A yes or no from afar to a secret that a job waits for: one signed command, and the receipt that answers it.

Called by job handles, and so by `ringfence vault approve` and `deny`. Must never report a decision as made without a
receipt for exactly this command, signed by the node that holds the job.
"""

from __future__ import annotations

from typing import Literal

from runner import orders, pausing
from runner.client import Client
from runner.wire import ids
from runner.wire.command import Selector
from runner.wire.receipt import PauseReceipt

__all__ = ["decide"]


def decide(
    client: Client,
    approved: bool,
    job_id: str,
    attempt: int,
    secret: str,
    *,
    reason: str = "",
    wait_s: float = 15.0,
) -> PauseReceipt:
    """Decide for one attempt of a job, and no later one. Raises StoreError, GrammarError, UsageError."""
    chosen, name = Selector("job", ids.check_job_id(job_id)), ids.check_name(secret, "secret")
    op: Literal["approve", "deny"] = "approve" if approved else "deny"
    command = orders.command(op, chosen, None, reason=reason, secret=name, attempt=attempt)
    return pausing.answered(client, command, job_id, wait_s)
