"""Port: redis. The kernel's scripts on its one connection: bounded in time, and an absent store is an answer.

Called by quotas, approvals and budgets. Must never hang: a call that the store does not answer in time is UNAVAILABLE,
and what it did is not known.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Sequence
from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from node_agent.kernel.bucket import Bucket
from node_agent.kernel.errors import CallError
from runner.scripts import loader
from runner.wire.calls import ErrorCode
from runner.wire.keys import Keys

__all__ = ["StoreCalls", "text_of"]

log = logging.getLogger(__name__)

#: How a store's errors begin that pass by themselves.
_PASSING: Final = (
    "LOADING",
    "BUSY",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "MASTERDOWN",
    "READONLY",
    "OOM",
    "MISCONF",
    "NOREPLICAS",
)
#: Refusals that are logged: a job that found one could fill the disk.
_refusals: Final = Bucket(0.2, 20.0)
#: Longest wait for one answer of the store, in seconds.
WAIT_S: Final = 2.0


class StoreCalls:
    """Runs scripts by name."""

    def __init__(self, redis: Redis, keys: Keys, wait_s: float = WAIT_S) -> None:
        self._redis, self.keys, self._wait_s = redis, keys, wait_s

    async def run(self, name: str, names: Sequence[str], document: dict[str, object], *more: bytes) -> list[object]:
        """Run one script on the keys ``names``; return its reply. ``more``: arguments that are no JSON.

        Raises CallError: UNAVAILABLE, asking again may help; FAULT, it does not.
        """
        script = loader.load(name)
        words = json.dumps({"rq": self.keys.rq, "rf": self.keys.rf, **document})
        given: tuple[str | bytes, ...] = (*names, words, *more)
        try:
            async with asyncio.timeout(self._wait_s):
                try:
                    reply = await cast("Awaitable[object]", self._redis.evalsha(script.sha, len(names), *given))
                except NoScriptError:
                    reply = await cast("Awaitable[object]", self._redis.eval(script.text, len(names), *given))
        except (RedisError, TimeoutError, OSError) as error:
            if isinstance(error, ResponseError) and not str(error).startswith(_PASSING):
                if _refusals.take():
                    log.warning("a script of the kernel failed", extra={"script": name, "error": str(error)})
                raise CallError(ErrorCode.FAULT, "the store refuses what the node asks of it: see its log") from None
            why = f"the store does not answer ({type(error).__name__}); ask again"
            raise CallError(ErrorCode.UNAVAILABLE, why) from None
        return reply if isinstance(reply, list) else [reply]


def text_of(part: object) -> str:
    """Return a part of a reply as text."""
    return part.decode("utf-8", "replace") if isinstance(part, bytes) else str(part)
