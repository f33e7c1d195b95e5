"""What people look at: one job, the recent jobs, the nodes, the events.

Called by job handles, app and command line. Must never present the store's word as proof: only what carries
``verified=True`` was signed by a node of the fleet; all texts are foreign and are escaped by whoever prints them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from runner import results, signing
from runner.client import Client, Entry
from runner.waiting import held_by
from runner.wire import codec, ids, record
from runner.wire.card import NodeCard
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.event import Event, EventType
from runner.wire.receipt import Outcome
from runner.wire.spec import NEEDS_BROKER, JobSpec
from runner.wire.states import END_STATES, State
from runner.wire.times import iso, parse_ms
from runner.wire.view import EventView, JobView, NodeView

__all__ = ["checked", "checked_word", "events", "jobs", "nodes", "view"]

_WAIT_S = 1.0
_BATCH = 500
_SHOWN_JOBS = 3
_MAX_EVENT_BYTES = 64 * 1024
#: What scripts write, so that nobody signs it; any other unsigned event is dropped (attack 20).
_UNSIGNED = frozenset(
    {
        *(EventType.JOB_SCHEDULED, EventType.JOB_DEFERRED, EventType.JOB_QUEUED),
        *(EventType.JOB_CLAIMED, EventType.JOB_KILL_REQUESTED),
    }
)
#: Why a job is set aside (rf_waits), in front of "at TIME".
_SET_ASIDE = {
    "retry": "its next attempt is due",
    "rate": "its rate lets it start",
    "concurrency": "it is in line for a place of its concurrency limit and looked at again, at the latest,",
}
#: In these a job may stand still for a decision of a person.
_ASKING = frozenset({State.CLAIMED, State.RUNNING, State.PAUSED, State.SCHEDULED})
_RQ_ONLY = {"started": State.RUNNING, "stopped": State.KILLED, "canceled": State.KILLED}


def view(client: Client, job_id: str, spec: JobSpec | None = None) -> JobView:
    """Return one job, with its value if it finished and with the reason if it waits. Raises JobNotFoundError."""
    found, last = client.job_and_last(client.keys.job(job_id), results.FIELDS, client.keys.results(job_id))
    if "status" not in found:
        raise results.missing(client, job_id)
    outcome = results.outcome_of(client, job_id, spec, found)
    value: object = None
    if outcome is not None and last is not None:
        value = results.shown_value(outcome, last)
    waiting = _why(client, job_id, found, spec) if outcome is None else None
    return replace(_job(job_id, found, outcome, value, waiting), parent=_parent(client, job_id))


def _why(client: Client, job_id: str, found: Mapping[str, bytes], spec: JobSpec | None) -> str | None:
    """Say why a job does not run, whatever it waits for; None if it does, or only has to take its turn."""
    state = _text(found, "rf_state")
    if state in _ASKING:
        decision = held_by(client, job_id)
        if decision is not None:
            return decision
    if state == State.PAUSED:
        return (
            f"`ringfence resume {job_id}` lets it go on; `ringfence events --job {job_id}` says who paused it and why"
        )
    if state == State.SCHEDULED:
        why = _SET_ASIDE.get(_text(found, "rf_waits"), "it is due")
        return f"{why} at {_due(found) or 'an unknown time'}"
    if state == State.DEFERRED:
        return _waited_for(client, spec or results.checked_spec(client, job_id))
    if state == State.QUEUED:
        return _waiting(client, job_id, results.lane_for(client, job_id, spec, found), spec)
    return None


def _parent(client: Client, job_id: str) -> str | None:
    """The job that started one, by its selectors: those of what stands above it, the topmost first."""
    found = _text(client.fields(client.keys.job(job_id), ["rf_sel"]), "rf_sel")
    above = [word.removeprefix("job:") for word in found.split("\n") if word.startswith("job:")]
    return above[-1] if above and _is_job_id(above[-1]) else None


def jobs(client: Client, tenant: str, limit: int = 100) -> list[JobView]:
    """Return the newest jobs of a tenant, newest first, without their values."""
    found = client.newest(client.keys.active(tenant), limit)
    rows = client.many_fields([client.keys.job(job_id) for job_id in found], results.FIELDS)
    listed = []
    for job_id, row in zip(found, rows, strict=True):
        if "status" not in row or not _is_job_id(job_id):
            continue
        signed = "rf_outcome" in row
        outcome = results.outcome_by_origin(client, job_id, row) if signed else None
        listed.append(_job(job_id, row, outcome, None, None))
    return listed


def nodes(client: Client) -> list[NodeView]:
    """Return every node that ever registered, by name; ``lost`` once its lease is over."""
    leases = client.scores(client.keys.leases())
    now_ms = client.now_ms()
    found = []
    for name, data in sorted(client.table(client.keys.nodes()).items()):
        try:
            node = record.loads(NodeView, data, limit_bytes=_MAX_EVENT_BYTES)
        except WireError:
            continue
        if node.name != name:
            continue
        if leases.get(f"{name}/{node.boot}", 0.0) <= now_ms:
            node = replace(node, state="lost")
        found.append(node)
    return found


def events(
    client: Client, *, tenant: str, job_id: str | None = None, follow: bool = False, whole: bool = False
) -> Iterator[EventView]:
    """Yield a tenant's events and the nodes' in order, or those of one job (from its enqueue on), also what it caused.

    With ``follow``: for ever, or until the job's end. ``whole``: of one job all that is kept, also of one that the
    store knows no more, and beyond its end. Signed ones are verified, and dropped if no node of the fleet signed them.
    """
    streams = _streams(client, tenant, job_id, whole=whole)
    start = "-" if job_id is None or whole else _enqueued_ms(client, job_id)
    after = dict.fromkeys(streams, "0")

    def shown(entry: Entry) -> EventView | None:
        event = _event(client, entry)
        return event if event is not None and job_id in {None, event.job} else None

    ends = job_id is not None and not whole
    for entry in _stored(client, streams, start, after):
        if (event := shown(entry)) is not None:
            yield event
            if ends and event.type == EventType.JOB_ENDED:
                return
    while follow:
        for stream, entry in client.read(after, _WAIT_S):
            after[stream] = entry.id
            if (event := shown(entry)) is not None:
                yield event
                if ends and event.type == EventType.JOB_ENDED:
                    return


def _streams(client: Client, tenant: str, job_id: str | None, *, whole: bool) -> list[str]:
    keys = client.keys
    if job_id is None:
        return [keys.events(tenant), keys.events(None)]
    own = [keys.events(ids.tenant_of(job_id)), keys.job_events(job_id)]
    return [*own, keys.events(None)] if whole else own


def _stored(client: Client, streams: Sequence[str], start: str, after: dict[str, str]) -> Iterator[Entry]:
    """What the streams hold now, merged by time; ``after`` is moved on to the last id of each."""
    pages = [_pages(client, stream, start, after) for stream in streams]
    yield from heapq.merge(*pages, key=lambda entry: _order(entry.id))


def _pages(client: Client, stream: str, start: str, after: dict[str, str]) -> Iterator[Entry]:
    while entries := client.span(stream, start, _BATCH):
        after[stream] = entries[-1].id
        start = f"({entries[-1].id}"
        yield from entries


def _order(entry_id: str) -> tuple[int, int]:
    stamp, _, number = entry_id.partition("-")
    return int(stamp), int(number or 0)


def checked(client: Client, entry: Entry) -> EventView | None:
    """Return the event of an entry if a node of the fleet signed it."""
    event = _event(client, entry)
    return event if event is not None and event.verified else None


def checked_word(client: Client, data: bytes, signature: str) -> EventView | None:
    """Return a node's event that is kept elsewhere than in a stream, if a node of the fleet signed it."""
    return checked(client, Entry("", {"event": data, "sig": signature.encode("ascii", "replace")}))


