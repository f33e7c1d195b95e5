"""The handle of several jobs that were enqueued as one shape: look, wait, read, kill.

Called by applications; made by launching. Must never load the queue's libraries before a method needs them, and never
present a count that a node's signature should prove as proof: ``status`` is the store's word, results are signed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from runner.aio import twin
from runner.job import Job
from runner.place import Place
from runner.wire.receipt import Outcome, Receipt

if TYPE_CHECKING:
    from runner.client import Client

__all__ = ["Flow"]

R = TypeVar("R")
#: Whose results are those of the whole: one job, or a list of such.
Shape: TypeAlias = "Job[Any] | list[Shape]"


class Flow(Generic[R]):
    """Jobs of one shape. ``group`` is the name that they share; ``jobs``: all of them, in the order of the shape."""

    __slots__ = ("_place", "_shape", "group", "jobs")

    def __init__(self, place: Place, group: str, jobs: Iterable[Job[Any]], shape: Shape) -> None:
        """``shape``: the jobs whose results `result` returns."""
        self.group = group
        self.jobs = tuple(jobs)
        self._place = place
        self._shape = shape

    def result(self, timeout: float | None = None) -> R:
        """Wait and return what the shape returns: the last result of a chain, the list of a group's in its order.

        ``timeout`` in seconds is for all together. Raises as `Job.result` does, for the first job without a value.
        """
        return cast("R", _valued(self._shape, _Deadline(timeout)))

    def results(self, timeout: float | None = None) -> list[object]:
        """Like `result`, as a list: of one value for a chain."""
        found = self.result(timeout)
        return cast("list[object]", found) if isinstance(self._shape, list) else [found]

    def wait(self, timeout: float | None = None) -> list[Outcome]:
        """Wait until every job has ended, well or not, and return their signed outcomes in the order of ``jobs``.

        Raises ResultTimeoutError, UnverifiedResultError, StoreError.
        """
        deadline = _Deadline(timeout)
        return [job.outcome(deadline.left()) for job in self.jobs]

    def status(self) -> dict[str, int]:
        """Return how many jobs are in each state now, by the store's word; ``unknown``: forgotten by it."""
        client = self._client()
        rows = client.many_fields([client.keys.job(job.id) for job in self.jobs], ["rf_state"])
        return dict(Counter(row.get("rf_state", b"unknown").decode("utf-8", "replace") for row in rows))

    def kill(self, reason: str = "", grace: float = 0.0, force: bool = False, wait: float = 15.0) -> list[Receipt]:
        """Kill every job of the shape that has not ended, those that wait for others too; one receipt per job.

        A node that did not answer in ``wait`` seconds appears as an ``unconfirmed`` receipt without job.
        """
        from runner import control, orders

        order = control.Order(reason=reason, grace_s=grace, force=force, wait_s=wait)
        return control.kill_many(self._client(), orders.selector("group", self.group), self._place.tenant, order)

    async def aresult(self, timeout: float | None = None) -> R:
        """`result` without blocking the event loop; may be cancelled."""
        return cast("R", await _avalued(self._shape, _Deadline(timeout)))

    async def aresults(self, timeout: float | None = None) -> list[object]:
        """`results` without blocking the event loop; may be cancelled."""
        found = await self.aresult(timeout)
        return cast("list[object]", found) if isinstance(self._shape, list) else [found]

    async def await_(self, timeout: float | None = None) -> list[Outcome]:
        """`wait` without blocking the event loop; may be cancelled."""
        deadline = _Deadline(timeout)
        return [await job.aoutcome(deadline.left()) for job in self.jobs]

    astatus = twin(status)
    akill = twin(kill)

    def _client(self) -> Client:
        from runner.client import connect

        return connect(self._place)

    def __iter__(self) -> Iterator[Job[Any]]:
        """Yield the jobs."""
        return iter(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    def __repr__(self) -> str:
        return f"<flow {self.group}: {len(self.jobs)} jobs>"


class _Deadline:
    """One time limit for several calls that follow each other."""

    def __init__(self, timeout_s: float | None) -> None:
        self._until = None if timeout_s is None else time.monotonic() + timeout_s

    def left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())


def _valued(shape: Shape, deadline: _Deadline) -> object:
    if isinstance(shape, list):
        return [_valued(each, deadline) for each in shape]
    return shape.result(deadline.left())


async def _avalued(shape: Shape, deadline: _Deadline) -> object:
    if isinstance(shape, list):
        return [await _avalued(each, deadline) for each in shape]
    return await shape.aresult(deadline.left())
