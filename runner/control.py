"""Kill from afar: a signed command that can't be lost, and the receipts that answer it.

Called by job handles, app and command line. Must never report a kill as confirmed without a receipt for exactly this
command, signed by a node of the fleet that may serve the job (attack 21), and never treat silence as success.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast

from runner import orders, results
from runner.client import Client
from runner.orders import STEP_S, Replies, Reply
from runner.wire import ids
from runner.wire.card import NodeCard
from runner.wire.command import Command, Selector
from runner.wire.receipt import KillDone, Receipt
from runner.wire.signals import SignalName
from runner.wire.times import iso

__all__ = ["Order", "kill_job", "kill_many", "kill_tree"]

_Local = Literal["already_ended", "unknown", "unconfirmed"]

#: A tombstone lives as long as any job it may meet: 7 days of not_after, and one more (DESIGN §4).
TOMBSTONE_TTL_S: Final = 8 * 86_400
_FINAL: Final = frozenset({"killed", "killed_before_start", "already_ended"})
_JOB_FIELDS: Final = ("rf_state", "rf_outcome", "rf_outcome_sig", "rf_claim", "origin", "rf_not_after")


@dataclass(frozen=True, slots=True)
class Order:
    """How to kill. ``grace_s``: from SIGTERM to SIGKILL. ``wait_s``: how long to wait for receipts.

    ``signal``: POLICY or TRUST, if that is what the kill is for.
    """

    reason: str = ""
    grace_s: float = 0.0
    force: bool = False
    wait_s: float = 15.0
    signal: SignalName | None = None


def kill_job(client: Client, job_id: str, order: Order) -> Receipt:
    """Kill one job, with all that it started, and return its own receipt, of the node that held it.

    ``unknown``: no such job. ``already_ended``: with the state that its node signed. ``unconfirmed``: no acceptable
    receipt in time; the command stays in force. Raises StoreError, GrammarError, UsageError.
    """
    return kill_tree(client, job_id, order)[0]


def kill_tree(client: Client, job_id: str, order: Order) -> list[Receipt]:
    """Kill one job and every job that it started, and those that these started.

    Returns the job's own receipt first (see `kill_job`), then one for each of the others that had not ended, and an
    ``unconfirmed`` one without job for each live node that did not answer for them. Raises as `kill_job`.
    """
    deadline = time.monotonic() + order.wait_s
    chosen = Selector("job", ids.check_job_id(job_id))
    # Asked first, the connection with it: a command is dated when nothing stands between it and the store.
    ttl_s = _tombstone_ttl_s(client, job_id)
    command = _command(chosen, order, None)
    keys = client.keys
    spot = [keys.job(job_id), keys.tombstone(job_id), keys.control(), keys.doomed()]
    spot += [keys.kids(job_id), keys.leases(), keys.nodes(), keys.clock()]
    reply = orders.words(client.script("kill", spot, [orders.document(client, command, "job", job=job_id, ttl=ttl_s)]))
    own = _own_receipt(client, command, job_id, reply, order.wait_s)
    # A word and its argument, then the nodes that answer for what it started.
    nodes = reply[2:]
    if not nodes:
        return [own]
    below = _Round(client, command, nodes, but=job_id)
    return [own, *below.wait(max(0.0, deadline - time.monotonic()), order.wait_s)]


def _own_receipt(client: Client, command: Command, job_id: str, reply: Sequence[str], wait_s: float) -> Receipt:
    if reply[0] == "unknown":
        return _local(command, job_id, "unknown", "", "the store knows no such job")
    if reply[0] == "ended":
        return _ended(client, command, job_id) or _local(
            command,
            job_id,
            "unconfirmed",
            reply[1],
            "the store says it has ended, but no node that may serve it signed that",
        )
    named = reply[1] if reply[0] == "sent" else ""
    return _Single(client, command, job_id, named).wait(wait_s)


def kill_many(client: Client, chosen: Selector, tenant: str | None, order: Order) -> list[Receipt]:
    """Kill every job that the selector hits and that was enqueued up to now; one receipt per job.

    ``tenant`` keeps the kill to that tenant's jobs. A live node that did not answer in time appears as a receipt
    without job, ``unconfirmed``. Raises StoreError, UsageError.
    """
    if tenant is not None:
        orders.selector("tenant", tenant)
    command = _command(chosen, order, None if tenant is None else (tenant,))
    keys = client.keys
    spot = [keys.seq(), keys.leases(), keys.nodes(), keys.clock(), keys.control(), keys.cutoffs(tenant)]
    reply = client.script("kill", spot, [orders.document(client, command, "cutoff", field=chosen.field)])
    nodes = orders.words(cast("list[object]", reply)[1:])
    return _Round(client, command, nodes).wait(order.wait_s)


class _Single(Replies):
    """The wait for one job's receipt. ``named`` is the node that held the job, empty for a job that waited."""

    def __init__(self, client: Client, command: Command, job_id: str, named: str) -> None:
        super().__init__(client, command)
        self._job_id = job_id
        self._named = named
        self._facts = client.fields(client.keys.job(job_id), _JOB_FIELDS)
        self._lane = results.lane_for(client, job_id, None, self._facts)

    def wait(self, wait_s: float) -> Receipt:
        """Return the first final receipt, else the best that is known after ``wait_s``."""
        deadline = time.monotonic() + wait_s
        weak: Receipt | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            for card, reply in self.read(min(left_s, STEP_S)):
                if isinstance(reply, Receipt) and self._counts(card, reply):
                    if reply.outcome in _FINAL:
                        return reply
                    weak = reply
        if (ended := _ended(self.client, self.command, self._job_id)) is not None:
            return ended
        if weak is not None:
            return weak
        who = f"node {self._named}" if self._named else "any live node"
        why = f"no receipt from {who} in {wait_s:g} s; the kill stays in force, repeat it to see its end"
        return _local(self.command, self._job_id, "unconfirmed", "killing", why, self._named)

    def _counts(self, card: NodeCard, receipt: Receipt) -> bool:
        if receipt.job != self._job_id or not results.serves(card, ids.tenant_of(self._job_id), self._lane):
            return False
        if not self._named or card.node == self._named:
            return True
        # Another node speaks for a job it took over from a lost one; then it also holds, or ended, the job.
        facts = self.client.fields(self.client.keys.job(self._job_id), results.FIELDS)
        outcome = results.outcome_of(self.client, self._job_id, None, facts)
        holder = facts.get("rf_claim", b"").decode("utf-8", "replace").partition("/")[0]
        return card.node == (outcome.node if outcome is not None else holder)


