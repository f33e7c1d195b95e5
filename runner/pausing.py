"""Pause and resume from afar: a signed command for jobs that run now, and the receipts that answer it.

Called by job handles, app, command line and approving. Must never report a job as paused without a receipt for exactly
this command, signed by the node that holds the job (attack 21). Unlike a kill, a pause that nobody answers is over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Literal, cast

from runner import orders
from runner.client import Client
from runner.orders import STEP_S, Replies
from runner.wire import ids
from runner.wire.command import Command, Selector
from runner.wire.receipt import KillDone, PauseReceipt
from runner.wire.times import iso

__all__ = ["answered", "answered_by_all", "pause_job", "pause_many"]

Op = Literal["pause", "resume"]
_Local = Literal["not_running", "already_ended", "unknown", "unconfirmed"]
_KNOWN: Final[dict[str, _Local]] = {"unknown": "unknown", "ended": "already_ended", "waits": "not_running"}


def pause_job(client: Client, op: Op, job_id: str, *, reason: str = "", wait_s: float = 15.0) -> PauseReceipt:
    """Pause or resume one job and return the receipt of the node that runs it. Raises StoreError, GrammarError."""
    command = orders.command(op, Selector("job", ids.check_job_id(job_id)), None, reason=reason)
    return answered(client, command, job_id, wait_s)


def answered(client: Client, command: Command, job_id: str, wait_s: float) -> PauseReceipt:
    """Send a command to the node that holds one job, and return its receipt. Raises StoreError."""
    spot = [client.keys.job(job_id)]
    word, *rest = orders.words(client.script("pause", spot, [orders.document(client, command, "job", job=job_id)]))
    if word in _KNOWN:
        return _local(command, job_id, _KNOWN[word], state=rest[0] if rest else "")
    node = rest[0]
    replies = Replies(client, command)
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        for card, reply in replies.read(min(left_s, STEP_S)):
            fits = isinstance(reply, PauseReceipt) and reply.job == job_id and card.node == node
            if fits and orders.speaks_for(client, card, job_id):
                return cast("PauseReceipt", reply)
    why = f"no receipt from node {node} in {wait_s:g} s; ask again"
    return _local(command, job_id, "unconfirmed", node=node, reason=why)


def pause_many(
    client: Client, op: Op, chosen: Selector, tenant: str | None, *, reason: str = "", wait_s: float = 15.0
) -> list[PauseReceipt]:
    """Pause or resume every job of a selector that runs now; one receipt per job.

    ``tenant`` keeps it to that tenant's jobs. A live node that did not answer in time appears as a receipt without job,
    ``unconfirmed``. Raises StoreError, UsageError.
    """
    if tenant is not None:
        orders.selector("tenant", tenant)
    return answered_by_all(
        client, orders.command(op, chosen, None if tenant is None else (tenant,), reason=reason), wait_s
    )


def answered_by_all(client: Client, command: Command, wait_s: float) -> list[PauseReceipt]:
    """Send a command to every live node, and return the receipts of all jobs that it hit. Raises StoreError."""
    keys = client.keys
    spot = [keys.control(), keys.leases(), keys.nodes(), keys.clock()]
    nodes = orders.words(client.script("pause", spot, [orders.document(client, command, "selector")]))
    return _Round(client, command, nodes).wait(wait_s)


class _Round(Replies):
    """The wait for the receipts of every live node."""

    def __init__(self, client: Client, command: Command, nodes: Sequence[str]) -> None:
        super().__init__(client, command)
        self._counts: dict[str, int | None] = dict.fromkeys(nodes)
        self._found: dict[str, dict[str, PauseReceipt]] = {node: {} for node in nodes}

    def wait(self, wait_s: float) -> list[PauseReceipt]:
        """Return all receipts, and an ``unconfirmed`` one for each node with an open end."""
        deadline = time.monotonic() + wait_s
        while (open_ones := self._open()) and (left_s := deadline - time.monotonic()) > 0:
            for card, reply in self.read(min(left_s, STEP_S)):
                if isinstance(reply, KillDone) and card.node in self._counts:
                    self._counts[card.node] = reply.count
                elif isinstance(reply, PauseReceipt) and orders.speaks_for(self.client, card, reply.job):
                    self._found.setdefault(card.node, {})[reply.job] = reply
        why = f"no complete answer in {wait_s:g} s; ask again"
        missing = [_local(self.command, "", "unconfirmed", node=node, reason=why) for node in open_ones]
        return [receipt for found in self._found.values() for receipt in found.values()] + missing

    def _open(self) -> list[str]:
        return [node for node, count in self._counts.items() if count is None or len(self._found.get(node, {})) < count]


def _local(
    command: Command, job_id: str, outcome: _Local, *, state: str = "", node: str = "", reason: str = ""
) -> PauseReceipt:
    """What this client knows by itself: not signed, and never a confirmed pause."""
    now_ms = time.time_ns() // 1_000_000
    return PauseReceipt(
        job=job_id,
        command=command.id,
        op=cast("Literal['pause', 'resume', 'signal', 'approve', 'deny']", command.op),
        outcome=outcome,
        state=state,
        done_at=iso(now_ms),
        nonce=ids.new_nonce(),
        node=node,
        reason=reason,
        by=command.by,
    )
