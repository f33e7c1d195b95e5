"""How much of the flight record jobs may fill with what they cause: each attempt, and all of a tenant's together.

Called by the recorder. Must never let one tenant's jobs, however many it starts, push the lines of another's out of the
record before somebody can have read them, nor count a line against a job that others have caused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from node_agent.kernel.bucket import Bucket

__all__ = ["ATTEMPT_BYTES", "ATTEMPT_BYTES_PER_S", "TENANT_BYTES", "TENANT_BYTES_PER_S", "Rooms"]

#: Room that one attempt has at once, and what it gets back.
ATTEMPT_BYTES: Final = 16 << 20
ATTEMPT_BYTES_PER_S: Final = 8 << 10
#: And all attempts of a tenant: an eighth of what is kept, which they need more than an hour to fill again.
TENANT_BYTES: Final = 256 << 20
TENANT_BYTES_PER_S: Final = 64 << 10
#: Tenants that are remembered; those whose room is whole again go first.
_MOST_TENANTS: Final = 1024


class Rooms:
    """One record's. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._attempts: dict[str, Bucket] = {}
        self._tenants: dict[str, Bucket] = {}
        self._most = _MOST_TENANTS

    def take(self, attempt: str, size: int) -> str:
        """Take room for one line; return whose room is full, empty if there was enough."""
        own = self._attempts.get(attempt)
        if own is None:
            own = self._attempts[attempt] = Bucket(ATTEMPT_BYTES_PER_S, ATTEMPT_BYTES, self._clock)
        if not own.has(size):
            return "this job has"
        if not self._shared(attempt.partition("-")[0]).take(size):
            return "the jobs of this tenant have"
        own.charge(size)
        return ""

    def forget(self, attempt: str) -> None:
        """The attempt is over; what it took of its tenant's room stays taken."""
        self._attempts.pop(attempt, None)

    def _shared(self, tenant: str) -> Bucket:
        found = self._tenants.get(tenant)
        if found is None:
            if len(self._tenants) >= self._most:
                self._tenants = {name: one for name, one in self._tenants.items() if not one.has(TENANT_BYTES)}
                self._most = max(_MOST_TENANTS, 2 * len(self._tenants))
            found = self._tenants[tenant] = Bucket(TENANT_BYTES_PER_S, TENANT_BYTES, self._clock)
        return found
