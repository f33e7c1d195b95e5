"""Records on an attempt's kernel channel (descriptor 100) between agent and worker.

Called by the agent's containment and the guest. A record is one SEQPACKET message: an op byte, then a body. Must never
let a record of the job be taken for one of ours: after ``release`` the agent reads only known ops, anything else ends
the session.

    agent → worker   PLAN (values + descriptors) · PAYLOAD (chunk, more follow) · RELEASE (last chunk: run) ·
                     NEXT (turn, whole payload + stdout, stderr, result: another attempt of a reused worker) ·
                     SESSION (+ one end of a session of calls, see calls.py) · BUSY (too many sessions stand)
    worker → agent   READY (restricted, nothing run yet) · FAILED (JSON {step, errno}) · RUNNING (payload complete) ·
                     DONE (exit code, turn: an attempt of a reused worker has ended) ·
                     OPEN (some process of the job asks for a session of calls; any of them may take the answer)
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from runner.wire.errors import CodecError

__all__ = [
    "CHUNK_BYTES",
    "FD_BROKER",
    "FD_KERNEL",
    "FD_RESULT",
    "MAX_RECORD_BYTES",
    "TURN_BYTES",
    "Op",
    "chunks",
    "pack",
    "unpack",
]

#: The job's fixed descriptors (also named in RINGFENCE_FDS).
FD_KERNEL: Final = 100
FD_BROKER: Final = 101
FD_RESULT: Final = 102
MAX_RECORD_BYTES: Final = 64 * 1024
#: What tells the attempts of a reused worker apart.
TURN_BYTES: Final = 16
CHUNK_BYTES: Final = 32 * 1024


class Op(IntEnum):
    """First byte of a record."""

    PLAN = 1
    PAYLOAD = 2
    RELEASE = 3
    NEXT = 4
    SESSION = 5
    BUSY = 6
    READY = 16
    FAILED = 17
    RUNNING = 18
    DONE = 19
    OPEN = 20


def pack(op: Op, body: bytes = b"") -> bytes:
    """Return one record. Raises CodecError over MAX_RECORD_BYTES."""
    if len(body) >= MAX_RECORD_BYTES:
        raise CodecError(f"a record has at most {MAX_RECORD_BYTES} bytes")
    return bytes((op,)) + body


def unpack(data: bytes) -> tuple[Op, bytes]:
    """Return (op, body). Raises CodecError for an empty or oversized record or an unknown op."""
    if not data or len(data) > MAX_RECORD_BYTES:
        raise CodecError("an empty or oversized record")
    try:
        return Op(data[0]), data[1:]
    except ValueError:
        raise CodecError("an unknown op") from None


def chunks(payload: bytes) -> Iterator[bytes]:
    """Yield the records that carry ``payload``: PAYLOAD …, then one RELEASE with the last chunk."""
    start = 0
    while len(payload) - start > CHUNK_BYTES:
        yield pack(Op.PAYLOAD, payload[start : start + CHUNK_BYTES])
        start += CHUNK_BYTES
    yield pack(Op.RELEASE, payload[start:])
