"""The application's door to a fleet: tasks, commands, kills, and looking.

Called by application modules at import, in guests too. Must never read a file, the environment or the network before a
method asks the fleet for something, and never load the queue's libraries in a guest.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack, cast, overload

from runner import context, request
from runner.aio import apart, in_thread, twin
from runner.budgets import BudgetHandle
from runner.errors import UsageError
from runner.job import Job
from runner.place import Place
from runner.request import JobOptions
from runner.task import Task
from runner.timed import Timed
from runner.wire.ids import DEFAULT_TENANT
from runner.wire.receipt import NodeReceipt, PauseReceipt, Receipt
from runner.wire.view import EventView, JobView, NodeView, WaitView

if TYPE_CHECKING:
    from runner.canvas import Signature
    from runner.client import Client
    from runner.orders import SelectorKind
    from runner.repeating import Repeated
    from runner.wire.command import Selector

__all__ = ["App"]

P = ParamSpec("P")
R = TypeVar("R")


class App(Timed):
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
        job_id = self.client().enqueue_one(spec, chosen.get("on_duplicate"))
        return Job(self.place, job_id, spec if job_id == spec.id else None)

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
        made = request.draft(chosen, task=task, args=args, kwargs=kwargs, tenant=self.place.tenant)
        job_id = self.client().enqueue_one(made, chosen.get("on_duplicate"))
        return Job(self.place, job_id, request.spec_of(made) if job_id == made.id else None)

    def enqueue_many(self, calls: Iterable[Signature[Any]]) -> list[Job[Any]]:
        """Enqueue calls such as ``task.s(1)``, in batches of one round trip; return their handles in order.

        Nothing is enqueued if one of them can't be made; batches of up to 200 are enqueued whole or not at all.
        """
        from runner import launching

        return launching.enqueue_many(self.place, calls)

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

    def signal(
        self,
        name: str,
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
    ) -> list[Receipt] | list[PauseReceipt]:
        """Send a signal (`Job.signal`) to every job that one selector hits (see `kill`); return one receipt per job.

        One that kills hits what was enqueued up to now, any other what runs now. Raises UsageError, StoreError.
        """
        from runner import signalling

        known = signalling.name_of(name)
        chosen = _selector(
            "signal", tenant, all=all, tag=tag, queue=queue, node=node, task=task, secret=secret, group=group
        )
        return signalling.signal_many(self.client(), known, chosen, tenant, reason=reason, wait_s=wait)

    def drain(
        self,
        node: str,
        *,
        grace: float | None = None,
        checkpoint: float = 0.0,
        reason: str = "",
        wait: float = 15.0,
    ) -> NodeReceipt:
        """Have a node claim nothing more, and wait up to ``wait`` seconds until nothing runs on it.

        With ``grace``: what still runs after so many seconds gets SIGTERM, and ends ``checkpoint`` seconds later.
        It stays drained through restarts until `undrain`. Raises UsageError, StoreError.
        """
        from runner import operating

        return operating.drain(self.client(), node, grace_s=grace, checkpoint_s=checkpoint, reason=reason, wait_s=wait)

    def undrain(self, node: str, *, reason: str = "", wait: float = 15.0) -> NodeReceipt:
        """Have a drained node claim jobs again. Raises UsageError, StoreError."""
        from runner import operating

        return operating.undrain(self.client(), node, reason=reason, wait_s=wait)

    def suspend(self, queue: str, *, reason: str = "", wait: float = 15.0) -> list[NodeReceipt]:
        """Have no node claim from a queue until `unsuspend`; one receipt per live node.

        Raises UsageError, StoreError.
        """
        from runner import operating

        return operating.suspend(self.client(), queue, reason=reason, wait_s=wait)

    def unsuspend(self, queue: str, *, reason: str = "", wait: float = 15.0) -> list[NodeReceipt]:
        """Have a suspended queue served again; one receipt per live node. Raises UsageError, StoreError."""
        from runner import operating

        return operating.unsuspend(self.client(), queue, reason=reason, wait_s=wait)

    def retry(
        self,
        jobs: Sequence[str | Job[Any]] = (),
        *,
        all_failed: bool = False,
        since: float | None = None,
        queue: str | None = None,
        force: bool = False,
    ) -> list[Repeated]:
        """Run ended jobs again as new ones (see `Job.retry`): those, handles or ids, or all failed ones of its tenant.

        ``since``: that ended in the last so many seconds. What could not be repeated is in the list with the reason.
        Raises StoreError.
        """
        from runner import repeating

        client = self.client()
        if all_failed:
            return list(repeating.repeat_all(client, self.place.tenant, since_s=since, queue=queue, force=force))
        named = [job.id if isinstance(job, Job) else self.job(job).id for job in jobs]
        return [repeating.attempt(client, job, force=force) for job in named]

    def job(self, job_id: str) -> Job[object]:
        """Return the handle of a job by its id; asks nothing of the store. Raises GrammarError."""
        return Job(self.place, job_id)

    def jobs(self, *, tenant: str | None = None, limit: int = 100) -> list[JobView]:
        """Return the newest jobs of a tenant (the app's own by default), newest first."""
        from runner import listing

        return listing.jobs(self.client(), tenant or self.place.tenant, limit)

    def waiting(self) -> list[WaitView]:
        """Return the calls and budgets of this tenant that wait for a person, what ends first first."""
        from runner import waiting

        return waiting.waiting(self.client(), self.place.tenant)

    def budget(self, key: str) -> BudgetHandle:
        """Return the handle of a budget of this tenant; asks nothing of the store."""
        return BudgetHandle(self.place, key, self.place.tenant)

    def nodes(self) -> list[NodeView]:
        """Return the nodes of the fleet by name."""
        from runner import listing

        return listing.nodes(self.client())

    def events(self, *, follow: bool = False, tenant: str | None = None, job: str | None = None) -> Iterator[EventView]:
        """Yield the tenant's events and the nodes', oldest first, or all of one job; ``follow``: for ever."""
        from runner import listing

        whose = tenant or self.place.tenant
        return listing.events(self.client(), tenant=whose, job_id=job, follow=follow, whole=job is not None)

    async def aevents(
        self, *, follow: bool = False, tenant: str | None = None, job: str | None = None
    ) -> AsyncIterator[EventView]:
        """`events` without blocking the event loop."""
        async for event in apart(await in_thread(self.events, follow=follow, tenant=tenant, job=job)):
            yield event

    acommand = twin(command)
    acall = twin(call)
    aenqueue_many = twin(enqueue_many)
    akill = twin(kill)
    apause = twin(pause)
    aresume = twin(resume)
    asignal = twin(signal)
    adrain = twin(drain)
    aundrain = twin(undrain)
    asuspend = twin(suspend)
    aunsuspend = twin(unsuspend)
    ajobs = twin(jobs)
    anodes = twin(nodes)
    awaiting = twin(waiting)
    aretry = twin(retry)

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
