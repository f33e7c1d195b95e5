"""Port: redis. An application's connections to the one node of a cluster that owns the fleet's hash slot.

Called by storelink. A connection asks the cluster who owns the slot whenever it opens; when the slot has moved it
closes, so that the next try asks again. Must never follow a redirection for one command: a script has all its keys in
one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.retry import Retry

from runner.wire.cluster import ClusterUrl, owner_in, places_in, slot_of

__all__ = ["open_cluster"]

#: The slot is elsewhere, on its way, or nowhere for now.
_MOVED: Final = (MovedError, AskError, TryAgainError, ReadOnlyError, ClusterDownError)


def open_cluster(cluster: ClusterUrl, options: Mapping[str, Any]) -> redis.Redis:
    """Return a client; it connects at its first call. ``options`` as `redis.ConnectionPool` takes them."""
    owner = _Owner(cluster, {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")})
    kind = _TlsToOwner if cluster.tls else _ToOwner
    everything: dict[str, Any] = {**options, **cluster.login, **cluster.tls}
    return redis.Redis.from_pool(redis.ConnectionPool(connection_class=kind, owner=owner, **everything))


class _Owner:
    """Asks one node after the other who owns the slot; remembers those that it hears of."""

    def __init__(self, cluster: ClusterUrl, bounds: Mapping[str, Any]) -> None:
        self._places = cluster.places
        self._slot = slot_of(cluster.tag)
        self._tag = cluster.tag
        # Who asks again is the caller: here the next node is asked instead.
        once = Retry(NoBackoff(), 0)
        self._options: dict[str, Any] = {**bounds, **cluster.login, **cluster.tls, "retry": once}
        if cluster.tls:
            self._options["ssl"] = True

    def __call__(self) -> tuple[str, int]:
        """Return host and port. Raises ConnectionError."""
        said = "none names an owner"
        for host, port in self._places:
            try:
                with redis.Redis(host=host, port=port, protocol=2, **self._options) as node:
                    reply: object = node.execute_command("CLUSTER", "SLOTS")
            except RedisError as error:
                said = f"{host}:{port}: {error}"
                continue
            found = owner_in(reply, self._slot, host)
            if found is not None:
                self._places = tuple(dict.fromkeys((*self._places, *places_in(reply, host))))
                return found
        raise ConnectionError(f"no node of the cluster serves the slot of {{{self._tag}}} ({said})")


class _ToOwner(Connection):
    """A connection to whoever owns the slot when it opens."""

    def __init__(self, *, owner: _Owner, **options: object) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]  # untyped
        self._owner = owner

    def _connect(self) -> object:
        self.host, self.port = self._owner()
        return super()._connect()  # type: ignore[no-untyped-call]  # untyped

    def read_response(self, *words: object, **options: object) -> object:
        """Return the answer. Raises ConnectionError: the slot is elsewhere now."""
        try:
            return super().read_response(*words, **options)
        except _MOVED as error:
            self.disconnect()  # type: ignore[no-untyped-call]  # untyped
            raise ConnectionError(f"the slot is elsewhere, or on its way ({error})") from error


class _TlsToOwner(_ToOwner, SSLConnection):
    """The same over TLS."""
