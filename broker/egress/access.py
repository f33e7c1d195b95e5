"""What the door of an attempt with proxied secrets has besides: its values, and as whom its job trusts it.

Made by the service for such a door, used by its visits. Must never outlive the door.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from broker.egress import tls
from broker.egress.certs import Authority
from broker.egress.keys import Keys

__all__ = ["Access"]


class Access:
    """``close`` forgets the values. Idempotent."""

    def __init__(self, end: socket.socket, authority: Authority) -> None:
        """``end``: the line to the broker, ours from here on."""
        self.on_lost: Callable[[], None] = lambda: None
        self.keys = Keys(end, lambda: self.on_lost())
        self._authority = authority
        self._shown: dict[str, ssl.SSLContext] = {}

    def shown(self, host: str) -> ssl.SSLContext:
        """Return what the job's TLS clients are shown as ``host``."""
        found = self._shown.get(host)
        if found is None:
            found = self._shown[host] = tls.server_context(self._authority, host)
        return found

    def close(self) -> None:
        """Forget everything."""
        self.keys.close()
        self._shown.clear()
