"""The form of one sealed file: an age file whose plaintext says what it is.

Called by the keystore. Must never return a part of a plaintext, or a value without the header it was sealed with.

A plaintext is 4 bytes of header length, the header {name, v, at, kind, note} as JSON, and the value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import pyrage
from pyrage import x25519

from broker.vault.errors import CorruptError, VaultUsageError

__all__ = ["recipient", "seal", "unseal"]

_HEADER_LENGTH: Final = 4


def seal(head: dict[str, object], value: bytes, recipients: Sequence[str]) -> bytes:
    """Return the file of one value, readable for every recipient. Raises VaultUsageError."""
    header = json.dumps(head, separators=(",", ":")).encode()
    keys = [recipient(text) for text in recipients]
    sealed: bytes = pyrage.encrypt(len(header).to_bytes(_HEADER_LENGTH, "big") + header + value, keys)
    return sealed


def unseal(sealed: bytes, identities: Sequence[x25519.Identity], where: str) -> tuple[dict[str, object], bytes]:
    """Return header and value of a file; ``where`` names it in the error. Raises CorruptError."""
    try:
        plain = pyrage.decrypt(sealed, list(identities))
        length = int.from_bytes(plain[:_HEADER_LENGTH], "big")
        head = json.loads(plain[_HEADER_LENGTH : _HEADER_LENGTH + length])
    except (pyrage.DecryptError, ValueError) as error:
        raise CorruptError(f"{where} can't be opened ({type(error).__name__}): restore it from your backup") from None
    if not isinstance(head, dict) or set(head) != {"name", "v", "at", "kind", "note"}:
        raise CorruptError(f"{where} was written by something else: restore it from your backup")
    return head, plain[_HEADER_LENGTH + length :]


def recipient(text: str) -> x25519.Recipient:
    """Return an age recipient from its text (``age1…``). Raises VaultUsageError."""
    try:
        return x25519.Recipient.from_str(text)
    except pyrage.RecipientError:
        raise VaultUsageError(f"{text[:80]!r} is no age recipient: it looks like age1…") from None
