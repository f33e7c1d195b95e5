"""Signed commands to nodes: how one is made, and how the replies to it are read.

Called by control (kills) and pausing. Must never pass on a reply that was not signed, for exactly this command, by a
node of the fleet in its own name (attack 21).

    entry of rf:rep:COMMAND   {receipt: bytes of a Receipt, sig}   {paused: bytes of a PauseReceipt, sig}
                              (signer set, signature empty)
    {operated: bytes of a NodeReceipt, sig}                          the same
                              {done: bytes of a KillDone, sig}     a node's last word on a selector
"""

from __future__ import annotations

import os
import pwd
import socket
import time
from dataclasses import replace
from typing import Final, Literal

from runner import results, signing
from runner.client import Client, Entry
from runner.errors import UsageError
from runner.request import parse_tag
from runner.wire import codec, ids, record
from runner.wire.card import NodeCard
from runner.wire.command import COMMAND_TTL_S, Command, Selector
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.receipt import MAX_RECEIPT_BYTES, KillDone, NodeReceipt, PauseReceipt, Receipt
from runner.wire.signals import SignalName

__all__ = ["STEP_S", "Replies", "Reply", "SelectorKind", "command", "document", "selector", "speaks_for", "words"]

SelectorKind = Literal["tag", "tenant", "queue", "node", "task", "secret", "group"]
Reply = Receipt | PauseReceipt | NodeReceipt | KillDone

#: The store is asked for replies in steps of at most this.
STEP_S: Final = 1.0
_FORMS: Final[dict[str, type[Receipt] | type[PauseReceipt] | type[NodeReceipt] | type[KillDone]]] = {
    "receipt": Receipt,
    "paused": PauseReceipt,
    "operated": NodeReceipt,
    "done": KillDone,
}


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


def command(
    op: Literal["kill", "pause", "resume", "signal", "approve", "deny", "drain", "undrain", "suspend", "unsuspend"],
    chosen: Selector,
    tenants: tuple[str, ...] | None,
    *,
    reason: str = "",
    grace_s: float = 0.0,
    force: bool = False,
    secret: str | None = None,
    attempt: int | None = None,
    checkpoint_s: float = 0.0,
    ask: str | None = None,
    budget: str | None = None,
    add: dict[str, float] | None = None,
    signal: SignalName | None = None,
) -> Command:
    """Return a command of now. Raises UsageError."""
    now_us = time.time_ns() // 1000
    try:
        return Command(
            id=ids.new_command_id(),
            op=op,
            selector=chosen,
            issued_at_ms=now_us // 1000,
            expires_at_ms=now_us // 1000 + COMMAND_TTL_S * 1000,
            tenants=tenants,
            grace_s=float(grace_s),
            force=force,
            reason=reason,
            by=_operator(),
            sequence=0 if op == "kill" else now_us,
            secret=secret,
            attempt=attempt,
            checkpoint_s=float(checkpoint_s),
            ask=ask,
            budget=budget,
            add=add or {},
            signal=signal,
        )
    except WireError as error:
        raise UsageError(str(error)) from None


def document(client: Client, order: Command, form: str, **more: str | int) -> bytes:
    """Return the first argument of kill.lua and pause.lua: the signed command, and what the script needs to know."""
    payload = record.dumps(order)
    return codec.dump(
        {
            "rq": client.keys.rq,
            "rf": client.keys.rf,
            "form": form,
            "command": payload.decode("utf-8"),
            "sig": client.signer.sign(Domain.COMMAND, payload),
            "id": order.id,
            "by": order.by,
            "reason": order.reason,
            **more,
        }
    )


def words(reply: object) -> list[str]:
    """Return a script's reply as texts."""
    found = reply if isinstance(reply, list) else []
    return [word.decode("utf-8", "replace") if isinstance(word, bytes) else str(word) for word in found]


def speaks_for(client: Client, card: NodeCard, job_id: str) -> bool:
    """Return whether a node may serve the job's tenant and lane, and so may speak of it."""
    try:
        tenant = ids.tenant_of(job_id)
    except WireError:
        return False
    facts = client.fields(client.keys.job(job_id), ["origin"])
    return results.serves(card, tenant, results.lane_for(client, job_id, None, facts))


class Replies:
    """Reads the replies to one command and passes on those that a node of the fleet really signed."""

    def __init__(self, client: Client, order: Command) -> None:
        self.client = client
        self.command = order
        self._stream = client.keys.replies(order.id)
        self._after = "0"

    def read(self, longest_s: float) -> list[tuple[NodeCard, Reply]]:
        """Return the verified replies that come within ``longest_s``; only those to this very command count."""
        entries = self.client.read({self._stream: self._after}, longest_s)
        found = []
        for _, entry in entries:
            self._after = entry.id
            reply = self._verified(entry)
            if reply is not None and reply[1].command == self.command.id and reply[1].node == reply[0].node:
                found.append(reply)
        return found

    def _verified(self, entry: Entry) -> tuple[NodeCard, Reply] | None:
        form = next((name for name in _FORMS if name in entry.fields), "receipt")
        data = entry.fields.get(form, b"")
        signature = entry.fields.get("sig", b"").decode("ascii", "replace")
        card = self._signer(data, signature)
        if card is None:
            return None
        try:
            reply = record.loads(_FORMS[form], data, limit_bytes=MAX_RECEIPT_BYTES)
        except WireError:
            return None
        return card, reply if isinstance(reply, KillDone) else replace(reply, signature=signature)

    def _signer(self, data: bytes, signature: str) -> NodeCard | None:
        label = signing.signer_of(signature)
        for fresh in (False, True):
            for card in self.client.cards(fresh=fresh):
                if signing.key_id_of(card.public) == label and signing.verify(
                    card.public, Domain.RECEIPT, data, signature
                ):
                    return card
        return None


def _operator() -> str:
    """Who orders: account and host, for people; the signature is what counts."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = f"uid {uid}"
    return f"{name}@{socket.gethostname()}"[:256]
