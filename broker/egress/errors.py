"""Errors of the egress process, one root. Each message is one line that a job may read.

    EgressError
    ├── RefusedError      not granted, or an address that no grant of this kind reaches: answered with 403
    ├── UnreachableError  granted, but no name, no route or no answer: answered with 502
    └── BadRequestError   not a request that a proxy takes: answered with 400

Called by every file of the package. Must never carry a path, an address of the host's own, or another job's name.
"""

from __future__ import annotations

__all__ = ["BadRequestError", "EgressError", "RefusedError", "UnreachableError"]


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
