"""Schedules: made and signed here, stored for the schedulers; listed, paused, resumed, removed.

Called by app and command line. Must never sign a rule that this host could not work out, and never present a stored
schedule as genuine whose signature it could not check. Pausing and removing change the store alone: a node goes on to
accept occurrences of a schedule until its ``end`` (docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, cast

from runner import request, signing
from runner.client import Client
from runner.errors import UsageError
from runner.request import JobOptions
from runner.task import Task
from runner.wire import codec, ids, record
from runner.wire import schedule as schedules
from runner.wire.envelope import Domain
from runner.wire.errors import WireError
from runner.wire.schedule import Missed, Schedule
from runner.wire.spec import MAX_ENVELOPE_BYTES, JobSpec
from runner.wire.times import iso
from runner.wire.view import ScheduleView

__all__ = ["Times", "add", "coming", "listed", "pause", "remove", "resume", "template_of"]

_NOT_HERE: Final = {
    "eta": "start=",
    "countdown": "start=",
    "after": "a flow that the scheduled task launches",
    "on_duplicate": "unique= alone: an occurrence whose name is taken is left out",
}


@dataclass(frozen=True, slots=True)
class Times:
    """When: ``cron`` in ``zone``, or every ``every`` seconds; see docs/schedules.md for ``missed``.

    ``start``, ``end``: aware datetimes. An interval without ``start`` begins one interval from now.
    """

    cron: str | None = None
    every: float | None = None
    zone: str = "UTC"
    missed: Missed = "once"
    start: datetime | None = None
    end: datetime | None = None


def template_of(
    name: str,
    work: Task[Any, Any] | str | Sequence[str],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    options: JobOptions,
    tenant: str,
) -> JobSpec:
    """Return the template of a task, a task's name ``module:qualname`` or a command. Raises UsageError."""
    chosen = request.merged(work.options if isinstance(work, Task) else JobOptions(), options)
    for option, instead in _NOT_HERE.items():
        if option in chosen:
            raise UsageError(f"{option} is not for schedules: use {instead}")
    chosen.pop("expires", None)
    if isinstance(work, str | Task):
        task = work if isinstance(work, str) else work.name
        spec = request.build(chosen, task=task, args=args, kwargs=kwargs, tenant=tenant)
    elif args or kwargs:
        raise UsageError("a command has its arguments in its list of words")
    else:
        spec = request.build(chosen, argv=work, tenant=tenant)
    if spec.sealed is not None:
        raise UsageError("a sealed value opens for one job alone, and each time of a schedule is another: use a secret")
    try:
        return replace(spec, schedule=ids.check_name(name, "schedule"))
    except WireError as error:
        raise UsageError(str(error)) from None


def add(client: Client, template: JobSpec, times: Times, expires_s: float | None) -> ScheduleView:
    """Sign and store a schedule; one of the same name is replaced, and stays paused if it is.

    Nothing changes if the same schedule is stored already, so a program may declare its schedules at every start.
    Raises UsageError, StoreError.
    """
    now_ms = client.now_ms()
    schedule = _made(template, times, expires_s, now_ms)
    stored = _stored(client, schedule.tenant).get(schedule.name)
    if stored is not None and stored.verified and _same(stored.schedule, schedule, times):
        return _view(stored, _next_times(client))
    text = record.dumps(schedule)
    if len(text) > MAX_ENVELOPE_BYTES:
        raise UsageError(f"the schedule has {len(text)} bytes, the limit is {MAX_ENVELOPE_BYTES}")
    due_ms = schedules.next_due(schedule, now_ms)
    if due_ms is None:
        raise UsageError("none of the schedule's times is in the future: look at its start and end")
    signature = client.signer.sign(Domain.SCHEDULE, text)
    answer = _change(client, "put", schedule.tenant, schedule.name, due_ms, record=text.decode("utf-8"), sig=signature)
    return _view(_Stored(schedule, paused=answer == "paused", verified=True), {_member(schedule): due_ms})


def listed(client: Client, tenant: str) -> list[ScheduleView]:
    """Return a tenant's schedules by name. Raises StoreError."""
    known = _stored(client, tenant)
    if not known:
        return []
    times = _next_times(client)
    return [_view(stored, times) for _, stored in sorted(known.items())]


def coming(client: Client, tenant: str, name: str, count: int) -> list[str]:
    """Return the next due times of a schedule, paused or not. Raises UsageError, StoreError."""
    schedule = _known(client, tenant, name).schedule
    found: list[str] = []
    moment: int | None = client.now_ms()
    while moment is not None and len(found) < count:
        moment = schedules.next_due(schedule, moment)
        if moment is not None:
            found.append(iso(moment))
    return found


def remove(client: Client, tenant: str, name: str) -> None:
    """Remove a schedule; its jobs stay. Raises UsageError, StoreError."""
    if _change(client, "remove", tenant, name) != "done":
        raise _unknown(tenant, name)


