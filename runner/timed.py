"""The schedules of an app: work that is enqueued at each time of a rule.

Called by App alone, whose methods these are. Must never load the queue's libraries before one of them is used, nor in a
guest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from runner import context
from runner.aio import twin
from runner.place import Place
from runner.request import JobOptions
from runner.task import Task
from runner.wire.view import ScheduleView

if TYPE_CHECKING:
    from datetime import datetime

    from runner.client import Client
    from runner.wire.schedule import Missed

__all__ = ["Timed"]


class Timed:
    """An app as far as its schedules go."""

    place: Place

    def client(self) -> Client:
        """Return this process's connection to the fleet."""
        raise NotImplementedError

    def schedule(
        self,
        name: str,
        work: Task[Any, Any] | str | Sequence[str],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        cron: str | None = None,
        every: float | None = None,
        zone: str = "UTC",
        missed: Missed = "once",
        start: datetime | None = None,
        end: datetime | None = None,
        **options: Unpack[JobOptions],
    ) -> ScheduleView:
        """Have a task, a task by its name, or a command enqueued at each time of a rule (docs/schedules.md).

        ``cron`` in ``zone``, or ``every`` so many seconds. A schedule of this name is replaced; if it is the same,
        nothing changes: call it at every start. ``expires``: seconds after each due time. Raises as `command`.
        """
        context.refuse_inside("app.schedule()")
        from runner import schedule

        tenant = options.get("tenant") or self.place.tenant
        template = schedule.template_of(name, work, args, kwargs, options, tenant)
        times = schedule.Times(cron, every, zone, missed, start, end)
        return schedule.add(self.client(), template, times, cast("float | None", options.get("expires")))

    def schedules(self, *, tenant: str | None = None) -> list[ScheduleView]:
        """Return the schedules of a tenant (the app's own by default) by name."""
        from runner import schedule

        return schedule.listed(self.client(), tenant or self.place.tenant)

    def schedule_times(self, name: str, count: int = 5) -> list[str]:
        """Return the next times of a schedule, paused or not. Raises UsageError, StoreError."""
        from runner import schedule

        return schedule.coming(self.client(), self.place.tenant, name, count)

    def pause_schedule(self, name: str) -> None:
        """Let nothing of a schedule be enqueued until it is resumed. Raises UsageError, StoreError."""
        from runner import schedule

        schedule.pause(self.client(), self.place.tenant, name)

    def resume_schedule(self, name: str) -> None:
        """Let a schedule go on with its next time; what was left out stays out. Raises UsageError, StoreError."""
        from runner import schedule

        schedule.resume(self.client(), self.place.tenant, name)

    def unschedule(self, name: str) -> None:
        """Remove a schedule; jobs that it enqueued stay. Raises UsageError, StoreError."""
        from runner import schedule

        schedule.remove(self.client(), self.place.tenant, name)

    aschedule = twin(schedule)
    aschedules = twin(schedules)
    aschedule_times = twin(schedule_times)
    apause_schedule = twin(pause_schedule)
    aresume_schedule = twin(resume_schedule)
    aunschedule = twin(unschedule)