@dataclass(slots=True)
class _Heard:
    """What one node has sent: receipts by job, and how many it says there are."""

    receipts: dict[str, Receipt] = field(default_factory=dict)
    count: int | None = None

    @property
    def complete(self) -> bool:
        return self.count is not None and len(self.receipts) >= self.count


class _Round(Replies):
    """The wait for the receipts of a selector kill, from every live node; ``but`` one job, which has its own wait."""

    def __init__(self, client: Client, command: Command, nodes: Sequence[str], but: str = "") -> None:
        super().__init__(client, command)
        self._but = but
        self._heard = {node: _Heard() for node in nodes}

    def wait(self, wait_s: float, told_s: float | None = None) -> list[Receipt]:
        """Return all receipts, and an ``unconfirmed`` one for each node with an open end.

        ``told_s``: how long the caller has waited in all, if it waited before.
        """
        deadline = time.monotonic() + wait_s
        while not all(heard.complete for heard in self._heard.values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            for card, reply in self.read(min(left_s, STEP_S)):
                self._take(card, reply)
        found = [receipt for heard in self._heard.values() for receipt in heard.receipts.values()]
        return found + self._missing(wait_s if told_s is None else told_s)

    def _take(self, card: NodeCard, reply: Reply) -> None:
        heard = self._heard.setdefault(card.node, _Heard(count=0))
        if isinstance(reply, KillDone):
            heard.count = reply.count
        elif isinstance(reply, Receipt) and reply.job != self._but and orders.speaks_for(self.client, card, reply.job):
            heard.receipts[reply.job] = reply

    def _missing(self, wait_s: float) -> list[Receipt]:
        if not self._heard:
            why = "no live node: the kill is stored and acts as soon as a node starts"
            return [_local(self.command, "", "unconfirmed", "", why)]
        return [
            _local(self.command, "", "unconfirmed", "", f"node {node}: {_open_end(heard)} in {wait_s:g} s", node)
            for node, heard in self._heard.items()
            if not heard.complete
        ]


def _open_end(heard: _Heard) -> str:
    if heard.count is None:
        return "no answer"
    return f"{len(heard.receipts)} acceptable receipts of {heard.count}"


def _ended(client: Client, command: Command, job_id: str) -> Receipt | None:
    """The receipt of a job whose end a node has signed; None while there is none."""
    facts = client.fields(client.keys.job(job_id), results.FIELDS)
    outcome = results.outcome_of(client, job_id, None, facts)
    if outcome is None:
        return None
    found = _local(command, job_id, "already_ended", outcome.state, outcome.reason or "", outcome.node)
    return replace(found, attempt=outcome.attempt, boot=outcome.boot, survivors=0, level=outcome.level)


def _command(chosen: Selector, order: Order, tenants: tuple[str, ...] | None) -> Command:
    return orders.command(
        "kill",
        chosen,
        tenants,
        reason=order.reason,
        grace_s=order.grace_s,
        force=order.force,
        signal=order.signal,
    )


def _tombstone_ttl_s(client: Client, job_id: str) -> int:
    """Until the job's not_after and a day more; the field is a hint, so never less than the usual life."""
    known = client.fields(client.keys.job(job_id), ["rf_not_after"]).get("rf_not_after", b"")
    left_s = (int(known[:15]) - time.time_ns() // 1_000_000) // 1000 + 86_400 if known[:15].isdigit() else 0
    return min(max(left_s, TOMBSTONE_TTL_S), 400 * 86_400)


def _local(command: Command, job_id: str, outcome: _Local, state: str, reason: str, node: str = "") -> Receipt:
    """What this client knows by itself: not signed, and never a confirmed kill."""
    now_ms = time.time_ns() // 1_000_000
    return Receipt(
        job=job_id,
        command=command.id,
        outcome=outcome,
        state=state,
        requested_at=iso(command.issued_at_ms),
        done_at=iso(now_ms),
        nonce=ids.new_nonce(),
        node=node,
        survivors=None,
        total_ms=float(max(0, now_ms - command.issued_at_ms)),
        reason=reason,
        by=command.by,
    )
