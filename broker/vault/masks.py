"""Which values are looked for in the output of which attempt, and what came of it.

Called by the desk. Must never let an attempt's output or result pass that the scrubber knows no values for, or forget
them before its agent is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.vault import placing
from broker.vault.cleaning import Cleaning
from broker.vault.errors import VaultUsageError
from broker.vault.keystore import Keystore
from broker.vault.leases import Lease

__all__ = ["Masks"]

Reply = dict[str, object]


class Masks:
    """The attempts of one broker whose values its scrubber knows."""

    def __init__(self, cleaning: Cleaning, store: Keystore, note: Callable[..., None]) -> None:
        """``note``: writes to the record, without raising."""
        self._cleaning, self._store, self._note = cleaning, store, note
        self._told: set[str] = set()
        cleaning.leaked = self._masked

    def pin(self, lease: Lease) -> None:
        """Fix the versions that a job can be handed, and have them looked for in all that it prints.

        Raises:
            VaultError: one does not open, or can't be put into its header.
        """
        for name, granted in lease.grants.items():
            held = self._store.get(name)
            granted.version = held.version
            if granted.ask.mode == "proxy":
                placing.plain(held.value) if granted.field else placing.render(granted.header, held.value)
            self.tell(lease, name, held.value)

    def tell(self, lease: Lease, name: str, value: bytes) -> None:
        """Have one value looked for from now on. Raises VaultError."""
        self._told.add(lease.attempt)
        granted = lease.grants.get(name)
        self._cleaning.tell(lease.attempt, name, value, kill=granted is not None and granted.on_leak == "kill")

    def streams(self, attempt: str, fds: Sequence[int]) -> None:
        """Put the scrubber between a job and its agent. Raises VaultUsageError: it knows nothing of that attempt."""
        self._cleaning.streams(self._known(attempt), fds)

    def file(self, attempt: str, fds: Sequence[int], reply: Callable[[Reply], object]) -> None:
        """Copy a result without the values, also of a job that has ended, and answer. Raises VaultUsageError."""

        def done(leaked: dict[str, bool] | None) -> None:
            if leaked:
                self._masked(attempt, len(leaked), list(leaked))
            reply({"ok": False, "err": "unavailable"} if leaked is None else {"ok": True, "leaked": leaked})

        self._cleaning.file(self._known(attempt), fds, done)

    def forget(self, attempt: str) -> None:
        """Its agent is done with the attempt. Idempotent."""
        if attempt in self._told:
            self._told.discard(attempt)
            self._cleaning.forget(attempt)

    def _known(self, attempt: str) -> str:
        if attempt not in self._told:
            raise VaultUsageError(f"{attempt} has no lease")
        return attempt

    def _masked(self, attempt: str, hits: int, names: list[str]) -> None:
        self._note("secret.masked", attempt=attempt, hits=hits, names=names)
