"""Makes a job's TLS clients trust the authority that stands for the hosts of its proxied secrets.

Called by bootstrap, before the job starts. Must never take away what they trusted before, nor override what the job was
told to use.
"""

from __future__ import annotations

import os
from typing import Final

__all__ = ["FILE", "VARIABLES", "plant"]

#: On the job's own tmpfs; no secret can be named so.
FILE: Final = "/run/secrets/.ca.pem"
#: OpenSSL and with it Python and Ruby; requests; curl; git; Node, which adds it to its own.
VARIABLES: Final = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS")
_BUNDLES: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


def plant(authority: str, env: dict[str, str]) -> None:
    """Write a bundle of this view's authorities and one more, and name it where ``env`` names none.

    Raises:
        OSError.
    """
    fd = os.open(FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444)
    with os.fdopen(fd, "wb") as file:
        file.write(authority.encode("ascii") + b"\n")
        file.write(_system())
    for name in VARIABLES:
        env.setdefault(name, FILE)


def _system() -> bytes:
    for path in _BUNDLES:
        try:
            with open(path, "rb") as file:
                return file.read()
        except OSError:
            continue
    return b""
