"""What exactly is signed: domain, length and the received bytes.

Called by runner.signing. Must never let a signature of one kind of record verify as another kind (attack 26).
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Domain", "signing_bytes"]


class Domain(StrEnum):
    """The kinds of signed records."""

    JOB = "ringfence/job/1"
    SCHEDULE = "ringfence/schedule/1"
    CHILD = "ringfence/child/1"
    COMMAND = "ringfence/command/1"
    RECEIPT = "ringfence/receipt/1"
    EVENT = "ringfence/event/1"
    OUTCOME = "ringfence/outcome/1"
    CARD = "ringfence/card/1"
    #: What nodes say to each other for their jobs: letters, signals, and the answers to them.
    MAIL = "ringfence/mail/1"
    HEAD = "ringfence/head/1"
    #: What a node wrote down of a call that a person decides on.
    QUESTION = "ringfence/question/1"
    #: The root of a hash tree over records of the other kinds, each with its own domain (runner/signing.py).
    SHARED = "ringfence/shared/1"


def signing_bytes(domain: Domain, payload: bytes) -> bytes:
    """Return the bytes that an Ed25519 signature covers: domain tag, payload length, payload."""
    return b"%s\n%d\n%s" % (domain.encode("ascii"), len(payload), payload)
