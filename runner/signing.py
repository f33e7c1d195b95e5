"""Port: nacl. Ed25519 signatures over domain-tagged bytes.

Called by the client (jobs, commands), the node agent (outcomes, receipts, events), keys (cards) and everyone who
verifies. Must never sign or verify without a domain, and never look a key up by its 16-digit label alone.

A signature travels as text ``KEYID.BASE64URL``: the signer's key id (16 hex digits, a label for the look-up only), a
dot, and the 64 signature bytes in base64url without padding. It covers the bytes as they travel; nothing is re-encoded
to verify it, except the one-file form of a receipt (`verify_receipt`).

Several records that are signed in the same moment share one signature, over the root of a hash tree (`sign_all`); each
then carries its own way to the root, ``KEYID.BASE64URL.INDEX.BASE64URL``, and verifies alone. Source of the tree's
form: RFC 6962 section 2.1, leaves and inner nodes hashed apart.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Final

from nacl.bindings import (
    crypto_box_seal,
    crypto_box_seal_open,
    crypto_scalarmult_base,
    crypto_sign,
    crypto_sign_BYTES,
    crypto_sign_ed25519_pk_to_curve25519,
    crypto_sign_ed25519_sk_to_curve25519,
    crypto_sign_open,
    crypto_sign_PUBLICKEYBYTES,
    crypto_sign_seed_keypair,
    crypto_sign_SEEDBYTES,
)
from nacl.exceptions import BadSignatureError, CryptoError
from nacl.exceptions import ValueError as NaclValueError
from nacl.signing import SigningKey

from runner.wire import record
from runner.wire.envelope import Domain, signing_bytes
from runner.wire.receipt import NodeReceipt, PauseReceipt, Receipt

__all__ = [
    "MOST_SHARED",
    "Signer",
    "key_id_of",
    "new_private",
    "sealed_for",
    "signed_receipt",
    "signer_of",
    "verify",
    "verify_receipt",
]

#: Most records under one signature.
MOST_SHARED: Final = 16
#: A way to the root: as many hashes as the tree has levels.
_SIGNATURE: Final = re.compile(
    r"([0-9a-f]{16})\.([A-Za-z0-9_-]{86})(?:\.([0-9]|1[0-5])\.((?:[A-Za-z0-9_-]{43}|[A-Za-z0-9_-]{86}"
    r"|[A-Za-z0-9_-]{128}|[A-Za-z0-9_-]{171})))?"
)
#: Fills a tree up; the hash of nothing.
_NOBODY: Final = bytes(hashlib.sha256().digest_size)
_PUBLIC: Final = re.compile(r"[0-9a-f]{64}")


class Signer:
    """A private key that signs. Its repr shows the key id only."""

    __slots__ = ("_secret", "key_id", "public")

    def __init__(self, private: bytes) -> None:
        """Take the 32 private bytes. Raises ValueError for another length."""
        if len(private) != crypto_sign_SEEDBYTES:
            raise ValueError("a private key has 32 bytes")
        public, self._secret = crypto_sign_seed_keypair(private)
        #: The public key, 64 hex digits.
        self.public: str = public.hex()
        #: First 16 hex digits of SHA-256 of the public bytes.
        self.key_id: str = key_id_of(self.public)

    def sign(self, domain: Domain, payload: bytes) -> str:
        """Return the signature text over ``payload`` in ``domain``."""
        signature = crypto_sign(signing_bytes(domain, payload), self._secret)[:crypto_sign_BYTES]
        return f"{self.key_id}.{_text(signature)}"

    def sign_all(self, records: Sequence[tuple[Domain, bytes]]) -> list[str]:
        """Return a signature text for each of at most MOST_SHARED records; together they cost one signature."""
        if len(records) == 1:
            return [self.sign(*records[0])]
        if len(records) > MOST_SHARED:
            raise ValueError(f"at most {MOST_SHARED} records share a signature")
        levels = [[_leaf(domain, payload) for domain, payload in records]]
        while len(levels[-1]) > 1:
            below = levels[-1]
            if len(below) % 2:
                below.append(_NOBODY)
            levels.append([_node(below[i], below[i + 1]) for i in range(0, len(below), 2)])
        start = self.sign(Domain.SHARED, levels.pop()[0])
        ways = (
            b"".join([level[number >> height ^ 1] for height, level in enumerate(levels)])
            for number in range(len(records))
        )
        return [f"{start}.{number}.{_text(way)}" for number, way in enumerate(ways)]

    def unsealed(self, box: bytes) -> bytes | None:
        """Return what `sealed_for` has sealed for this key; None if it is for another one, or was changed."""
        secret = crypto_sign_ed25519_sk_to_curve25519(self._secret)
        try:
            return bytes(crypto_box_seal_open(box, crypto_scalarmult_base(secret), secret))
        except (CryptoError, NaclValueError, TypeError):
            return None

    def __repr__(self) -> str:
        return f"Signer({self.key_id})"

    def __reduce__(self) -> str:
        raise TypeError("a private key is never serialised")


def new_private() -> bytes:
    """Return a fresh private key: 32 bytes of the kernel's randomness."""
    return bytes(SigningKey.generate())


