"""Kill from afar: a signed command that can't be lost, and the receipts that answer it.

Called by job handles, app and command line. Must never report a kill as confirmed without a receipt for exactly this
command, signed by a node of the fleet that may serve the job (attack 21), and never treat silence as success.

    entry of rf:rep:COMMAND   {receipt: bytes of a Receipt (signer set, signature empty), sig}
                              {done: bytes of a KillDone, sig}          a node's last word on a selector kill
"""

from __future__ import annotations

import os
import pwd
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast

from runner import results, signing
from runner.client import Client, Entry
from runner.errors import UsageError
from runner.request import parse_tag
from runner.wire import codec, ids, record
from runner.wire.card import NodeCard
from runner.wire.command import COMMAND_TTL_S, Command, Selector
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.receipt import MAX_RECEIPT_BYTES, KillDone, Receipt
from runner.wire.times import iso

__all__ = ["Order", "SelectorKind", "kill_job", "kill_many", "selector"]

SelectorKind = Literal["tag", "tenant", "queue", "node", "task", "secret", "group"]
_Local = Literal["already_ended", "unknown", "unconfirmed"]

#: A tombstone lives as long as any job it may meet: 7 days of not_after, and one more (DESIGN §4).
TOMBSTONE_TTL_S: Final = 8 * 86_400
#: The store is asked for replies in steps of at most this.
_STEP_S: Final = 1.0
_FINAL: Final = frozenset({"killed", "killed_before_start", "already_ended"})
_JOB_FIELDS: Final = ("rf_state", "rf_outcome", "rf_outcome_sig", "rf_claim", "origin", "rf_not_after")


@dataclass(frozen=True, slots=True)
class Order:
    """How to kill. ``grace_s``: from SIGTERM to SIGKILL. ``wait_s``: how long to wait for receipts."""

    reason: str = ""
    grace_s: float = 0.0
    force: bool = False
    wait_s: float = 15.0


def selector(kind: SelectorKind | Literal["all"], name: str = "") -> Selector:
    """Return the selector of that kind; a tag is ``key=value``. Raises UsageError."""
    try:
        if kind == "tag":
            name = "=".join(parse_tag(name))
        if kind == "tenant":
            ids.check_tenant(name)
        return Selector(kind, name)
    except WireError as error:
        raise UsageError(str(error)) from None


def kill_job(client: Client, job_id: str, order: Order) -> Receipt:
    """Kill one job and return the receipt of the node that held it.

    ``unknown``: no such job. ``already_ended``: with the state that its node signed. ``unconfirmed``: no acceptable
    receipt in time; the command stays in force. Raises StoreError, GrammarError, UsageError.
    """
    command = _command(Selector("job", ids.check_job_id(job_id)), order, None)
    keys = client.keys
    spot = [keys.job(job_id), keys.tombstone(job_id), keys.control(), keys.doomed()]
    ttl_s = _tombstone_ttl_s(client, job_id)
    reply = _words(client.script("kill", spot, [_document(client, command, "job", job=job_id, ttl=ttl_s)]))
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
    return _Single(client, command, job_id, named).wait(order.wait_s)


def kill_many(client: Client, chosen: Selector, tenant: str | None, order: Order) -> list[Receipt]:
    """Kill every job that the selector hits and that was enqueued up to now; one receipt per job.

    ``tenant`` keeps the kill to that tenant's jobs. A live node that did not answer in time appears as a receipt
    without job, ``unconfirmed``. Raises StoreError, UsageError.
    """
    if tenant is not None:
        selector("tenant", tenant)
    command = _command(chosen, order, None if tenant is None else (tenant,))
    keys = client.keys
    spot = [keys.seq(), keys.leases(), keys.nodes(), keys.clock(), keys.control(), keys.cutoffs(tenant)]
    reply = client.script("kill", spot, [_document(client, command, "cutoff", field=chosen.field)])
    nodes = _words(cast("list[object]", reply)[1:])
    return _Round(client, command, nodes).wait(order.wait_s)


