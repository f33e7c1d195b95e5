"""Port: redis. RQ's own stop command, where the node's policy says `rq_stop = true`.

Called by the session. `rq.command.send_stop_job_command`, the dashboard's stop button, publishes without a signature:
whoever may publish in the store may then stop jobs here, and nothing else. Must never act on another command of RQ's
(shutdown, kill-horse), nor end the agent for anything that it hears; pub/sub is lost while the store is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from node_agent.run import KillOrder, Run, now_ms
from node_agent.spread import spread
from runner.wire import codec
from runner.wire.errors import WireError
from runner.wire.keys import Keys

__all__ = ["RqStop"]

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_AGAIN_S: Final = 1.0
_MAX_BYTES: Final = 1024


class RqStop:
    """Listens on the channels of this node's RQ workers. ``find``: the attempt of a job that this boot holds."""

    def __init__(self, client: Redis, keys: Keys, node: str, find: Callable[[str], Run | None]) -> None:
        self._client = client
        self._channels = f"{keys.rq}pubsub:{node}.*"
        self._find = find

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            try:
                async with self._client.pubsub(ignore_subscribe_messages=True) as heard:
                    await heard.psubscribe(self._channels)
                    while True:
                        message = await heard.get_message(timeout=_LOOK_S)
                        if message is not None:
                            self._obey(message.get("data"))
            except RedisError as error:
                log.warning("RQ's commands are not heard, the store is away", extra={"error": str(error)})
                await asyncio.sleep(spread(_AGAIN_S))

    def _obey(self, data: object) -> None:
        try:
            asked = codec.load(data if isinstance(data, bytes) else b"", limit_bytes=_MAX_BYTES)
        except WireError:
            return
        if not isinstance(asked, dict) or asked.get("command") != "stop-job":
            return
        job = asked.get("job_id")
        run = self._find(job) if isinstance(job, str) else None
        if run is not None:
            log.info("RQ's stop command", extra={"job": job})
            run.kill(KillOrder("", now_ms(), reason="RQ's stop command", by="not signed, from the store"))
