"""What of a tenant waits for a person, and the signed words that answer it: calls that policy leaves to somebody, and
budgets that are used up.

Called by app and command line. Must never report a decision as carried out without a receipt of a node for exactly this
command; a word that nobody waits for at the moment is `stored`: the next one who asks gets it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, cast

from runner import orders, results, signing, trust
from runner.client import Client
from runner.errors import JobNotFoundError, UsageError
from runner.limits import units_of
from runner.orders import STEP_S, Replies
from runner.wire import ids, record
from runner.wire import spec as specs
from runner.wire.command import Command, Selector
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.receipt import PauseOutcome, PauseReceipt
from runner.wire.states import END_STATES
from runner.wire.times import iso
from runner.wire.view import WaitView

__all__ = ["answer_ask", "answer_budget", "budget_of", "held_by", "waiting"]

Op = Literal["approve", "deny"]
#: After the first answer to a word on a budget: how long the other nodes have for theirs, in seconds.
_MORE_S = 1.0


def waiting(client: Client, tenant: str, job: str | None = None) -> list[WaitView]:
    """Return what waits, what ends first first; ``job``: what it asked, and all budgets. Raises StoreError.

    What a job asked that has ended since waits for nobody.
    """
    now_ms = client.now_ms()
    members = client.scores(client.keys.asks(tenant))
    ended = _ended(client, {member.partition(" ")[0] for member in members}, tenant)
    found = []
    for member, until in sorted(members.items(), key=lambda pair: pair[1]):
        first, _, rest = member.partition(" ")
        if until <= now_ms or not rest or first in ended or (job not in {None, first} and first != "budget"):
            continue
        view = _budget(client, tenant, rest, until) if first == "budget" else _ask(client, tenant, first, rest, until)
        if view is not None:
            found.append(view)
    return found


def _ended(client: Client, jobs: Collection[str], tenant: str) -> dict[str, str]:
    """Return those of the jobs of a tenant that have ended, with their states, by the store's word."""
    known = [job for job in jobs if _is_of(job, tenant)]
    rows = client.many_fields([client.keys.job(job) for job in known], ["rf_state"]) if known else []
    states = [row.get("rf_state", b"").decode("utf-8", "replace") for row in rows]
    return {job: state for job, state in zip(known, states, strict=True) if state in END_STATES}


def _is_of(job: str, tenant: str) -> bool:
    try:
        return ids.tenant_of(job) == tenant
    except WireError:
        return False


def held_by(client: Client, job_id: str) -> str | None:
    """Say which decision a job stands still for, and how it is made; None: for none that waits. Raises StoreError."""
    views = waiting(client, ids.tenant_of(job_id), job_id)
    for view in views:
        if view.job == job_id:
            what = f"{view.action} {view.resource}".rstrip()
            how = f"`ringfence approve {job_id}` or `deny`"
            return f"a person decides on {what}, a no at {view.until}: {how}"
    budgets = {view.budget: view for view in views if view.budget is not None}
    spec = results.checked_spec(client, job_id) if budgets else None
    budget = spec.budget.key if spec is not None and spec.budget is not None else None
    if budget in budgets:
        how = f"`ringfence approve --budget {budget}` or `deny`"
        return f"its budget {budget} is used up ({budgets[budget].why}): {how}"
    return None


def answer_ask(
    client: Client, op: Op, job_id: str, ask: str | None = None, *, reason: str = "", wait_s: float = 15.0
) -> PauseReceipt:
    """Answer a question of a job: the one ``ask``, or the only one that waits. Raises UsageError, StoreError."""
    job = ids.check_job_id(job_id)
    tenant = ids.tenant_of(job)
    if state := _ended(client, {job}, tenant).get(job):
        command = orders.command(op, Selector("job", job), None, reason=reason, ask=ask or "none")
        return replace(_local(command, job, "already_ended", "what it asked waits for nobody"), state=state)
    if ask is None:
        asked = [view for view in waiting(client, tenant) if view.job == job]
        if len(asked) > 1:
            which = ", ".join(view.ask for view in asked)
            raise UsageError(f"{len(asked)} questions of {job} wait for a decision; name one with --ask: {which}")
        if not asked:
            command = orders.command(op, Selector("job", job), None, reason=reason, ask="none")
            return _local(command, job, "unknown", _WHY["unknown"])
        ask = asked[0].ask
    if op == "approve" and client.fields(client.keys.ask(job), [f"a:{ask}"]) and _asked(client, job, ask) is None:
        raise UsageError(f"question {ask} of {job}: {_UNSIGNED}")
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
    command = orders.command(op, chosen, None, reason=reason, budget=key, add=units_of(add or {}))
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


_MOST_TEXT = 20_480
_UNSIGNED = "no node that may serve the job has signed what is asked here; deny it, and find out who writes the store"
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
    text = _asked(client, job, ask) or json.dumps({"why": _UNSIGNED})
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


def _asked(client: Client, job: str, ask: str) -> str | None:
    """Return what a node of the fleet wrote down of this very question; None: none that may serve the job did."""
    found = client.fields(client.keys.ask(job), [f"a:{ask}", f"s:{ask}"])
    data, signature = found.get(f"a:{ask}", b""), found.get(f"s:{ask}", b"").decode("ascii", "replace")
    text = data[:_MOST_TEXT].decode("utf-8", "replace")
    if (_fact(text, "job"), _fact(text, "ask")) != (job, ask.rpartition(".")[0]):
        return None
    node, tenant = _fact(text, "node"), ids.tenant_of(job)
    spec = results.checked_spec(client, job)
    for card in client.cards():
        if card.node != node or not ("*" in card.tenants or tenant in card.tenants):
            continue
        if spec is not None and not trust.serves(card, tenant, specs.lane_of(spec)):
            continue
        if signing.verify(card.public, Domain.QUESTION, data, signature):
            return text
    return None


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