def _event(client: Client, entry: Entry) -> EventView | None:
    data = entry.fields.get("event", b"")
    signature = _text(entry.fields, "sig")
    try:
        event = record.loads(Event, _without_empty_list(data), limit_bytes=_MAX_EVENT_BYTES)
    except WireError:
        return None
    signer = _signer(client, data, signature) if signature else None
    if (signer is None and event.type not in _UNSIGNED) or (signer is not None and signer.node != event.node):
        return None
    if signer is not None and event.job and not _speaks_for(signer, event.job):
        return None
    return EventView(
        id=entry.id,
        at=iso(event.at_ms),
        type=event.type,
        job=event.job,
        attempt=event.attempt,
        node=event.node,
        boot=event.boot,
        detail=event.detail,
        verified=signer is not None,
    )


def _without_empty_list(data: bytes) -> bytes:
    """The store's scripts can't tell an empty object from an empty list."""
    return data.replace(b'"detail":[]', b'"detail":{}')


def _signer(client: Client, data: bytes, signature: str) -> NodeCard | None:
    label = signing.signer_of(signature)
    for card in client.cards():
        if signing.key_id_of(card.public) == label and signing.verify(card.public, Domain.EVENT, data, signature):
            return card
    return None


def _speaks_for(card: NodeCard, job_id: str) -> bool:
    return _is_job_id(job_id) and ("*" in card.tenants or ids.tenant_of(job_id) in card.tenants)


