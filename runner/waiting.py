"""What of a tenant waits for a person, and the signed words that answer it: calls that policy leaves to somebody, and
budgets that are used up.

Called by app and command line. Must never report a decision as carried out without a receipt of a node for exactly this
command; a word that nobody waits for at the moment is `stored`: the next one who asks gets it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Literal, cast

from runner import orders, results
from runner.client import Client
from runner.errors import JobNotFoundError, UsageError
from runner.orders import STEP_S, Replies
from runner.wire import ids, record
from runner.wire.command import Command, Selector
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.receipt import PauseOutcome, PauseReceipt
from runner.wire.times import iso
from runner.wire.view import WaitView

__all__ = ["answer_ask", "answer_budget", "budget_of", "waiting"]

Op = Literal["approve", "deny"]
#: After the first answer to a word on a budget: how long the other nodes have for theirs, in seconds.
_MORE_S = 1.0


def waiting(client: Client, tenant: str) -> list[WaitView]:
    """Return what waits, what ends first first. Raises StoreError."""
    now_ms = client.now_ms()
    found = []
    for member, until in sorted(client.scores(client.keys.asks(tenant)).items(), key=lambda pair: pair[1]):
        first, _, rest = member.partition(" ")
        if until <= now_ms or not rest:
            continue
        view = _budget(client, tenant, rest, until) if first == "budget" else _ask(client, tenant, first, rest, until)
        if view is not None:
            found.append(view)
    return found


def answer_ask(
    client: Client, op: Op, job_id: str, ask: str | None = None, *, reason: str = "", wait_s: float = 15.0
) -> PauseReceipt:
    """Answer a question of a job: the one ``ask``, or the only one that waits. Raises UsageError, StoreError."""
    job = ids.check_job_id(job_id)
    tenant = ids.tenant_of(job)
    if ask is None:
        asked = [view for view in waiting(client, tenant) if view.job == job]
        if len(asked) != 1:
            hint = (
                "name one with --ask: " + ", ".join(view.ask for view in asked)
                if asked
                else "see `ringfence approvals`"
            )
            raise UsageError(f"{len(asked)} questions of {job} wait for a decision; {hint}")
        ask = asked[0].ask
    command = orders.command(op, Selector("job", job), None, reason=reason, ask=ask)
    names = [client.keys.ask(job), client.keys.asks(tenant), client.keys.due()]
    word, *rest = _written(client, command, names, form="ask", ask=ask, job=job)
    if word != "stored":
        return _local(command, job, "unknown" if word == "unknown" else "refused", _WHY[word])
    how = _fact(rest[0], "how")
    receipts = _heard(client, command, wait_s if how != "requeue" else 0.0, job)
    return receipts[0] if receipts else _local(command, job, "stored", _STORED)


def answer_budget(
    client: Client,
    op: Op,
    tenant: str,
    key: str,
    *,
    add: Mapping[str, float] | None = None,
    reason: str = "",
    wait_s: float = 15.0,
) -> list[PauseReceipt]:
    """Answer for a budget: more of it, or an end of its jobs; one receipt for each job that heard it.

    ``add``: unit → more of it; empty: as much again as was given. Raises UsageError, StoreError.
    """
    chosen = orders.selector("tenant", tenant)
    command = orders.command(op, chosen, None, reason=reason, budget=key, add=dict(add or {}))
    names = [client.keys.budget(tenant, key), client.keys.asks(tenant)]
    word, *_ = _written(client, command, names, form="budget", key=key)
    if word != "stored":
        return [_local(command, "", "unknown" if word == "unknown" else "refused", _WHY[word])]
    return _heard(client, command, wait_s, None) or [_local(command, "", "stored", _STORED)]


def budget_of(client: Client, job_id: str) -> str | None:
    """Return the key of the budget that a job was signed with, None if it has none. Raises JobNotFoundError."""
    spec = results.checked_spec(client, ids.check_job_id(job_id))
    if spec is None:
        raise JobNotFoundError(f"no job {job_id} that a key known here signed")
    return spec.budget.key if spec.budget is not None else None


_STORED = "nobody waits for it at the moment; whoever asks next gets it"
_WHY = {
    "unknown": "nobody asked that, or it was answered long ago; `ringfence approvals` shows what waits",
    "expired": "its time to be decided is over, which is a no",
    "decided": "somebody has decided already; the first word counts",
    "full": "1,000 words were said on this budget; enqueue jobs with another key",
}


def _written(client: Client, command: Command, names: list[str], **more: str) -> list[str]:
    payload = record.dumps(command)
    word = f"{client.signer.sign(Domain.COMMAND, payload)} {payload.decode('utf-8')}"
    document = {"rq": client.keys.rq, "rf": client.keys.rf, "word": word, "command": command.id, **more}
    return orders.words(client.script("decide", names, [json.dumps(document)]))


def _heard(client: Client, command: Command, wait_s: float, job: str | None) -> list[PauseReceipt]:
    """Return the receipts for a command: of the one job, or of all that answer soon after the first."""
    replies = Replies(client, command)
    found: dict[str, PauseReceipt] = {}
    deadline = time.monotonic() + wait_s
    while (left_s := deadline - time.monotonic()) > 0:
        for card, reply in replies.read(min(left_s, STEP_S)):
            if not isinstance(reply, PauseReceipt) or not orders.speaks_for(client, card, reply.job):
                continue
            if job is not None and reply.job == job:
                return [reply]
            if job is None:
                if not found:
                    deadline = min(deadline, time.monotonic() + _MORE_S)
                found[reply.job] = reply
    return list(found.values())


def _ask(client: Client, tenant: str, job: str, ask: str, until: float) -> WaitView | None:
    try:
        if ids.tenant_of(job) != tenant:
            return None
    except WireError:
        return None
    text = client.fields(client.keys.ask(job), [f"a:{ask}"]).get(f"a:{ask}", b"{}").decode("utf-8", "replace")
    facts = {name: _fact(text, name) for name in ("action", "resource", "rule", "why", "how", "node")}
    attempt, asked = _fact(text, "attempt"), _fact(text, "asked_at_ms")
    return WaitView(
        kind="call",
        tenant=tenant,
        until=iso(int(until)),
        job=job,
        attempt=int(attempt) if attempt.isdigit() else 0,
        ask=ask,
        asked_at=iso(int(asked)) if asked.isdigit() else None,
        **facts,
    )


def _budget(client: Client, tenant: str, key: str, until: float) -> WaitView | None:
    table = client.table(client.keys.budget(tenant, key))
    hits = sorted(((name, value) for name, value in table.items() if name.startswith("h:")), key=lambda pair: pair[0])
    if not hits:
        return None
    return WaitView(
        kind="budget", tenant=tenant, until=iso(int(until)), budget=key, why=hits[-1][1].decode("utf-8", "replace")
    )


def _fact(text: str, name: str) -> str:
    """Return one fact of what a node wrote down; the store is never trusted for more than a text."""
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    value = found.get(name, "") if isinstance(found, dict) else ""
    return str(value)[:512]


def _local(command: Command, job: str, outcome: PauseOutcome, reason: str) -> PauseReceipt:
    """What this client knows by itself: not signed."""
    return PauseReceipt(
        job=job,
        command=command.id,
        op=cast("Op", command.op),
        outcome=outcome,
        state="",
        done_at=iso(time.time_ns() // 1_000_000),
        nonce=ids.new_nonce(),
        reason=reason,
        by=command.by,
    )
