"""Port: redis. What a killed job has started dies, too, whatever killed it: a selector, the node's own word, a signal.

Called by the supervisor's runs (a job was killed; a child was claimed) and control (the notice of another node). A kill
that names one job needs none of this: its tombstone hits all below it (runner/scripts/doom.lua). Must never kill a
running job on the store's word: the end of the one above it is signed by the node that proved it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, cast

from redis.exceptions import RedisError

from node_agent.cancelling import end_all
from node_agent.dependencies import Ended
from node_agent.kernel.endwatch import MISUSED, states_of
from node_agent.kernel.seams import Around
from node_agent.run import KillOrder, Run, now_ms
from node_agent.spread import spread
from runner.wire import ids
from runner.wire.errors import WireError
from runner.wire.spec import JobSpec
from runner.wire.states import State

__all__ = ["NOTICE", "Family"]

log = logging.getLogger(__name__)

#: What an entry of the stream of all says (its field ``why``), and how long it stands, in milliseconds.
NOTICE: Final = b"tree"
_NOTICE_MS: Final = 2 * 3_600_000
BACKOFF_S: Final = (0.05, 2.0)
_KILLED: Final = (State.KILLED, State.KILLING, MISUSED)
#: Each wait for the store, in seconds.
STORE_S: Final = 2.0


class Family:
    """The ties between jobs of one boot."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._tasks: set[asyncio.Task[None]] = set()
        around.stopping.append(self._stop)

    def killed(self, run: Run) -> None:
        """A job was killed, and its end stands in the store: tell every node, if it may have started others.

        One that was killed in its lane was looked at by nobody; an earlier attempt of it may have.
        """
        if run.attempt > 0 if run.spec is None else run.spec.grants.spawn is not None:
            task = asyncio.get_running_loop().create_task(self._tell(run.job_id, sure=run.spec is not None))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def hear(self, job: str) -> None:
        """Kill what a job started and what runs here, if its node has signed its kill. Raises StoreAwayError."""
        below = [run for run in self._around.runs() if f"job:{job}" in run.selectors]
        ends = self._around.ends
        if not below or ends is None:
            return
        try:
            end = await ends.end_of(job, ids.tenant_of(job))
        except WireError:
            return
        if not isinstance(end, Ended) or end.outcome.state != State.KILLED:
            log.warning("nobody has signed that the job above was killed", extra={"job": job, "below": len(below)})
            return
        for run in below:
            run.kill(order_of(job))

    async def killed_above(self, spec: JobSpec, given_up: Callable[[], bool]) -> str:
        """Return which of the jobs above a claimed one the store shows as killed; "" if none.

        The store's word is enough to leave a job alone. While it is away, it is asked until the claim is given up.
        """
        keys, wait_s = self._around.keys, BACKOFF_S[0]
        while not given_up():
            try:
                async with asyncio.timeout(STORE_S):
                    tombs = [await self._around.redis.exists(keys.tombstone(job)) for job in spec.ancestors]
                    states = await states_of(self._around.redis, keys, spec.ancestors)
            except (RedisError, TimeoutError):
                await asyncio.sleep(spread(wait_s))
                wait_s = min(2 * wait_s, BACKOFF_S[1])
                continue
            above = zip(spec.ancestors, tombs, states, strict=True)
            # What is no state does not say that the job may go on.
            return next((job for job, tomb, state in above if tomb or state in _KILLED), "")
        return ""

    async def _tell(self, job: str, *, sure: bool) -> None:
        """Tell every node. Not ``sure``: if the store shows that it started others; no more is known of it."""
        keys, redis = self._around.keys, self._around.redis
        try:
            if sure or await redis.exists(keys.kids(job)):
                fields = {"why": NOTICE, "job": job, "command": b"", "sig": b""}
                least = str(now_ms() - _NOTICE_MS)
                await redis.xadd(keys.control(), cast("dict[bytes | str, bytes | str]", fields), minid=least)  # type: ignore[arg-type] # redis-py's own types are invariant
        except RedisError as error:
            log.warning("a notice was not sent", extra={"job": job, "error": str(error)})

    async def _stop(self) -> None:
        await end_all(self._tasks)


def order_of(job: str) -> KillOrder:
    """Return the order that ends what a killed job has started."""
    return KillOrder("", now_ms(), reason=f"job {job}, which started it, was killed", by=f"job {job}")