def _enqueued_ms(client: Client, job_id: str) -> str:
    found = client.fields(client.keys.job(job_id), ["created_at"])
    if not found:
        raise results.missing(client, job_id)
    return str(parse_ms(_text(found, "created_at")) or "-")


def _job(
    job_id: str, found: Mapping[str, bytes], outcome: Outcome | None, value: object, waiting: str | None
) -> JobView:
    status = _text(found, "status")
    state = outcome.state if outcome is not None else _text(found, "rf_state") or _RQ_ONLY.get(status, status)
    attempt = _text(found, "rf_attempt")
    node = _text(found, "rf_claim").partition("/")[0] or None
    return JobView(
        job=job_id,
        task=_text(found, "rf_task") or _text(found, "description"),
        state=state,
        reason=outcome.reason if outcome is not None else _text(found, "rf_reason") or None,
        exit_code=outcome.exit_code if outcome is not None else None,
        signal=outcome.signal if outcome is not None else None,
        node=outcome.node if outcome is not None else node,
        attempt=outcome.attempt if outcome is not None else int(attempt) if attempt.isdigit() else 0,
        queue=_text(found, "origin").partition("@")[0],
        tags=_tags(found.get("rf_tags", b"")),
        enqueued_at=_time(found, "created_at"),
        started_at=_started(found, outcome),
        ended_at=iso(outcome.ended_at_ms) if outcome is not None else _time(found, "ended_at"),
        result=value,
        usage=_usage(outcome),
        detail=outcome.detail if outcome is not None else None,
        waiting=waiting,
        tail=(outcome.tail or None) if outcome is not None else None,
        verified=outcome is not None,
        due_at=_due(found),
        repeated_as=_text(found, "rf_repeated") or None,
        calls=outcome.calls if outcome is not None else (),
    )


def _started(found: Mapping[str, bytes], outcome: Outcome | None) -> str | None:
    if outcome is None:
        return _time(found, "started_at")
    return iso(outcome.started_at_ms) if outcome.started_at_ms is not None else None


def _usage(outcome: Outcome | None) -> dict[str, float | int]:
    if outcome is None:
        return {}
    return {
        "wall_s": outcome.wall_s,
        "cpu_s": outcome.cpu_s,
        "max_rss_bytes": outcome.max_rss_bytes,
        "processes": outcome.processes,
        "output_bytes": outcome.output_bytes,
    }


