"""Errors of the egress process, one root. Each message is one line that a job may read.

    EgressError
    ├── RefusedError      not granted, or an address that no grant of this kind reaches: answered with 403
    ├── UnreachableError  granted, but no name, no route or no answer: answered with 502
    ├── BadRequestError   not a request that a proxy takes: answered with 400
    │   └── LongHeadError  a request's head is longer than one may be: answered with 431
    ├── TooLargeError     more than one request may send: answered with 413
    ├── CrowdedError      more requests at once than the job may have: answered with 429
    └── SecretRefusedError  the broker gives no leave to send a secret there now: answered with 403, 429 or 503

Called by every file of the package. Must never carry a path, an address of the host's own, or another job's name.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BadRequestError",
    "CrowdedError",
    "EgressError",
    "LongHeadError",
    "RefusedError",
    "SecretRefusedError",
    "TooLargeError",
    "UnreachableError",
]

#: The broker's codes, in words and as HTTP says them.
_CODES: Final = {
    "denied": (403, "its secret was not granted for this host, or is granted no more"),
    "expired": (403, "the time of its secret is over"),
    "used-up": (403, "its secret was used as often as the rule allows"),
    "not-this-request": (403, "the rule of its secret does not list this method and path"),
    "pending": (503, "its secret waits for a person's approval"),
    "slow-down": (429, "too many requests at once"),
}


class EgressError(Exception):
    """Root. ``status`` is the HTTP answer, ``socks`` the SOCKS5 reply."""

    status = 500
    socks = 1


class RefusedError(EgressError):
    """This job may not connect there."""

    status = 403
    socks = 2


class UnreachableError(EgressError):
    """The destination was granted and could not be reached."""

    status = 502
    socks = 4


class BadRequestError(EgressError):
    """The job did not speak a proxy's language."""

    status = 400
    socks = 7


class LongHeadError(BadRequestError):
    """The head of a request is larger than one may be."""

    status = 431


class TooLargeError(EgressError):
    """The body of a request is larger than one may be."""

    status = 413


class CrowdedError(EgressError):
    """Too many requests of this job are under way."""

    status = 429


class SecretRefusedError(EgressError):
    """The vault broker gives no leave for this request; nothing was sent."""

    status = 503
    socks = 2

    def __init__(self, code: str) -> None:
        self.status, why = _CODES.get(code, (503, "the vault broker does not give its secret now"))
        super().__init__(why)
        self.code = code