class _Replies:
    """Reads the replies to one command and passes on those that a node of the fleet really signed."""

    def __init__(self, client: Client, command: Command) -> None:
        self.client = client
        self.command = command
        self._stream = client.keys.replies(command.id)
        self._after = "0"

    def read(self, longest_s: float) -> list[tuple[NodeCard, Receipt | KillDone]]:
        """Return the verified replies that come within ``longest_s``; only receipts for this very command count."""
        entries = self.client.read({self._stream: self._after}, longest_s)
        found = []
        for _, entry in entries:
            self._after = entry.id
            reply = self._verified(entry)
            if reply is not None and reply[1].command == self.command.id and reply[1].node == reply[0].node:
                found.append(reply)
        return found

    def _verified(self, entry: Entry) -> tuple[NodeCard, Receipt | KillDone] | None:
        cls: type[Receipt] | type[KillDone] = Receipt if "receipt" in entry.fields else KillDone
        data = entry.fields.get("receipt", entry.fields.get("done", b""))
        signature = entry.fields.get("sig", b"").decode("ascii", "replace")
        card = self._signer(data, signature)
        if card is None:
            return None
        try:
            reply = record.loads(cls, data, limit_bytes=MAX_RECEIPT_BYTES)
        except WireError:
            return None
        return card, replace(reply, signature=signature) if isinstance(reply, Receipt) else reply

    def _signer(self, data: bytes, signature: str) -> NodeCard | None:
        label = signing.signer_of(signature)
        for fresh in (False, True):
            for card in self.client.cards(fresh=fresh):
                if signing.key_id_of(card.public) == label and signing.verify(
                    card.public, Domain.RECEIPT, data, signature
                ):
                    return card
        return None


class _Single(_Replies):
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
            for card, reply in self.read(min(left_s, _STEP_S)):
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


class _Round(_Replies):
    """The wait for the receipts of a selector kill, from every live node."""

    def __init__(self, client: Client, command: Command, nodes: Sequence[str]) -> None:
        super().__init__(client, command)
        self._heard = {node: _Heard() for node in nodes}

    def wait(self, wait_s: float) -> list[Receipt]:
        """Return all receipts, and an ``unconfirmed`` one for each node with an open end."""
        deadline = time.monotonic() + wait_s
        while not all(heard.complete for heard in self._heard.values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            for card, reply in self.read(min(left_s, _STEP_S)):
                self._take(card, reply)
        found = [receipt for heard in self._heard.values() for receipt in heard.receipts.values()]
        return found + self._missing(wait_s)

    def _take(self, card: NodeCard, reply: Receipt | KillDone) -> None:
        heard = self._heard.setdefault(card.node, _Heard(count=0))
        if isinstance(reply, KillDone):
            heard.count = reply.count
        elif self._serves(card, reply.job):
            heard.receipts[reply.job] = reply

    def _serves(self, card: NodeCard, job_id: str) -> bool:
        try:
            tenant = ids.tenant_of(job_id)
        except WireError:
            return False
        facts = self.client.fields(self.client.keys.job(job_id), ["origin"])
        return results.serves(card, tenant, results.lane_for(self.client, job_id, None, facts))

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
    now_ms = time.time_ns() // 1_000_000
    try:
        return Command(
            id=ids.new_command_id(),
            op="kill",
            selector=chosen,
            issued_at_ms=now_ms,
            expires_at_ms=now_ms + COMMAND_TTL_S * 1000,
            tenants=tenants,
            grace_s=float(order.grace_s),
            force=order.force,
            reason=order.reason,
            by=_operator(),
        )
    except WireError as error:
        raise UsageError(str(error)) from None


def _document(client: Client, command: Command, form: str, **more: str | int) -> bytes:
    payload = record.dumps(command)
    return codec.dump(
        {
            "rq": client.keys.rq,
            "rf": client.keys.rf,
            "form": form,
            "command": payload.decode("utf-8"),
            "sig": client.signer.sign(Domain.COMMAND, payload),
            "id": command.id,
            "by": command.by,
            "reason": command.reason,
            **more,
        }
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


def _operator() -> str:
    """Who orders: account and host, for people; the signature is what counts."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    return f"{name}@{socket.gethostname()}"[:256]


def _words(reply: object) -> list[str]:
    words = reply if isinstance(reply, list) else []
    return [word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word) for word in words]