def _waiting(client: Client, job_id: str, lane: str, spec: JobSpec | None) -> str | None:
    """Say why a queued job waits, in one sentence; None when it only has to take its turn."""
    tenant = ids.tenant_of(job_id)
    queue, _, needs = lane.partition("@")
    if queue in client.table(client.keys.suspended()):
        return f"queue {queue} is suspended: `ringfence unsuspend {queue}` lets it go on"
    live = [node for node in nodes(client) if node.state != "lost"]
    if not live:
        return "no node is alive: start one with `ringfence up` or `ringfence agent`"
    fitting = [node for node in live if "*" in node.queues or queue in node.queues]
    if not fitting:
        return f"no live node serves queue {queue}"
    fitting = [node for node in fitting if results.serves(_as_card(node), tenant, lane)]
    if not fitting:
        asked = ",".join(need for need in needs.split(",") if not need.startswith("priority="))
        return f"no live node of queue {queue} meets {asked}"
    # Without its broker a node still runs what needs none.
    fit = {"ready"} if NEEDS_BROKER in needs.split(",") else {"ready", "degraded(broker)"}
    ready = [node for node in fitting if node.state in fit]
    if not ready:
        return f"every fitting node is not ready: {', '.join(f'{node.name} {node.state}' for node in fitting)}"
    if all(node.busy >= node.slots for node in ready):
        return "every slot of the fitting nodes is busy"
    spec = spec or results.checked_spec(client, job_id)
    if spec is not None and not any(_has_room(node, spec) for node in ready):
        wanted = {"memory": spec.grants.memory_bytes, "cpus": spec.grants.cpus}
        told = " and ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
        return f"no fitting node has {told} left for it now: it starts when jobs there have ended"
    return None


def _has_room(node: NodeView, spec: JobSpec) -> bool:
    """Whether a node has left what a job asks for, or runs nothing: then it is given what there is."""
    asked = {"memory_bytes": spec.grants.memory_bytes, "cpus": spec.grants.cpus}
    return not node.busy or all(node.free.get(name, amount) >= amount for name, amount in asked.items() if amount)


def _waited_for(client: Client, spec: JobSpec | None) -> str:
    """Say whose ends a deferred job waits for; by the store's word of their states."""
    if spec is None or spec.after is None:
        return "it waits for other jobs to end"
    rows = client.many_fields([client.keys.job(job) for job in spec.after.jobs], ["rf_state"])
    left = [job for job, row in zip(spec.after.jobs, rows, strict=True) if _text(row, "rf_state") not in END_STATES]
    shown = ", ".join(left[:_SHOWN_JOBS])
    return f"it waits for {len(left)} of {len(rows)} jobs to end" + (f": {shown}" if shown else "")


def _as_card(node: NodeView) -> NodeCard:
    """A node's own claims in the form of a card, only to compare them with a lane; proves nothing."""
    return NodeCard(node.name, "0" * 64, node.level, 0, queues=tuple(node.queues), labels=node.labels)


def _tags(data: bytes) -> dict[str, str]:
    try:
        found = codec.load(data, limit_bytes=_MAX_EVENT_BYTES)
    except WireError:
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _time(found: Mapping[str, bytes], name: str) -> str | None:
    stamp_ms = parse_ms(_text(found, name))
    return iso(stamp_ms) if stamp_ms is not None else None


def _due(found: Mapping[str, bytes]) -> str | None:
    stamp = _text(found, "rf_due")
    return iso(int(stamp)) or None if stamp.isascii() and stamp.isdigit() and len(stamp) <= 16 else None


def _is_job_id(text: str) -> bool:
    try:
        ids.check_job_id(text)
    except WireError:
        return False
    return True


def _text(fields: Mapping[str, bytes], name: str) -> str:
    return fields.get(name, b"").decode("utf-8", "replace")
