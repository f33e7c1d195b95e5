"""Port: redis, runner.keyring. `ringfence scheduler`: one scheduler in a process of its own, until it is told to stop.

Called by node_agent.__main__. Must never exit because the store is away, and never hold a key that signs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from node_agent.cancelling import end_all
from node_agent.scheduler import Scheduler
from node_agent.scheduler_store import TimeStore
from runner import keyring
from runner.home import Home, check_safe

__all__ = ["main"]

_STORE_TIMEOUT_S: Final = 10.0


def main(arguments: list[str]) -> int:
    """Run until SIGTERM or SIGINT; return the exit status. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="ringfence scheduler", description="Run one scheduler.")
    parser.add_argument("--home", type=Path, required=True)
    home = Home(parser.parse_args(arguments).home)
    check_safe(home)
    return asyncio.run(_serve(os.environ.get("RINGFENCE_REDIS") or keyring.load_client(home).redis_url))


async def _serve(url: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    pool = BlockingConnectionPool.from_url(
        url,
        # One waits for wake-ups; short calls have the other to themselves.
        max_connections=2,
        timeout=_STORE_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=_STORE_TIMEOUT_S,
        socket_connect_timeout=_STORE_TIMEOUT_S,
        health_check_interval=0,
    )
    client = Redis.from_pool(pool)
    scheduler = Scheduler(TimeStore(client, f"scheduler/{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"))
    serving = loop.create_task(scheduler.run())
    try:
        await stop.wait()
    finally:
        await end_all((serving,))
        await scheduler.stop()
        await client.aclose()
    return 0
