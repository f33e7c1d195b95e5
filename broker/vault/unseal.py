"""Opens the sealed values of a live lease, and only those that were sealed for it.

Called by the desk: for the agent before the job starts (every value is opened once, and told to the scrubber), and for
the job when it asks. Must never open what the signed job did not bring, believe a binding that is not the lease's own
(attack 2), keep a value in the clear, or give one that is not in the record first.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Final

import pyrage
from pyrage import x25519

from broker.vault.errors import VaultError, VaultUsageError
from broker.vault.leases import Lease
from runner.wire import sealed
from runner.wire.errors import WireError
from runner.wire.sealed import Binding

__all__ = ["Unsealer"]

Reply = dict[str, object]
_FOREIGN: Final = (
    "was sealed for another job or argument, or for another key to sign, so it is not opened: enqueue the job with the "
    "value"
)
_NOT_OURS: Final = (
    "does not open with this node's key: it was sealed before the node's card named that key, or for other nodes; "
    "enqueue the job again"
)


class _SealedError(VaultError):
    """A sealed value is not opened; the message is for the operator."""


class Unsealer:
    """The sealed values of all live leases; the ciphertexts lie in the leases."""

    def __init__(
        self,
        keys: Callable[[], list[x25519.Identity]],
        write: Callable[..., None],
        tell: Callable[[Lease, str, bytes], None],
    ) -> None:
        """``keys``: those that open now. ``write``: the record. ``tell``: has a value masked in the output."""
        self._keys, self._write, self._tell = keys, write, tell

    def take(self, lease: Lease, order: Mapping[str, object]) -> Reply:
        """Add a value that the signed job brings to its lease. Raises VaultUsageError, VaultError."""
        place, text = order.get("place"), order.get("data")
        if not isinstance(place, str) or not isinstance(text, str) or len(place) > sealed.MAX_PLACE:
            raise VaultUsageError("a sealed value comes with its place")
        if lease.sealed.get(place) == text:
            return {"ok": True}
        if len(lease.sealed) >= sealed.MAX_SEALED or place in lease.sealed:
            raise VaultUsageError("too many sealed values, or two in one place")
        try:
            _, value = self._open(lease, place, text)
        except _SealedError as error:
            self._write("sealed.refused", attempt=lease.attempt, place=place)
            return {"ok": False, "err": "foreign", "message": f"{place} {error}"}
        self._tell(lease, place, value)
        lease.sealed[place] = text
        return {"ok": True}

    def give(self, lease: Lease, place: str) -> Reply:
        """Return a value to its job, recorded first. Raises KeyError: not of this lease. VaultError."""
        binding, value = self._open(lease, place, lease.sealed[place])
        self._write("sealed.released", attempt=lease.attempt, place=place)
        return {"ok": True, "text": binding.text, "value": base64.b64encode(value).decode()}

    def _open(self, lease: Lease, place: str, text: str) -> tuple[Binding, bytes]:
        try:
            if len(text) > sealed.MAX_TEXT_BYTES:
                raise _SealedError(_NOT_OURS)
            plain = pyrage.decrypt(base64.b64decode(text, validate=True), self._keys())
        except (pyrage.DecryptError, binascii.Error, ValueError):
            raise _SealedError(_NOT_OURS) from None
        try:
            binding, value = sealed.unpack(plain)
        except WireError:
            raise _SealedError(_FOREIGN) from None
        owner = (binding.tenant, binding.job, binding.signer)
        if owner != (lease.tenant, lease.job, lease.signer) or binding.place != place or not lease.signer:
            raise _SealedError(_FOREIGN)
        return binding, value
