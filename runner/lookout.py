"""Waits for the ends of many jobs at once, for the asynchronous twins: one look at the store for all of them.

Called by job (`aresult`, `aoutcome`). Must never take a state of the store for more than a hint that it is time to read
the job itself, and never leave its task behind when nobody waits any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from runner.client import Client
from runner.errors import StoreError
from runner.wire.states import END_STATES

__all__ = ["ended"]

#: Least and most seconds between two looks. In between: a tenth of the time that the youngest has waited.
LOOK_S: Final = (0.01, 0.25)
_SHARE: Final = 0.1

_lookouts: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Client, _Lookout]] = WeakKeyDictionary()


async def ended(client: Client, job_id: str, timeout_s: float | None) -> None:
    """Return when the job seems to have ended or to be unknown, or after ``timeout_s``. Raises StoreError."""
    of_loop = _lookouts.setdefault(asyncio.get_running_loop(), {})
    lookout = of_loop.setdefault(client, _Lookout(client, lambda: of_loop.pop(client, None)))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await lookout.news(job_id)


@dataclass(slots=True)
class _Wait:
    """One call that waits; ``since_s``: time.monotonic."""

    job_id: str
    since_s: float = field(default_factory=time.monotonic)
    news: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Lookout:
    """One loop's looks through one client. ``over`` is called when nobody waits any more."""

    def __init__(self, client: Client, over: Callable[[], object]) -> None:
        self._client = client
        self._over = over
        self._waits: list[_Wait] = []
        self._task: asyncio.Task[None] | None = None

    def news(self, job_id: str) -> Awaitable[None]:
        """Return what is done when the job seems to have ended."""
        wait = _Wait(job_id)
        self._waits.append(wait)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())
        return wait.news

    async def _look(self) -> None:
        try:
            while self._waits:
                await asyncio.sleep(self._pause_s())
                self._waits = [wait for wait in self._waits if not wait.news.done()]
                if self._waits:
                    await self._once()
        finally:
            # Whatever ended the looks: nobody waits for ever.
            for wait in self._waits:
                wait.news.cancel()
            self._task = None
            self._over()

    async def _once(self) -> None:
        jobs = list({wait.job_id for wait in self._waits})
        keys = [self._client.keys.job(job) for job in jobs]
        try:
            rows = await asyncio.to_thread(self._client.many_fields, keys, ["rf_state"])
        except StoreError as error:
            self._tell(set(jobs), error)
            return
        states = {job: row.get("rf_state", b"").decode("utf-8", "replace") for job, row in zip(jobs, rows, strict=True)}
        self._tell({job for job, state in states.items() if not state or state in END_STATES}, None)

    def _tell(self, jobs: set[str], error: StoreError | None) -> None:
        for wait in self._waits:
            if wait.job_id in jobs and not wait.news.done():
                if error is None:
                    wait.news.set_result(None)
                else:
                    wait.news.set_exception(error)

    def _pause_s(self) -> float:
        youngest_s = max(wait.since_s for wait in self._waits)
        return min(LOOK_S[1], max(LOOK_S[0], _SHARE * (time.monotonic() - youngest_s)))
