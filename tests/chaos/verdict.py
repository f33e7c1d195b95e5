"""What must hold of every job after any storm, from three witnesses: the stored job, the events, the jobs' own journal.

Called by test_chaos.py. Each function returns complaints, at best none. Must never explain a complaint away.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import redis

from runner.wire.keys import Keys
from runner.wire.states import END_STATES, NODE_LOST, POISON
from tests.chaos.crop import PLACES, Crop, Planned
from tests.scale.floor import Line

__all__ = ["Told", "awake", "complaints", "leftovers", "told"]

#: How long a node may need to note, after its sleep, what ended in it.
WAKING_NS = 1_000_000_000
#: Waiting for what is never coming back: nothing of it may be left once every job has ended.
LEFT: tuple[str, ...] = (
    "rf:claims:*",
    "rf:conc:*",
    "rf:line:*",
    "rf:open:*",
    "rf:then:*",
    "rf:due",
    "rf:doomed",
    "rq:queue:*",
    "rq:wip:*",
)
LEFT += ("rq:scheduled:*", "rq:deferred:*", "rq:execution:*", "rq:executions:*", "rf:uniq:*")


@dataclass(frozen=True, slots=True)
class Told:
    """One event of a job, in the order of the stream."""

    id: bytes
    kind: str
    attempt: int
    at_ms: int
    node: str
    detail: dict[str, object]


def told(client: redis.Redis) -> dict[str, list[Told]]:
    """Return the events of every job."""
    found: dict[str, list[Told]] = defaultdict(list)
    for entry_id, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(Keys().events("main"))):
        event = json.loads(fields[b"event"])
        found[event["job"]].append(
            Told(
                entry_id,
                event["type"],
                event["attempt"],
                event["at_ms"],
                event.get("node", ""),
                event.get("detail") or {},
            )
        )
    return found


def awake(lines: Sequence[Line], naps: Sequence[tuple[int, int, int]]) -> list[Line]:
    """Return the journal with the runs that the lease ended in a node's sleep ended when it fell asleep: frozen, they
    did nothing after that, but only note it when the node wakes.
    """
    found = []
    for line in lines:
        for pid, begun_ns, ended_ns in naps:
            late = line.how == "lease" and line.agent.startswith(f"{pid}.")
            if late and begun_ns <= line.at_ns <= ended_ns + WAKING_NS:
                line = replace(line, at_ns=begun_ns + 1)
        found.append(line)
    return sorted(found, key=lambda line: line.at_ns)


def leftovers(client: redis.Redis) -> list[str]:
    """Return the keys that jobs left behind."""
    found = [key.decode() for pattern in LEFT for key in cast("list[bytes]", client.keys(pattern))]
    return sorted(found)


def complaints(crop: Crop, events: dict[str, list[Told]], lines: Sequence[Line], client: redis.Redis) -> list[str]:
    """Return everything that is wrong."""
    runs: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        runs[line.job].append(line)
    pipe = client.pipeline(transaction=False)
    for job in crop.jobs:
        pipe.hmget(Keys().job(job), "rf_state", "rf_reason", "rf_attempt", "rf_outcome")
    found: list[str] = []
    for (job, planned), row in zip(crop.jobs.items(), pipe.execute(), strict=True):
        state, reason, attempt, outcome = ((value or b"").decode() for value in row)
        wrong = [
            *_ended(planned, events[job], state, int(attempt or 0)),
            *_order(events[job], planned.spec.retry.count),
            *_runs(planned, events[job], runs[job], state),
        ]
        history = [f"{one.kind[4:]}{one.attempt}" for one in events[job]]
        ran = [f"{'S' if line.begins else 'E'}{line.attempt}@{line.agent}:{line.how}" for line in runs[job]]
        found += [f"{job} ({planned.kind}, {state} {reason}): {what}; {history} {ran} {outcome}" for what in wrong]
    found += [f"an unknown job {job} ran" for job in runs if job not in crop.jobs]
    found += [f"an unknown job {job} has events" for job, its in events.items() if job and job not in crop.jobs]
    return [*found, *_cutoffs(crop, events), *_limits(crop, events, runs)]


def _ended(planned: Planned, its: Sequence[Told], state: str, attempt: int) -> Iterable[str]:
    ends = [one for one in its if one.kind == "job.ended"]
    if state not in END_STATES:
        yield f"it is {state or 'gone'} and has not ended"
    if len(ends) != 1:
        yield f"{len(ends)} end events"
        return
    end = ends[0]
    if end.detail.get("state") != state or end.attempt != attempt:
        yield f"its end event says {end.detail.get('state')} in attempt {end.attempt}"
    if not planned.killed and state in {"killed", "expired"}:
        yield "nobody asked for this end"
    if state == "refused" and (planned.kind != "after" or end.detail.get("reason") != "dependency_failed"):
        yield "refused"
    if state == "failed" and (planned.kind != "hopeless" or end.detail.get("reason") != "exception"):
        # An agent that starts anew ends its jobs as lost; a sandbox that only its lease ended is lost, too.
        yield f"failed({end.detail.get('reason')})"
    if state == "finished" and planned.fails >= attempt:
        yield f"finished in attempt {attempt}, but {planned.fails} attempts fail"


def _order(its: Sequence[Told], retries: int = 0) -> Iterable[str]:
    """The events of one job, as the store wrote them, are those of one life."""
    yield from _after_last_words(its, retries)
    attempt, marked, retried = 0, False, True
    for one in its:
        if one.kind == "job.claimed":
            if one.attempt not in {attempt, attempt + retried}:
                yield f"attempt {one.attempt} claimed after {attempt}"
            if marked and not retried:
                yield f"claimed again although attempt {attempt} was started and never retried"
            attempt, marked, retried = one.attempt, False, False
        elif one.kind == "job.started":
            marked = True
        elif one.kind == "job.retried":
            if retried:
                yield f"two retries of attempt {attempt}"
            retried = True


def _after_last_words(its: Sequence[Told], retries: int) -> Iterable[str]:
    """Nothing follows an end, and nothing but the end follows a kill."""
    kill = ended = False
    for one in its:
        if ended and one.kind != "job.kill_requested":
            yield f"{one.kind} after the end"
        if kill and one.kind in {"job.claimed", "job.retried", "job.queued", "job.scheduled"}:
            yield f"{one.kind} after the kill"
        kill |= one.kind == "job.kill_requested" and not ended
        ended |= one.kind == "job.ended"
        # Who takes over a job from a lost node has its loss signed already when a kill comes only then.
        lost = one.kind == "job.ended" and one.detail.get("state") == "lost"
        if kill and one.kind == "job.ended" and one.detail.get("state") == "failed" and one.attempt <= retries:
            yield "failed instead of killed, although it would have run again"
        if kill and lost and one.detail.get("reason") not in {NODE_LOST, POISON}:
            yield "lost although a kill had been accepted"


def _runs(planned: Planned, its: Sequence[Told], lines: Sequence[Line], state: str) -> Iterable[str]:
    """What really ran: one after the other, each run with a reason, the last one as the job ended."""
    starts = [line for line in lines if line.begins]
    ends = [line for line in lines if not line.begins]
    for one, other in pairwise(lines):
        if one.begins == other.begins or (one.begins and (one.agent, one.attempt) != (other.agent, other.attempt)):
            yield "two attempts at a time"
            return
    if len(starts) != len(ends):
        yield "its last run has no end"
        return
    if planned.spec.at_most_once and len(starts) > 1:
        yield f"ran {len(starts)} times, and at most once is what was signed"
    reasons = {one.attempt: str(one.detail.get("reason")) for one in its if one.kind == "job.retried"}
    for end, start in zip(ends, starts[1:], strict=False):
        yield from _repeated(end, start, reasons.get(end.attempt), planned.fails)
    if state == "finished" and (not ends or ends[-1].how != "done"):
        yield "finished, but its last run did not"
    if state == "failed" and not ends:
        yield "failed, but never ran"


def _repeated(end: Line, start: Line, reason: str | None, fails: int) -> Iterable[str]:
    """Why a job ran once more: its retry was signed, or its mark never reached the store and its agent is gone."""
    if end.attempt == start.attempt:
        if end.agent == start.agent and end.how != "lease":
            yield f"attempt {start.attempt} ran twice in one agent's life"
    elif reason is None:
        yield f"attempt {end.attempt} ended {end.how} and was repeated without a retry"
    elif reason == "exception" and end.attempt > fails:
        yield f"attempt {end.attempt} was retried as failed, but it did not fail"


def _cutoffs(crop: Crop, events: dict[str, list[Told]]) -> Iterable[str]:
    for entry, hit in crop.cutoffs:
        for job in hit:
            late = [one.kind for one in events[job] if _number(one.id) > _number(entry) and one.kind == "job.claimed"]
            if late:
                yield f"{job}: claimed after a cutoff that hits it"


def _limits(crop: Crop, events: dict[str, list[Told]], runs: dict[str, list[Line]]) -> Iterable[str]:
    for key in {one.spec.concurrency.key for one in crop.jobs.values() if one.spec.concurrency}:
        most = _most(
            [runs[job] for job, one in crop.jobs.items() if one.spec.concurrency and one.spec.concurrency.key == key]
        )
        if most > PLACES:
            yield f"{most} jobs of {key} at a time, and {PLACES} is what was signed"
    names: dict[str, list[list[Line]]] = defaultdict(list)
    for job, one in crop.jobs.items():
        if one.spec.unique is not None and one.spec.unique.until == "end":
            names[one.spec.unique.key].append(runs[job])
    for name, its in names.items():
        if _most(its) > 1:
            yield f"two jobs named {name} ran at a time"
    for job, one in crop.jobs.items():
        due = [event for event in events[job] if event.kind == "job.scheduled" and event.attempt == 0]
        first = [event for event in events[job] if event.kind in {"job.queued", "job.claimed"}]
        if one.kind == "eta" and due and first and first[0].at_ms < int(str(due[0].detail["due_ms"])):
            yield f"{job}: queued {int(str(due[0].detail['due_ms'])) - first[0].at_ms} ms before its time"
        if one.spec.after is not None:
            yield from _after(job, one, events, runs)


def _after(job: str, one: Planned, events: dict[str, list[Told]], runs: dict[str, list[Line]]) -> Iterable[str]:
    claims = [event.id for event in events[job] if event.kind == "job.claimed"]
    assert one.spec.after is not None
    for other in one.spec.after.jobs:
        ends = [event for event in events[other] if event.kind == "job.ended"]
        if not ends:
            continue
        late = claims and runs[job] and _number(claims[0]) < _number(ends[0].id)
        if late and (one.spec.after.failed == "run" or ends[0].detail.get("state") == "finished"):
            yield f"{job}: ran before {other}, which it waits for, had ended"
        if runs[job] and one.spec.after.failed == "refuse" and ends[0].detail.get("state") != "finished":
            yield f"{job}: ran although {other} did not finish"


def _most(runs: Iterable[Sequence[Line]]) -> int:
    """Return how many of these jobs ran at a time."""
    steps = sorted((line.at_ns, 1 if line.begins else -1) for its in runs for line in its)
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def _number(entry: bytes) -> tuple[int, int]:
    ms, _, part = entry.partition(b"-")
    return int(ms), int(part)
