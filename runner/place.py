"""Which fleet an application talks to: names only, nothing opened.

Called by app, task and job (hold one) and by the client (opens it at first use). Must never read a file, the
environment or the network itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from runner.errors import UsageError
from runner.wire.errors import WireError
from runner.wire.ids import DEFAULT_TENANT, check_tenant

__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """None in ``home``: $RINGFENCE_HOME or the account's own. None in ``redis_url``: that of the home's client.json."""

    home: str | None = None
    redis_url: str | None = None
    tenant: str = DEFAULT_TENANT

    @classmethod
    def named(cls, home: str | os.PathLike[str] | None, redis_url: str | None, tenant: str) -> Place:
        """Return the place; a relative home is made absolute now. Raises UsageError for a bad tenant."""
        if tenant != DEFAULT_TENANT:
            try:
                check_tenant(tenant)
            except WireError as error:
                raise UsageError(str(error)) from None
        return cls(None if home is None else os.path.abspath(home), redis_url, tenant)
