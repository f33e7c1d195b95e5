"""Calls: what a job may ask its node, as records on a session of its own.

Called by the guest (asks) and node_agent/kernel (answers). Must never carry who asks: the node knows it from the
containment that the session came from. A session is one end of a SEQPACKET pair that the node hands out on descriptor
100 (frames.OPEN, SESSION); every process of the job may have one, none is worth more than another.

    → {"n": 7, "op": "file.stat", "path": "/state/a"}
    ← {"n": 7, "ok": value} · {"n": 7, "err": ErrorCode, "why": text for people}
    ← {"signal": {…}} (once the process has asked for signals)
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["MAX_CALL_BYTES", "MAX_DATA_BYTES", "MAX_SESSIONS", "ErrorCode"]

#: Largest record of either side, and most bytes of data (base64 in it) in one call.
MAX_CALL_BYTES: Final = 64 * 1024
MAX_DATA_BYTES: Final = 32 * 1024
#: Most sessions of one attempt at a time.
MAX_SESSIONS: Final = 16


class ErrorCode(StrEnum):
    """Why a call was not carried out. Nothing of it happened, unless its own text says otherwise."""

    BAD_REQUEST = "bad_request"  # a field is missing, unknown or of a wrong type or size
    UNKNOWN_OP = "unknown_op"  # no such call: the session ends
    DENIED = "denied"  # policy, or a grant that the job does not have
    PENDING = "pending"  # a person has to decide; ask again
    SLOW_DOWN = "slow_down"  # more calls than the rate allows
    QUOTA = "quota"  # a bound of the job, its budget or its tenant is reached
    TOO_LARGE = "too_large"  # the answer or a value is over its bound
    NOT_FOUND = "not_found"
    EXISTS = "exists"
    NOT_A_DIRECTORY = "not_a_directory"
    IS_A_DIRECTORY = "is_a_directory"
    NOT_EMPTY = "not_empty"
    READ_ONLY = "read_only"
    BAD_DESCRIPTOR = "bad_descriptor"
    CONFLICT = "conflict"  # somebody else changed it first
    TIMEOUT = "timeout"
    ENDED = "ended"  # the attempt, or what the call was about, is over
    UNRECORDED = "unrecorded"  # the node can't write its record: no record, no action
    UNAVAILABLE = "unavailable"  # the store is away; ask again
    FAULT = "fault"  # the node failed
