"""Port: redis. A daemon's connections to the one node of a cluster that owns the fleet's hash slot.

Called by storelink, and by storecheck for the nodes that no job may reach. As runner/clusterlink.py, on an event loop.
Must never follow a redirection for one command: a script has all its keys in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)

from runner.wire.cluster import ClusterUrl, owner_in, places_in, slot_of

__all__ = ["Owner", "open_cluster"]

#: The slot is elsewhere, on its way, or nowhere for now.
_MOVED: Final = (MovedError, AskError, TryAgainError, ReadOnlyError, ClusterDownError)


def open_cluster(cluster: ClusterUrl, options: Mapping[str, Any], connections: int, wait_s: float) -> Redis:
    """Return a client of so many connections; a call waits ``wait_s`` for one. ``options`` as the pool takes them."""
    owner = Owner(cluster, {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")})
    kind = _TlsToOwner if cluster.tls else _ToOwner
    everything: dict[str, Any] = {**options, **cluster.login, **cluster.tls, "owner": owner}
    return Redis.from_pool(
        BlockingConnectionPool(max_connections=connections, timeout=wait_s, connection_class=kind, **everything)
    )


class Owner:
    """Asks one node after the other who owns the slot; ``places``: those that it knows, replicas too."""

    def __init__(self, cluster: ClusterUrl, bounds: Mapping[str, Any]) -> None:
        self.places = cluster.places
        self._slot = slot_of(cluster.tag)
        self._tag = cluster.tag
        # Who asks again is the caller: here the next node is asked instead.
        once = Retry(NoBackoff(), 0)
        self._options: dict[str, Any] = {**bounds, **cluster.login, **cluster.tls, "retry": once}
        if cluster.tls:
            self._options["ssl"] = True

    async def find(self) -> tuple[str, int]:
        """Return host and port of the slot's owner. Raises ConnectionError."""
        said = "none names an owner"
        for host, port in self.places:
            try:
                async with Redis(host=host, port=port, **self._options) as node:
                    reply: object = await node.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]  # untyped
            except RedisError as error:
                said = f"{host}:{port}: {error}"
                continue
            found = owner_in(reply, self._slot, host)
            if found is not None:
                self.places = tuple(dict.fromkeys((*self.places, *places_in(reply, host))))
                return found
        raise ConnectionError(f"no node of the cluster serves the slot of {{{self._tag}}} ({said})")


class _ToOwner(Connection):
    """A connection to whoever owns the slot when it opens."""

    def __init__(self, *, owner: Owner, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]  # passed on as given
        self._owner = owner

    async def _connect(self) -> None:
        self.host, self.port = await self._owner.find()
        await super()._connect()  # type: ignore[no-untyped-call]  # untyped

    async def read_response(self, *words: object, **options: object) -> object:
        """Return the answer. Raises ConnectionError: the slot is elsewhere now."""
        try:
            return await super().read_response(*words, **options)  # type: ignore[arg-type]  # passed on as given
        except _MOVED as error:
            await self.disconnect()
            raise ConnectionError(f"the slot is elsewhere, or on its way ({error})") from error


class _TlsToOwner(_ToOwner, SSLConnection):
    """The same over TLS."""
