"""A scheduler as a process of its own, with a short leadership: SOCKET MEMBER LEASE_MS. Started by test_processes."""

from __future__ import annotations

import asyncio
import sys

from redis.asyncio import Redis

from node_agent.scheduler import Scheduler
from node_agent.scheduler_store import TimeStore


async def main(socket: str, member: str, lease_ms: str) -> None:
    """Serve until killed."""
    client = Redis(unix_socket_path=socket)
    await Scheduler(TimeStore(client, member), lease_ms=int(lease_ms)).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
