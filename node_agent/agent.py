"""Port: redis. One node agent: the host's ground once, then one session per boot until asked to stop.

Called by node_agent.__main__. Must never exit because the store is away, never register before what an earlier boot
left is proved gone, and never outlive its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from pathlib import Path
from typing import Final

from node_agent import ground as grounds
from node_agent.errors import LeaseLostError, StoreAwayError
from node_agent.ground import Ground
from node_agent.session import Session
from node_agent.settings import AgentSettings
from node_agent.spread import spread
from node_agent.storelink import connect, disconnect
from runner import keyring
from runner.wire.cluster import keys_of

__all__ = ["serve"]

log = logging.getLogger(__name__)

#: Wait before the next boot after this one was declared dead or its zygote ended, in seconds.
_REBOOT_S: Final = 0.05
#: Longest wait for a store that was away when a boot began, in seconds.
_AGAIN_S: Final = 2.0
#: A job's objects go with their last reference; what is left for the collector is little.
GC_THRESHOLDS: Final = (10_000, 20, 50)


async def serve(settings: AgentSettings) -> int:
    """Run one agent until SIGTERM or SIGINT; return the exit status.

    Raises:
        NodeError, RingfenceError: the set-up needs an operator, or the name is taken.
    """
    ground = grounds.prepare(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    url = settings.redis or keyring.load_client(ground.home).redis_url
    try:
        while not stop.is_set():
            await _boot(ground, url, stop)
    finally:
        ground.close()
    return 0


async def _boot(ground: Ground, url: str, stop: asyncio.Event) -> None:
    """One session, from a new boot id to its end."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(Session.CONNECTIONS):
            client = connect(url)
            stack.push_async_callback(disconnect, client)
            clients.append(client)
        session = Session(ground, clients, keys_of(url), host=_host_id(), hostname=socket.gethostname())
        stack.push_async_callback(session.stop)
        try:
            await session.start()
            _settle_heap()
            await session.run(stop)
        except StoreAwayError as error:
            log.warning("the store is away, trying again", extra={"error": str(error)})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), spread(_AGAIN_S))
        except LeaseLostError as error:
            log.warning("this agent start is over, beginning a new one", extra={"reason": str(error)})
            await asyncio.sleep(_REBOOT_S)


def _settle_heap() -> None:
    """Have the collector look at what jobs leave, not again and again at what stands for the boot's whole life."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def _host_id() -> str:
    """What tells this machine, as booted now, from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
