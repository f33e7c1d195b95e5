"""Port: redis. What an agent wants to know of its store: where it is served, and whether it keeps what it is given.

Called by the session at its start. Must never stop an agent: a store that may lose jobs is said so loudly, and is the
operator's choice.
"""

from __future__ import annotations

from typing import Final, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from node_agent.clusterlink import Owner
from node_agent.errors import StoreAwayError

__all__ = ["faults", "store_addresses", "store_places", "told"]

_LEAST_REDIS: Final = (6, 2)
_GIB: Final = 1 << 30


def store_addresses(client: Redis) -> list[tuple[str, int]]:
    """Return where the store is served over TCP: no net grant ever leads there (attack 12)."""
    facts = client.connection_pool.connection_kwargs
    if "path" in facts:
        return []
    # The client's own defaults, where the URL leaves one out.
    return [(str(facts.get("host") or "localhost"), int(facts.get("port") or 6379))]


async def store_places(client: Redis) -> list[tuple[str, int]]:
    """Return `store_addresses`, with Sentinel or a cluster all that may become the store. Raises StoreAwayError."""
    owner = client.connection_pool.connection_kwargs.get("owner")
    if isinstance(owner, Owner):
        try:
            await owner.find()
        except RedisError as error:
            raise StoreAwayError(str(error)) from error
        return list(owner.places)
    guards = getattr(client.connection_pool, "sentinel_manager", None)
    if guards is None:
        return store_addresses(client)
    found = [place for guard in guards.sentinels for place in store_addresses(guard)]
    name = getattr(client.connection_pool, "service_name", "")
    try:
        found.append(await guards.discover_master(name))
        found += await guards.discover_slaves(name)
    except RedisError as error:
        raise StoreAwayError(str(error)) from error
    return [(str(host), int(port)) for host, port in found]


async def faults(client: Redis) -> tuple[str, ...]:
    """Return what is wrong with the store's settings, each with the next step; empty also when it does not answer.

    Asks INFO alone, which every role's store user may.
    """
    try:
        facts = cast("dict[str, object]", await client.info())
    except RedisError:
        return ()
    return told(facts)


def told(facts: dict[str, object]) -> tuple[str, ...]:
    """Return the faults that an INFO reply shows."""
    found = []
    policy, most = str(facts.get("maxmemory_policy", "noeviction")), _number(facts.get("maxmemory"))
    if policy != "noeviction":
        found.append(
            f"the store evicts keys when it is full (maxmemory-policy {policy}): jobs and kills would vanish; "
            "set `maxmemory-policy noeviction`"
        )
    elif most and _number(facts.get("used_memory")) > 0.9 * most:
        found.append(
            f"the store uses more than nine tenths of its maxmemory ({most / _GIB:.1f} GiB): writes will fail soon; "
            "raise `maxmemory`, or keep results for less time"
        )
    if not _number(facts.get("aof_enabled")):
        found.append(
            "the store keeps no append-only file: its crash or restart loses jobs and kills; set `appendonly yes` and "
            "`appendfsync everysec`"
        )
    if facts.get("aof_last_write_status") == "err":
        found.append("the store can't write its append-only file: see its log, and free its disk")
    if facts.get("role") == "slave":
        found.append("the store is a replica and takes no writes: name the primary in the URL")
    version = str(facts.get("redis_version", ""))
    if _version(version) < _LEAST_REDIS:
        found.append(f"the store speaks as Redis {version or '?'}; this needs 6.2 or later, or Valkey 7.2")
    return tuple(found)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0, 0)
