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

from node_agent.cancelling import end_all
from node_agent.scheduler import Scheduler
from node_agent.scheduler_store import TimeStore
from node_agent.storelink import connect, disconnect
from runner import keyring
from runner.home import Home, check_safe
from runner.wire.cluster import keys_of

__all__ = ["main"]


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
    client = connect(url)
    member = f"scheduler/{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
    scheduler = Scheduler(TimeStore(client, member, keys_of(url)))
    serving = loop.create_task(scheduler.run())
    try:
        await stop.wait()
    finally:
        await end_all((serving,))
        await scheduler.stop()
        await disconnect(client)
    return 0
