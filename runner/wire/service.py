"""The service on a guest's loopback: its place, its first words, and the frames on it.

Called by the broker (serves it) and by jobs' own tools, which need nothing but this form. Must never begin with a byte
that a client of another protocol can be made to send first (attack 52): a frame is four bytes of length, the highest of
them 0, and a body. The first body that a client sends is PREFACE, every other one of both sides a JSON object.

    → {"op": "ping"} · {"op": "list"} · {"op": "status"}
    ← {"ok": true} · {"ok": true, "names": […]} · {"ok": true, "secrets": [{"name", "state"}]} ·
      {"ok": false, "err": CODE}
"""

from __future__ import annotations

from typing import Final

from runner.wire import codec
from runner.wire.errors import CodecError

__all__ = ["MAX_FRAME_BYTES", "PREFACE", "VARIABLE", "opening", "pack", "take"]

#: Holds its HOST:PORT, in a job that was granted it.
VARIABLE: Final = "RINGFENCE_SERVICE"
PREFACE: Final = b"ringfence-service/1"
MAX_FRAME_BYTES: Final = 16 * 1024
_HEAD_BYTES: Final = 4


def opening() -> bytes:
    """Return what a client sends first."""
    return _framed(PREFACE)


def pack(record: object) -> bytes:
    """Return one record as a frame. Raises CodecError."""
    return _framed(codec.dump(record))


def take(data: bytearray) -> bytes | None:
    """Take one frame's body off the front of ``data``; None: it is not there yet.

    Raises:
        CodecError: this is no frame of ours, or too long a one.
    """
    if data and data[0] != 0:
        raise CodecError("another protocol")
    if len(data) < _HEAD_BYTES:
        return None
    size = int.from_bytes(data[:_HEAD_BYTES], "big")
    if size > MAX_FRAME_BYTES:
        raise CodecError("too long a frame")
    if len(data) < _HEAD_BYTES + size:
        return None
    body = bytes(data[_HEAD_BYTES : _HEAD_BYTES + size])
    del data[: _HEAD_BYTES + size]
    return body


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(_HEAD_BYTES, "big") + body
