"""Port: broker.egress. The line between the egress process and the broker for one attempt with proxied secrets.

Made by the stage, used by egress.py each time it opens the attempt's door. Must never keep the end that values come out
of: the agent holds a copy of the broker's end alone.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable

from broker.egress.certs import SEED_BYTES, Authority

__all__ = ["KeyLine"]


class KeyLine:
    """``authority`` is what the job's TLS clients are told to trust for the hosts of its secrets."""

    def __init__(self, give: Callable[[int], Awaitable[None]]) -> None:
        """``give`` hands the broker its end; the descriptor stays the caller's."""
        self._give = give
        self._near = -1
        self.authority = Authority(os.urandom(SEED_BYTES), int(time.time()))

    def fresh(self) -> int:
        """Return the egress process's end of a new line, for the caller to give away and close."""
        self.close()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._near = near.detach()
        return far.detach()

    async def attach(self) -> None:
        """Have the broker serve the line. Raises SecretsError."""
        near, self._near = self._near, -1
        if near >= 0:
            try:
                await self._give(near)
            finally:
                os.close(near)

    def close(self) -> None:
        """Give back what was not given away. Idempotent."""
        if self._near >= 0:
            os.close(self._near)
            self._near = -1
