"""What a node does, seen once: each thing becomes a line of the flight record and counts where it counts.

Called by the notary (everything that the node signs), the supervisor (admissions, orders, ends) and the kernel's
sessions (answered calls). Must never let a job start whose admission is not recorded, nor hold up a kill.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from node_agent.kernel.metrics import Metrics
from node_agent.kernel.recorder import Recorder
from node_agent.kernel.recordlines import Field
from node_agent.kernel.ring import MOST, Ring
from node_agent.run import KillOrder, Run
from node_agent.turns import Finish
from runner.wire import ids
from runner.wire.event import EventType
from runner.wire.receipt import Receipt
from runner.wire.spec import JobSpec

__all__ = ["Witness"]

#: Events that the record tells in other words (the admission stands before the start), or that are no more than talk.
_TOLD: Final = frozenset({EventType.JOB_STARTED, EventType.JOB_PROGRESS})
_DENIALS: Final = {EventType.NET_DENIED: "net", EventType.SECRET_DENIED: "secret"}
#: Events that hold words of the job itself.
_SAID: Final = frozenset(
    {EventType.NET_DENIED, EventType.JOB_ARTIFACT, EventType.JOB_SIGNALLED, EventType.CHANNEL_VIOLATION}
    | {EventType.JOB_ASKED}
)
#: From the digits of job ids to those that int() reads.
_DIGITS: Final = str.maketrans("0123456789abcdefghjkmnpqrstvwxyz", "0123456789abcdefghijklmnopqrstuv")
#: Enough of a policy's version to find it by.
_VERSION_DIGITS: Final = 16
#: Calls in one line of the record.
_PER_LINE: Final = 10
#: Modes of delivery by which a job itself gets a value, and could say it.
_HANDED: Final = frozenset({"get", "file", "env"})


class Witness:
    """One per boot."""

    def __init__(self, recorder: Recorder, metrics: Metrics) -> None:
        self.recorder = recorder
        self.metrics = metrics
        metrics.gauges.append(self._gauges)

    def admitted(self, spec: JobSpec, attempt: int, *, signer: str, rule: str, policy: str) -> None:
        """Record that policy lets an attempt in, before anything of it exists. Raises CallError: then it must not."""
        fields: dict[str, Field] = {"queue": spec.queue, "key": signer, "rule": rule}
        if policy:
            fields["policy"] = policy[:_VERSION_DIGITS]
        fields["task" if spec.argv is None else "command"] = spec.name
        if spec.grants.secrets:
            fields["secrets"] = ",".join(f"{one.name}:{one.mode}" for one in spec.grants.secrets)
        name = ids.attempt_name(spec.id, attempt)
        self.recorder.must("job.admitted", name, fields)
        if spec.grants.secrets and hands_values(spec):
            self.recorder.veiled.add(name)
        self.metrics.count("ringfence_jobs_admitted_total")
        if attempt == 1:
            self.metrics.waited(time.time() - max(_made_ms(spec.id), spec.not_before_ms) / 1000)

    def refused(self, job: str, attempt: int, reason: str, why: str) -> None:
        """Record that an attempt is not let in."""
        self.metrics.count("ringfence_denials_total", "admission")
        self.recorder.note("job.refused", ids.attempt_name(job, attempt), {"reason": reason, "why": why})

    def ordered(self, job: str, attempt: int, order: KillOrder) -> None:
        """Record a kill before it acts; it acts in any case."""
        fields: dict[str, Field] = {"command": order.command, "by": order.by, "why": order.reason}
        if order.grace_s and not order.force:
            fields["grace_s"] = order.grace_s
        self.recorder.note("kill.ordered", ids.attempt_name(job, attempt), fields)

    def held(self, run: Run, op: str, holder: str, command: str, by: str, why: str) -> bool:
        """Record a pause or resume before it acts; return whether it is recorded."""
        fields: dict[str, Field] = {"holder": holder, "command": command, "by": by, "why": why}
        return self.recorder.note(f"{op}.ordered", ids.attempt_name(run.job_id, run.attempt), fields)

    def event(self, kind: EventType, job: str, attempt: int, detail: Mapping[str, str | int | float | bool]) -> str:
        """Record and count an event that is being signed; return the record's head."""
        self.metrics.count("ringfence_events_total", kind.value)
        if kind is EventType.JOB_STARTED:
            self.metrics.count("ringfence_jobs_started_total")
        elif kind in _DENIALS:
            self.metrics.count("ringfence_denials_total", _DENIALS[kind])
        if kind not in _TOLD:
            name = ids.attempt_name(job, attempt) if job else ""
            self.recorder.note(kind, name, self.recorder.veil(name, detail) if kind in _SAID else detail)
        return self.recorder.head

    def receipt(self, receipt: Receipt) -> str:
        """Record and count a receipt that is being signed; return the record's head."""
        self.metrics.count("ringfence_kills_total", receipt.outcome)
        fields: dict[str, Field] = {
            "outcome": receipt.outcome,
            "processes": receipt.processes,
            "survivors": receipt.survivors,
            "method": receipt.method,
            "kill_ms": receipt.kill_ms,
            "command": receipt.command,
            "by": receipt.by,
        }
        self.recorder.note("kill.receipt", ids.attempt_name(receipt.job, receipt.attempt), fields)
        self.recorder.hurry()
        return self.recorder.head

    def called(self, run: Run, spec: JobSpec, op: str, resource: str, outcome: str, ms: float) -> None:
        """Note a call that was answered."""
        if run.ring is None:
            run.ring = Ring()
        run.ring.add(op, "" if hands_values(spec) else resource, outcome, ms)
        self.metrics.count("ringfence_calls_total", op, outcome)
        if outcome == "denied":
            self.metrics.count("ringfence_denials_total", "call")

    def failed(self, run: Run) -> tuple[str, ...]:
        """Record the last calls of an attempt that did not end well; return the newest for its end."""
        if not run.ring:
            return ()
        calls = () if run.ring.told else run.ring.last(MOST)
        run.ring.told = True
        for start in range(0, len(calls), _PER_LINE):
            part = {str(start + at): call for at, call in enumerate(calls[start : start + _PER_LINE])}
            self.recorder.note("job.calls", ids.attempt_name(run.job_id, run.attempt), part)
        return run.ring.last()

    def ended(self, finish: Finish, *, taken: bool) -> None:
        """An attempt is over: count its end, or the retry, if the store has taken it."""
        self.recorder.forget(ids.attempt_name(finish.claim.job, finish.claim.attempt))
        if not taken:
            return
        if finish.kind == "end":
            self.metrics.count("ringfence_jobs_ended_total", str(finish.state), str(finish.reason or ""))
        elif finish.kind == "retry":
            self.metrics.count("ringfence_jobs_retried_total", str(finish.reason or finish.state))

    def _gauges(self) -> Mapping[str, float]:
        recorder = self.recorder
        return {
            "ringfence_record_lines_total": recorder.lines,
            "ringfence_record_bytes_total": recorder.bytes,
            "ringfence_record_misses_total": recorder.misses,
            "ringfence_record_head": recorder.count,
        }


def hands_values(spec: JobSpec) -> bool:
    """Whether the job itself holds a secret's value, and could name it in a call."""
    return any(one.mode in _HANDED for one in spec.grants.secrets)


def _made_ms(job: str) -> int:
    """Return the time in a job's id: the client's word, good enough for a statistic."""
    return int(job.rpartition("-")[2][:10].translate(_DIGITS), 32)
