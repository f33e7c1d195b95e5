"""The application's door to a fleet: tasks, commands, kills, and looking.

Called by application modules at import, in guests too. Must never read a file, the environment or the network before a
method asks the fleet for something, and never load the queue's libraries in a guest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar, Unpack, cast, overload

from runner import context, request
from runner.errors import UsageError
from runner.job import Job
from runner.place import Place
from runner.request import JobOptions
from runner.task import Task
from runner.wire.ids import DEFAULT_TENANT
from runner.wire.receipt import PauseReceipt, Receipt
from runner.wire.view import EventView, JobView, NodeView

if TYPE_CHECKING:
    from runner.client import Client
    from runner.orders import SelectorKind
    from runner.wire.command import Selector

__all__ = ["App"]

P = ParamSpec("P")
R = TypeVar("R")


class App:
    """One fleet as one tenant. Making it opens nothing; the first call that needs the fleet does."""

    def __init__(
        self,
        *,
        home: str | os.PathLike[str] | None = None,
        redis_url: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        """``home``: where client.json lies, None: $RINGFENCE_HOME or the account's own. ``redis_url``: over its URL."""
        self.place = Place.named(home, redis_url, tenant)

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(self, /, **options: Unpack[JobOptions]) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    def task(
        self, function: Callable[P, R] | None = None, /, **options: Unpack[JobOptions]
    ) -> Task[P, R] | Callable[[Callable[P, R]], Task[P, R]]:
        """Make a task of a function at the top of a module: ``@app.task`` or ``@app.task(retries=2, grants=…)``.

        Raises TaskNameError, UsageError.
        """
        if function is not None:
            return Task(function, self.place, options)

        def decorate(function: Callable[P, R]) -> Task[P, R]:
            return Task(function, self.place, options)

        return decorate

    def command(self, argv: Sequence[str], **options: Unpack[JobOptions]) -> Job[None]:
        """Enqueue a program with its arguments and return the job's handle.

        Raises InsideJobError, UsageError, ConfigError, StoreError, EnqueueError.
        """
        context.refuse_inside("app.command()")
        chosen = request.merged(JobOptions(), options)
        spec = request.build(chosen, argv=argv, tenant=self.place.tenant)
        self.client().enqueue([spec])
        return Job(self.place, spec.id, spec)

    def call(
        self,
        task: str,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        **options: Unpack[JobOptions],
    ) -> Job[object]:
        """Enqueue a task by its name ``module:qualname``, without importing it here. Raises as `command`."""
        context.refuse_inside("app.call()")
        chosen = request.merged(JobOptions(), options)
        spec = request.build(chosen, task=task, args=args, kwargs=kwargs, tenant=self.place.tenant)
        self.client().enqueue([spec])
        return Job(self.place, spec.id, spec)

    def kill(
        self,
        *,
        tag: str | None = None,
        queue: str | None = None,
        node: str | None = None,
        task: str | None = None,
        secret: str | None = None,
        group: str | None = None,
        all: bool = False,
        tenant: str | None = None,
        grace: float = 0.0,
        force: bool = False,
        reason: str = "",
        wait: float = 15.0,
    ) -> list[Receipt]:
        """Kill every job that one selector hits and that was enqueued up to now; return one receipt per job.

        ``tenant`` alone selects its jobs; with another selector it keeps the kill to that tenant. A node that did not
        answer in ``wait`` seconds appears as an ``unconfirmed`` receipt without job. Raises UsageError, StoreError.
        """
        from runner import control

        chosen = _selector(
            "kill", tenant, all=all, tag=tag, queue=queue, node=node, task=task, secret=secret, group=group
        )
        order = control.Order(reason=reason, grace_s=grace, force=force, wait_s=wait)
        return control.kill_many(self.client(), chosen, tenant, order)

    def pause(
        self,
        *,
        tag: str | None = None,
        queue: str | None = None,
        node: str | None = None,
        task: str | None = None,
        secret: str | None = None,
        group: str | None = None,
        all: bool = False,
        tenant: str | None = None,
        reason: str = "",
        wait: float = 15.0,
    ) -> list[PauseReceipt]:
        """Pause every job that runs now and that one selector hits (see `kill`); return one receipt per job.

        Jobs that start later are not paused. Raises UsageError, StoreError.
        """
        from runner import pausing

        chosen = _selector(
            "pause", tenant, all=all, tag=tag, queue=queue, node=node, task=task, secret=secret, group=group
        )
        return pausing.pause_many(self.client(), "pause", chosen, tenant, reason=reason, wait_s=wait)

    def resume(
        self,
        *,
        tag: str | None = None,
        queue: str | None = None,
        node: str | None = None,
        task: str | None = None,
        secret: str | None = None,
        group: str | None = None,
        all: bool = False,
        tenant: str | None = None,
        reason: str = "",
        wait: float = 15.0,
    ) -> list[PauseReceipt]:
        """Let every paused job go on that one selector hits (see `kill`); return one receipt per job.

        Raises UsageError, StoreError.
        """
        from runner import pausing

        chosen = _selector(
            "resume", tenant, all=all, tag=tag, queue=queue, node=node, task=task, secret=secret, group=group
        )
        return pausing.pause_many(self.client(), "resume", chosen, tenant, reason=reason, wait_s=wait)

    def job(self, job_id: str) -> Job[object]:
        """Return the handle of a job by its id; asks nothing of the store. Raises GrammarError."""
        return Job(self.place, job_id)

    def jobs(self, *, tenant: str | None = None, limit: int = 100) -> list[JobView]:
        """Return the newest jobs of a tenant (the app's own by default), newest first."""
        from runner import listing

        return listing.jobs(self.client(), tenant or self.place.tenant, limit)

    def nodes(self) -> list[NodeView]:
        """Return the nodes of the fleet by name."""
        from runner import listing

        return listing.nodes(self.client())

    def events(self, *, follow: bool = False, tenant: str | None = None) -> Iterator[EventView]:
        """Yield the tenant's events and the nodes', oldest first; ``follow``: and then those to come, for ever."""
        from runner import listing

        return listing.events(self.client(), tenant=tenant or self.place.tenant, follow=follow)

    def close(self) -> None:
        """Close this process's connection to the fleet; idempotent, and the app may be used again."""
        from runner.client import disconnect

        disconnect(self.place)

    def __enter__(self) -> Self:
        """Return the app; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def client(self) -> Client:
        """Return this process's connection to the fleet, made at first use. Raises ConfigError, UnsafeFileError."""
        from runner.client import connect

        return connect(self.place)


def _selector(what: str, tenant: str | None, *, all: bool, **named: str | None) -> Selector:
    """Return the one selector that was named; ``tenant`` alone is one, too. Raises UsageError."""
    from runner import orders

    chosen = [orders.selector(cast("SelectorKind", kind), name) for kind, name in named.items() if name is not None]
    if all:
        chosen.append(orders.selector("all"))
    if tenant is not None and not chosen:
        chosen.append(orders.selector("tenant", tenant))
    if len(chosen) != 1:
        raise UsageError(f"{what} takes exactly one of tag, queue, node, task, secret, group, tenant or all=True")
    return chosen[0]
