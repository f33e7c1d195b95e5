"""Port: redis. A daemon's connection to the store by its URL (socket, TCP, TLS, Sentinel, cluster), and its answers.

Called by the agent, the scheduler and what each of them keeps in the store. Must never repeat a call by itself: a
repeated script call would hide an unknown answer. Never show a URL's password.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from node_agent.clusterlink import open_cluster
from node_agent.errors import InvariantError, SetupError, StoreAwayError
from runner.wire.cluster import cluster_of
from runner.wire.storeurl import SentinelUrl, sentinel_of, shown_url

__all__ = ["answered", "connect", "disconnect"]

_TIMEOUT_S: Final = 10.0


def connect(url: str) -> Redis:
    """Return a client of one connection for calls that block and one for the others. Raises SetupError: no such URL."""
    bounds: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
    options: dict[str, Any] = {**bounds, "retry": Retry(NoBackoff(), 0), "health_check_interval": 0}
    try:
        if (cluster := cluster_of(url)) is not None:
            return open_cluster(cluster, options, 2, _TIMEOUT_S)
        behind = sentinel_of(url)
        if behind is not None:
            return _by_sentinel(behind, bounds, options)
        if url.startswith("rediss:"):
            options["ssl_check_hostname"] = True
        # One may wait in a blocking call; short calls take turns on the other, and wait for it instead of failing.
        return Redis.from_pool(BlockingConnectionPool.from_url(url, max_connections=2, timeout=_TIMEOUT_S, **options))
    except ValueError as error:
        raise SetupError(
            f"{shown_url(url)!r} is no store URL ({error}): use unix://PATH, redis://, rediss://, "
            "redis+sentinel:// or redis+cluster://"
        ) from None


async def disconnect(client: Redis) -> None:
    """Close all connections of a client, those to its sentinels included; idempotent."""
    await client.aclose()
    guards = getattr(client.connection_pool, "sentinel_manager", None)
    for guard in guards.sentinels if guards is not None else ():
        await guard.aclose()


async def answered(call: object) -> object:
    """Await a call of redis-py, whose types name both its clients. Raises StoreAwayError."""
    if not isinstance(call, Awaitable):
        raise InvariantError("the store needs redis.asyncio")
    try:
        return await call
    except RedisError as error:
        raise StoreAwayError(f"{type(error).__name__}: {error}") from error


def _by_sentinel(behind: SentinelUrl, bounds: dict[str, Any], options: dict[str, Any]) -> Redis:
    everything = {**options, **behind.login, **behind.tls}
    own = {**bounds, **behind.sentinel_login, **behind.tls}
    guards = Sentinel(list(behind.places), sentinel_kwargs=own, **everything)  # type: ignore[no-untyped-call]  # untyped
    return cast("Redis", guards.master_for(behind.service))
