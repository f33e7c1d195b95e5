"""Schedule: a rule of times and the job that each of them is, signed once by the client.

Called by the client (makes, signs), the scheduler (what is due), admission and readers (an occurrence's job). Pure.
Must never let a job be more than the signed template: an occurrence differs from it in id, nonce and times alone, and
those follow from the schedule's name and the due time (attack 4).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from runner.wire import cron, ids, record
from runner.wire import spec as specs
from runner.wire.envelope import Domain
from runner.wire.errors import RecordError
from runner.wire.spec import MAX_ENVELOPE_BYTES, JobSpec
from runner.wire.times import iso

__all__ = [
    "Missed",
    "Schedule",
    "decode",
    "domain_of",
    "is_due",
    "job_of",
    "next_due",
    "occurrence",
    "occurrence_id",
]

VERSION: Final = 1
Missed: TypeAlias = Literal["skip", "once", "all"]
_SHORTEST_MS: Final = 1000
_LONGEST_MS: Final = 366 * 86_400_000
_RANDOM_BYTES: Final = 10
_NONCE_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule. Exactly one of ``cron`` and ``every_ms`` is set. Times are Unix milliseconds, UTC.

    Times are those of the cron rule in ``zone``, or ``start_ms`` + n * ``every_ms``; none before ``start_ms`` or after
    ``end_ms``. ``missed``: see the scheduler. ``expires_ms``: an occurrence not started so long after its due time is
    void. ``template``: the job; its own id, nonce and times are not used.
    """

    name: str
    tenant: str
    start_ms: int
    template: JobSpec
    cron: str | None = None
    every_ms: int | None = None
    zone: str = "UTC"
    missed: Missed = "once"
    end_ms: int | None = None
    expires_ms: int = 7 * 86_400_000
    v: int = VERSION

    def __post_init__(self) -> None:
        _check(self)


def decode(data: bytes) -> Schedule:
    """Return the validated schedule of verified bytes. Raises CodecError, RecordError or GrammarError."""
    return record.loads(Schedule, data, limit_bytes=MAX_ENVELOPE_BYTES)


def next_due(schedule: Schedule, after_ms: int) -> int | None:
    """Return the first due time later than ``after_ms``; None if there is none any more."""
    if schedule.every_ms is not None:
        passed = max(after_ms - schedule.start_ms, -1) // schedule.every_ms
        due: int | None = schedule.start_ms + (passed + 1) * schedule.every_ms
    else:
        rule, zone = cron.parse(schedule.cron or ""), cron.zone_of(schedule.zone)
        due = cron.next_after(rule, zone, max(after_ms, schedule.start_ms - 1))
    return None if due is None or (schedule.end_ms is not None and due > schedule.end_ms) else due


def is_due(schedule: Schedule, due_ms: int) -> bool:
    """Return whether ``due_ms`` is one of the schedule's times."""
    return next_due(schedule, due_ms - 1) == due_ms


def occurrence(schedule: Schedule, due_ms: int) -> JobSpec:
    """Return the job of one due time. Two parties that derive it get the same job."""
    return replace(
        schedule.template,
        id=occurrence_id(schedule.tenant, schedule.name, due_ms),
        nonce=_digest("nonce", schedule.tenant, schedule.name, due_ms).hex()[:_NONCE_DIGITS],
        not_before_ms=due_ms,
        not_after_ms=due_ms + schedule.expires_ms,
    )


def domain_of(due_ms: int | None) -> Domain:
    """Return what the bytes of a stored job are signed as: a job, or the schedule of which it is one due time."""
    return Domain.JOB if due_ms is None else Domain.SCHEDULE


def job_of(envelope: bytes, due_ms: int | None) -> JobSpec:
    """Return the job of verified bytes: the one they are, or that of a schedule's due time.

    Raises:
        CodecError, RecordError, GrammarError: no valid record; a template; a time that is not one of the schedule's.
    """
    if due_ms is None:
        spec = specs.decode(envelope)
        if spec.schedule is not None:
            raise RecordError(f"this is the template of schedule {spec.schedule}, which is no job by itself")
        if spec.ancestors:
            raise RecordError("a signed job has no jobs above it: those of child jobs follow from their origin")
        return spec
    schedule = decode(envelope)
    if not is_due(schedule, due_ms):
        raise RecordError(
            f"{iso(due_ms)} is not one of the times of schedule {schedule.name} (is this host's tzdata up to date?)"
        )
    return occurrence(schedule, due_ms)


def occurrence_id(tenant: str, name: str, due_ms: int) -> str:
    """Return the one job id of a schedule's due time: no second job of it can be enqueued while the first is known."""
    return f"{tenant}-{ids.ulid(due_ms, _digest('id', tenant, name, due_ms)[:_RANDOM_BYTES])}"


def _digest(what: str, tenant: str, name: str, due_ms: int) -> bytes:
    return hashlib.sha256(f"ringfence/occurrence/1\n{what}\n{tenant}\n{name}\n{due_ms}".encode("ascii")).digest()


def _check(schedule: Schedule) -> None:
    if schedule.v != VERSION:
        raise RecordError(f"version {schedule.v} is not supported, this is version {VERSION}", path="v")
    ids.check_name(schedule.name, "schedule")
    template = schedule.template
    if template.tenant != ids.check_tenant(schedule.tenant) or template.schedule != schedule.name:
        raise RecordError("the template belongs to another schedule", path="template")
    if template.after is not None or template.sealed is not None or template.ancestors:
        raise RecordError("a template waits for no job, stands below none and holds no sealed value", path="template")
    if (schedule.cron is None) == (schedule.every_ms is None):
        raise RecordError("exactly one of cron and every is needed", path="cron")
    if schedule.every_ms is not None and not _SHORTEST_MS <= schedule.every_ms <= _LONGEST_MS:
        raise RecordError("an interval is 1 second to 366 days", path="every_ms")
    if schedule.cron is not None:
        cron.parse(schedule.cron)
        cron.zone_of(schedule.zone)
    elif schedule.zone != "UTC":
        raise RecordError("a zone goes with cron; an interval is elapsed time", path="zone")
    if schedule.start_ms < 0 or (schedule.end_ms is not None and schedule.end_ms < schedule.start_ms):
        raise RecordError("a schedule ends after it starts", path="end_ms")
    if not 0 < schedule.expires_ms <= _LONGEST_MS:
        raise RecordError("an occurrence is void after 1 ms to 366 days", path="expires_ms")
