"""Port: redis. An application's connection to the store, by its URL: a socket, TCP, TLS, Sentinel or a cluster.

Called by the client. Must never talk to a socket that another user serves, nor to a TLS server whose certificate is not
for the name in the URL.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any, Final, cast

import redis
from redis.backoff import ExponentialBackoff
from redis.connection import UnixDomainSocketConnection
from redis.retry import Retry
from redis.sentinel import Sentinel

from runner.clusterlink import open_cluster
from runner.errors import ConfigError
from runner.wire.cluster import cluster_of
from runner.wire.storeurl import SentinelUrl, sentinel_of, shown_url

__all__ = ["close_store", "open_store"]

_SOCKET_TIMEOUT_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 5.0


def open_store(url: str) -> redis.Redis:
    """Return a client; it connects at its first call. Raises ConfigError: no store's URL."""
    bounds: dict[str, Any] = {"socket_timeout": _SOCKET_TIMEOUT_S, "socket_connect_timeout": _CONNECT_TIMEOUT_S}
    options = {**bounds, "retry": Retry(ExponentialBackoff(cap=1.0, base=0.05), 3), "protocol": 2}
    try:
        if (cluster := cluster_of(url)) is not None:
            return open_cluster(cluster, options)
        behind = sentinel_of(url)
        if behind is not None:
            return _by_sentinel(behind, bounds, options)
        if url.startswith("unix:"):
            options["connection_class"] = _OwnSocket
        elif url.startswith("rediss:"):
            options["ssl_check_hostname"] = True
        return redis.Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(
            f"{shown_url(url)!r} is no store URL ({error}): use unix://PATH, redis://, rediss://, "
            "redis+sentinel:// or redis+cluster://"
        ) from None


def close_store(client: redis.Redis) -> None:
    """Close all connections of a client, those to its sentinels included; idempotent."""
    client.close()
    guards = getattr(client.connection_pool, "sentinel_manager", None)
    for guard in guards.sentinels if guards is not None else ():
        guard.close()


def _by_sentinel(behind: SentinelUrl, bounds: dict[str, Any], options: dict[str, Any]) -> redis.Redis:
    everything = {**options, **behind.login, **behind.tls}
    own = {**bounds, **behind.sentinel_login, **behind.tls}
    guards = Sentinel(list(behind.places), sentinel_kwargs=own, **everything)  # type: ignore[no-untyped-call]  # untyped
    return cast("redis.Redis", guards.master_for(behind.service))  # type: ignore[no-untyped-call]  # as above


class _OwnSocket(UnixDomainSocketConnection):
    """A Unix socket whose server is root, ourselves, or the owner of the socket's folder (attack 55)."""

    def _connect(self) -> socket.socket:
        sock: socket.socket = super()._connect()  # type: ignore[no-untyped-call]  # untyped
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", credentials)[1]
        folder = Path(self.path).parent.stat()
        if uid not in {0, os.geteuid(), folder.st_uid}:
            sock.close()
            raise redis.exceptions.ConnectionError(f"{self.path} is served by user {uid}; not trusted")
        return sock