def sealed_for(public: str, data: bytes) -> bytes:
    """Return ``data`` so that only the owner of the key can read it, and nobody can tell who sealed it."""
    return bytes(crypto_box_seal(data, crypto_sign_ed25519_pk_to_curve25519(bytes.fromhex(public))))


@functools.lru_cache(maxsize=1024)
def key_id_of(public: str) -> str:
    """Return the label of a public key given as 64 hex digits. Raises ValueError."""
    if not _PUBLIC.fullmatch(public):
        raise ValueError("a public key is 64 lower-case hex digits")
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:16]


def signer_of(signature: str) -> str:
    """Return the key id that a signature names, or "" if the text is no signature. A label: proves nothing."""
    match = _SIGNATURE.fullmatch(signature)
    return match[1] if match else ""


def verify(public: str, domain: Domain, payload: bytes, signature: str) -> bool:
    """Return whether ``signature`` is that of ``public`` over ``payload`` in ``domain``. Never raises for bad input."""
    match = _SIGNATURE.fullmatch(signature)
    if match is None or not _PUBLIC.fullmatch(public) or match[1] != key_id_of(public):
        return False
    try:
        raw = base64.urlsafe_b64decode(match[2] + "==")
        if match[3] is None:
            return _holds(public, raw, domain, payload)
        root = _root(_leaf(domain, payload), int(match[3]), base64.urlsafe_b64decode(match[4] + "=="))
    except binascii.Error:
        return False
    return root is not None and _holds_shared(public, raw, root)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _leaf(domain: Domain, payload: bytes) -> bytes:
    return hashlib.sha256(b"\0" + signing_bytes(domain, payload)).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _root(found: bytes, number: int, way: bytes) -> bytes | None:
    """Return the root above leaf ``found``, or None if ``way`` is none of a tree in which it has that number."""
    size = len(_NOBODY)
    for start in range(0, len(way), size):
        beside = way[start : start + size]
        found = _node(beside, found) if number & 1 else _node(found, beside)
        number >>= 1
    return None if number or len(way) % size else found


def _holds(public: str, raw: bytes, domain: Domain, payload: bytes) -> bool:
    if len(raw) != crypto_sign_BYTES or len(bytes.fromhex(public)) != crypto_sign_PUBLICKEYBYTES:
        return False
    try:
        crypto_sign_open(raw + signing_bytes(domain, payload), bytes.fromhex(public))
    except (BadSignatureError, NaclValueError):
        return False
    return True


@functools.lru_cache(maxsize=1024)
def _holds_shared(public: str, raw: bytes, root: bytes) -> bool:
    """Remembered, because the records under one signature mostly come to the same reader."""
    return _holds(public, raw, Domain.SHARED, root)


def signed_receipt(signer: Signer, receipt: Receipt | PauseReceipt | NodeReceipt) -> tuple[bytes, str]:
    """Return (bytes, signature) as they travel in a reply: signer set, signature field empty (see `verify_receipt`)."""
    payload = record.dumps(dataclasses.replace(receipt, signer=signer.key_id, signature=""))
    return payload, signer.sign(Domain.RECEIPT, payload)


def verify_receipt(public: str, receipt: Receipt | PauseReceipt | NodeReceipt) -> bool:
    """Return whether a whole receipt (as ``kill --json`` printed it) carries the signature of ``public``."""
    payload = record.dumps(dataclasses.replace(receipt, signature=""))
    return receipt.signer == signer_of(receipt.signature) and verify(public, Domain.RECEIPT, payload, receipt.signature)