def pause(client: Client, tenant: str, name: str) -> None:
    """Let no occurrence of a schedule be enqueued until it is resumed. Raises UsageError, StoreError."""
    if _change(client, "pause", tenant, name) != "done":
        raise _unknown(tenant, name)


def resume(client: Client, tenant: str, name: str) -> None:
    """Let a schedule go on with its next time; what was left out stays out. Raises UsageError, StoreError."""
    schedule = _known(client, tenant, name).schedule
    due_ms = schedules.next_due(schedule, client.now_ms())
    if _change(client, "resume", tenant, name, due_ms or 0) != "done":
        raise _unknown(tenant, name)


@dataclass(frozen=True, slots=True)
class _Stored:
    schedule: Schedule
    paused: bool
    verified: bool


def _made(template: JobSpec, times: Times, expires_s: float | None, now_ms: int) -> Schedule:
    every_ms = None if times.every is None else round(1000 * times.every)
    start_ms = now_ms + (every_ms or 0)
    if times.start is not None:
        start_ms = request.moment_ms(times.start, "start")
    if expires_s is not None and not isinstance(expires_s, int | float):
        raise UsageError("expires of a schedule is a number of seconds after each due time")
    try:
        return Schedule(
            name=template.schedule or "",
            tenant=template.tenant,
            start_ms=start_ms,
            # Occurrences have times of their own; these are never looked at.
            template=replace(template, not_before_ms=0, not_after_ms=1),
            cron=times.cron,
            every_ms=every_ms,
            zone=times.zone,
            missed=times.missed,
            end_ms=None if times.end is None else request.moment_ms(times.end, "end"),
            expires_ms=round(1000 * (request.DEFAULT_EXPIRES_S if expires_s is None else expires_s)),
        )
    except WireError as error:
        raise UsageError(str(error)) from None


def _same(old: Schedule, new: Schedule, times: Times) -> bool:
    """Whether they differ in nothing but what is drawn anew each time."""
    template = replace(new.template, id=old.template.id, nonce=old.template.nonce)
    start_ms = old.start_ms if times.start is None else new.start_ms
    return replace(new, template=template, start_ms=start_ms) == old


def _stored(client: Client, tenant: str) -> dict[str, _Stored]:
    """What can be read of a tenant's schedules."""
    table = client.table(client.keys.schedules(ids.check_tenant(tenant)))
    found = ((name, _read(client, tenant, name, value)) for name, value in table.items())
    return {name: stored for name, stored in found if stored is not None}


def _read(client: Client, tenant: str, name: str, value: bytes) -> _Stored | None:
    paused, _, rest = value.partition(b" ")
    label, _, text = rest.partition(b" ")
    signature = label.decode("ascii", "replace")
    try:
        schedule = schedules.decode(text)
    except WireError:
        return None
    if (schedule.tenant, schedule.name) != (tenant, name):
        return None
    verified = any(signing.verify(key, Domain.SCHEDULE, text, signature) for key in client.publics)
    return _Stored(schedule, paused == b"1", verified)


def _known(client: Client, tenant: str, name: str) -> _Stored:
    found = _stored(client, tenant).get(name)
    if found is None:
        raise _unknown(tenant, name)
    return found


def _unknown(tenant: str, name: str) -> UsageError:
    return UsageError(f"no schedule {name[:64]!r} of tenant {tenant}: `ringfence schedule list` shows them")


def _change(client: Client, op: str, tenant: str, name: str, next_ms: int = 0, **more: str) -> str:
    keys = client.keys
    member = f"{ids.check_tenant(tenant)}/{ids.check_name(name, 'schedule')}"
    document = {"rq": keys.rq, "rf": keys.rf, "op": op, "name": name, "member": member, "next": next_ms, **more}
    places = [keys.schedules(tenant), keys.ticks(), keys.leader()]
    return cast("bytes", client.script("schedule", places, [codec.dump(document)])).decode("ascii")


def _next_times(client: Client) -> dict[str, float]:
    return client.scores(client.keys.ticks())


def _member(schedule: Schedule) -> str:
    return f"{schedule.tenant}/{schedule.name}"


def _view(stored: _Stored, times: Mapping[str, float]) -> ScheduleView:
    schedule, template = stored.schedule, stored.schedule.template
    next_ms = None if stored.paused else times.get(_member(schedule))
    return ScheduleView(
        name=schedule.name,
        tenant=schedule.tenant,
        task=template.name,
        queue=template.queue,
        cron=schedule.cron,
        every_s=None if schedule.every_ms is None else schedule.every_ms / 1000,
        zone=schedule.zone,
        missed=schedule.missed,
        state="paused" if stored.paused else "active" if next_ms is not None else "ended",
        next_at=None if next_ms is None else iso(int(next_ms)),
        start_at=iso(schedule.start_ms),
        end_at=None if schedule.end_ms is None else iso(schedule.end_ms),
        expires_s=schedule.expires_ms / 1000,
        verified=stored.verified,
    )
