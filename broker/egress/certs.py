"""A certificate authority of one attempt, and its certificates for the hosts of the attempt's proxied secrets. Pure.

Called by the agent (what the job is to trust) and by the egress process (what it shows to the job's TLS clients). Both
make the same keys from one seed, so that a restart of the egress process changes nothing for a running job. Must never
be trusted anywhere but inside that job, nor share a key between two attempts.

Source: RFC 5280, RFC 8410 (Ed25519 in X.509), X.690 (DER).
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from nacl.signing import SigningKey

__all__ = ["SEED_BYTES", "Authority"]

SEED_BYTES: Final = 32
_DAY_S: Final = 86_400
_LIFE_DAYS: Final = 365
_INTEGER, _BITS, _OCTETS, _OID, _TEXT, _TIME, _SEQUENCE, _SET = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x18, 0x30, 0x31
_TRUE: Final = bytes((0x01, 0x01, 0xFF))
_ED25519: Final = bytes.fromhex("300506032b6570")
_COMMON_NAME: Final = bytes.fromhex("550403")
_SUBJECT_KEY, _KEY_USAGE, _ALT_NAME, _CONSTRAINTS, _AUTHORITY_KEY, _PURPOSE = 14, 15, 17, 19, 35, 37
_FOR_SERVERS: Final = bytes.fromhex("06082b06010505070301")
#: PKCS #8 up to the 32 bytes of the key.
_PRIVATE: Final = bytes.fromhex("302e020100300506032b657004220420")


@dataclass(frozen=True, slots=True)
class Authority:
    """All that follows from ``seed``. ``made_at``: Unix time in seconds."""

    seed: bytes
    made_at: int

    @property
    def pem(self) -> str:
        """The authority's own certificate: what a job's clients are told to trust."""
        key = self._key(b"authority")
        extensions = (
            _extension(_CONSTRAINTS, _tlv(_SEQUENCE, _TRUE, _tlv(_INTEGER, b"\0")), critical=True),
            _extension(_KEY_USAGE, _tlv(_BITS, b"\x01\x06"), critical=True),
            _extension(_SUBJECT_KEY, _tlv(_OCTETS, _digest(key))),
        )
        return _armoured("CERTIFICATE", self._certificate(key, self._name, extensions))

    def chain(self, host: str) -> str:
        """Return certificate and private key for a host name or address, as one PEM text."""
        key = self._key(b"server")
        try:
            entry = _tlv(0x87, ip_address(host).packed)
        except ValueError:
            entry = _tlv(0x82, host.encode("ascii"))
        authority = _tlv(0x80, _digest(self._key(b"authority")))
        extensions = (
            _extension(_ALT_NAME, _tlv(_SEQUENCE, entry), critical=True),
            _extension(_CONSTRAINTS, _tlv(_SEQUENCE), critical=True),
            _extension(_KEY_USAGE, _tlv(_BITS, b"\x07\x80"), critical=True),
            _extension(_PURPOSE, _tlv(_SEQUENCE, _FOR_SERVERS)),
            _extension(_SUBJECT_KEY, _tlv(_OCTETS, _digest(key))),
            _extension(_AUTHORITY_KEY, _tlv(_SEQUENCE, authority)),
        )
        certificate = self._certificate(key, _tlv(_SEQUENCE), extensions, serial=host.encode("ascii"))
        return _armoured("CERTIFICATE", certificate) + _armoured("PRIVATE KEY", _PRIVATE + bytes(key))

    @property
    def _name(self) -> bytes:
        # A name of its own for each, so that no client takes one attempt's for another's.
        text = f"Ringfence job {hashlib.sha256(self.seed).hexdigest()[:16]}".encode("ascii")
        pair = _tlv(_SEQUENCE, _tlv(_OID, _COMMON_NAME), _tlv(_TEXT, text))
        return _tlv(_SEQUENCE, _tlv(_SET, pair))

    def _key(self, use: bytes) -> SigningKey:
        return SigningKey(hashlib.sha256(b"ringfence/ca/1/" + use + b"/" + self.seed).digest())

    def _certificate(
        self, key: SigningKey, subject: bytes, extensions: tuple[bytes, ...], serial: bytes = b""
    ) -> bytes:
        number = b"\x01" + hashlib.sha256(self.seed + serial).digest()[:15]
        body = _tlv(
            _SEQUENCE,
            _tlv(0xA0, _tlv(_INTEGER, b"\x02")),
            _tlv(_INTEGER, number),
            _ED25519,
            self._name,
            _tlv(_SEQUENCE, _moment(self.made_at - _DAY_S), _moment(self.made_at + _LIFE_DAYS * _DAY_S)),
            subject,
            _tlv(_SEQUENCE, _ED25519, _tlv(_BITS, b"\0" + bytes(key.verify_key))),
            _tlv(0xA3, _tlv(_SEQUENCE, *extensions)),
        )
        signature = self._key(b"authority").sign(body).signature
        return _tlv(_SEQUENCE, body, _ED25519, _tlv(_BITS, b"\0" + signature))


def _tlv(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content


def _extension(number: int, value: bytes, *, critical: bool = False) -> bytes:
    name = _tlv(_OID, bytes((0x55, 0x1D, number)))
    return _tlv(_SEQUENCE, name, _TRUE if critical else b"", _tlv(_OCTETS, value))


def _moment(moment_s: int) -> bytes:
    return _tlv(_TIME, time.strftime("%Y%m%d%H%M%SZ", time.gmtime(moment_s)).encode("ascii"))


def _digest(key: SigningKey) -> bytes:
    return hashlib.sha256(bytes(key.verify_key)).digest()[:20]


def _armoured(label: str, der: bytes) -> str:
    text = base64.encodebytes(der).decode("ascii").replace("\n", "")
    lines = "\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    return f"-----BEGIN {label}-----\n{lines}\n-----END {label}-----\n"
