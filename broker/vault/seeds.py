"""The first key of the audit's chain, sealed like a secret: who checks the record needs it, and the host's key for it.

Called by the keystore and by `ringfence vault audit`, which may read it while a broker has the vault open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyrage import x25519

from broker.vault import sealing
from broker.vault.disk import Folder
from broker.vault.errors import CorruptError

__all__ = ["FILE", "SEED_BYTES", "read", "seal"]

FILE: Final = "audit.seed"
SEED_BYTES: Final = 32
_MAX_FILE_BYTES: Final = 16 * 1024
#: No secret can have this name, so a secret's file in its place is found out.
_HEAD: Final = {"name": "@audit", "v": 1, "at": 0, "kind": "seed", "note": ""}


def seal(seed: bytes, recipients: Sequence[str]) -> bytes:
    """Return the file of a seed."""
    return sealing.seal(dict(_HEAD), seed, recipients)


def read(folder: Folder, identities: Sequence[x25519.Identity]) -> bytes:
    """Return the seed of a vault. Raises CorruptError."""
    try:
        sealed = folder.read(FILE, _MAX_FILE_BYTES)
    except FileNotFoundError:
        raise CorruptError(f"{folder.path / FILE} is gone: restore it from your backup") from None
    head, seed = sealing.unseal(sealed, identities, FILE)
    if head != _HEAD or len(seed) != SEED_BYTES:
        raise CorruptError(f"{folder.path / FILE} holds something else: restore it from your backup")
    return seed
