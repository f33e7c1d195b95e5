"""Port: redis. Waits for the ends of jobs: one look at a time for all that somebody of this node waits for.

Called by child jobs (job.wait). Must never take a stored state for more than a sign that it is time to look closer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import islice
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from node_agent.cancelling import end_all
from node_agent.errors import StoreAwayError
from node_agent.kernel.errors import CallError
from runner.wire.calls import ErrorCode
from runner.wire.keys import Keys
from runner.wire.states import END_STATES

__all__ = ["MISUSED", "EndWatch", "bounded", "fields_of", "states_of"]

#: Each wait for the store, in seconds.
STORE_S: Final = 2.0
#: How often the jobs that somebody waits for are looked at, in seconds: more often at first.
LOOK_S: Final = (0.02, 0.25)
#: What stands where a state should, and is none: nobody but who writes the store wrongly did that.
MISUSED: Final = "?"
_MOST_STATE: Final = 32
#: Most jobs of one look.
MOST_JOBS: Final = 256


class EndWatch:
    """All waits of one boot. ``stop`` is idempotent."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._watched: dict[str, list[asyncio.Future[None]]] = {}
        self._watch: asyncio.Task[None] | None = None

    async def ended(self, job: str) -> None:
        """Wait until the store shows an end of the job, or does not know it any more."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watched.setdefault(job, []).append(waiter)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.get_running_loop().create_task(self._look())
        try:
            await waiter
        finally:
            waiters = self._watched.get(job, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._watched.pop(job, None)

    async def _look(self) -> None:
        pause_s, count = LOOK_S[0], 0
        while self._watched:
            if len(self._watched) > count:
                pause_s = LOOK_S[0]
            count = len(self._watched)
            jobs = list(islice(self._watched, MOST_JOBS))
            try:
                async with asyncio.timeout(STORE_S):
                    states = await states_of(self._redis, self._keys, jobs)
            except (RedisError, TimeoutError):
                # Whoever waits has a time of its own.
                await asyncio.sleep(LOOK_S[1])
                continue
            for job, state in zip(jobs, states, strict=True):
                waiters = self._watched.pop(job, [])
                if state in {None, MISUSED} or state in END_STATES:
                    for waiter in waiters:
                        if not waiter.done():
                            waiter.set_result(None)
                elif waiters:
                    # To the end of the line: many that wait for many jobs cost the store no more than these.
                    self._watched[job] = waiters
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_S[1])

    async def stop(self) -> None:
        """Look no more."""
        if self._watch is not None:
            await end_all((self._watch,))


async def states_of(redis: Redis, keys: Keys, jobs: Sequence[str]) -> list[str | None]:
    """Return the stored states of jobs; None: there is no such job, MISUSED: what stands there is no state.

    A tenant may write what it likes into its own jobs' hashes: what no state can be is not even fetched. Raises
    RedisError.
    """
    pipe = redis.pipeline(transaction=False)
    for job in jobs:
        pipe.hstrlen(keys.job(job), "rf_state")
    sizes = _readable(await pipe.execute(raise_on_error=False))
    asked = [job for job, size in zip(jobs, sizes, strict=True) if isinstance(size, int) and size <= _MOST_STATE]
    for job in asked:
        pipe.hget(keys.job(job), "rf_state")
    found = dict(zip(asked, _readable(await pipe.execute(raise_on_error=False)), strict=True))
    states = (found.get(job, MISUSED) for job in jobs)
    return [state.decode("utf-8", "replace") if isinstance(state, bytes) else _misused(state) for state in states]


async def fields_of(redis: Redis, keys: Keys, job: str, names: Sequence[str], most_bytes: int) -> list[bytes | None]:
    """Return fields of a job's hash; None: it has none, or one that is longer than any node writes it.

    What is longer is not even fetched: who may write there could have the agent hold all of it. Raises RedisError.
    """
    pipe = redis.pipeline(transaction=False)
    for name in names:
        pipe.hstrlen(keys.job(job), name)
    sizes = _readable(await pipe.execute(raise_on_error=False))
    short = [name for name, size in zip(names, sizes, strict=True) if isinstance(size, int) and 0 < size <= most_bytes]
    for name in short:
        pipe.hget(keys.job(job), name)
    found = dict(zip(short, _readable(await pipe.execute(raise_on_error=False)), strict=True))
    return [value if isinstance(value := found.get(name), bytes) else None for name in names]


def _misused(answer: object) -> str | None:
    return None if answer is None else MISUSED


def _readable(answers: list[object]) -> list[object]:
    """Return a pipeline's answers. Raises RedisError: one of them is about the store, not about the type of its key."""
    for answer in answers:
        if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
            raise answer
    return answers


async def bounded(call: Awaitable[object] | object) -> object:
    """Wait for the store, not for ever. Raises CallError(UNAVAILABLE); ResponseError: what a script says."""
    try:
        async with asyncio.timeout(STORE_S):
            return await cast("Awaitable[object]", call)
    except ResponseError:
        raise
    except (RedisError, StoreAwayError, TimeoutError) as error:
        raise CallError(ErrorCode.UNAVAILABLE, f"the store is away ({type(error).__name__}); ask again") from None
