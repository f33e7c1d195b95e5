"""What a job is answered once the kernel has said that it is the job: names, values, or a code.

Called by the desk for each request of a live lease. Must never hand over a value that is not in the record first, or
tell a name that was not granted from one that does not exist.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping

from broker.vault.errors import VaultError
from broker.vault.keystore import Keystore
from broker.vault.leases import Code, Lease
from broker.vault.unseal import Unsealer

__all__ = ["RefusedError", "Window"]

log = logging.getLogger(__name__)

Reply = dict[str, object]


class RefusedError(Exception):
    """A request that is counted against the job and recorded with ``fields``."""

    def __init__(self, code: Code, **fields: object) -> None:
        super().__init__(code)
        self.code, self.fields = code, fields


class Window:
    """Answers the jobs of one broker."""

    def __init__(self, store: Keystore, write: Callable[..., None], unsealer: Unsealer) -> None:
        """``write``: the record; it raises where there is no room for a line."""
        self._store, self._write, self._unsealer = store, write, unsealer

    def answer(self, lease: Lease, order: Mapping[str, object], now_s: float) -> Reply:
        """Return the answer to one request. Raises RefusedError."""
        name, place = order.get("name"), order.get("place")
        match order.get("op"):
            case "list":
                return {"ok": True, "names": sorted(lease.grants)}
            case "get" if isinstance(name, str):
                return self._release(lease, name, now_s)
            case "sealed" if isinstance(place, str):
                return self._unseal(lease, place)
        raise RefusedError("garbage")

    def _release(self, lease: Lease, name: str, now_s: float) -> Reply:
        granted, code = lease.take(name, now_s)
        if code == "pending":
            return {"ok": False, "err": code}
        if granted is None:
            raise RefusedError(code, name=name[:80])
        try:
            held = self._store.get(name, granted.version)
            self._write(
                "secret.released", attempt=lease.attempt, name=name, version=held.version, mode=granted.ask.mode
            )
        except (VaultError, OSError) as error:
            return _unavailable(lease, error)
        return {"ok": True, "version": held.version, "value": base64.b64encode(held.value).decode()}

    def _unseal(self, lease: Lease, place: str) -> Reply:
        if place not in lease.sealed:
            raise RefusedError("denied", place=place[:80])
        try:
            return self._unsealer.give(lease, place)
        except (VaultError, OSError) as error:
            return _unavailable(lease, error)


def _unavailable(lease: Lease, error: Exception) -> Reply:
    log.warning("nothing released", extra={"attempt": lease.attempt, "error": type(error).__name__})
    return {"ok": False, "err": "unavailable"}
