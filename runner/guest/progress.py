"""A job's progress and artifacts, from inside it.

Called by jobs (`runner.inside.progress`) and ringfence-guest. Must never name a path to the node: bytes go over the
session (attack 10).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from typing import cast

from runner.guest.calls import call
from runner.wire.artifact import PIECE_BYTES

__all__ = ["PIECE_BYTES", "Artifact", "artifact", "set"]


def set(value: float, note: str = "") -> None:
    """Say how far the job is, 0 to 1, with a few words for people. Raises CallRefused."""
    call("progress.set", value=float(value), note=note)


def artifact(name: str, data: bytes | str | os.PathLike[str]) -> str:
    """Give bytes, or the content of a file that this process can read, by name; return their SHA-256 in hex.

    A text is UTF-8. All artifacts of a job have at most 8 MiB together. Raises CallRefused, OSError.
    """
    held = Artifact(name)
    if isinstance(data, os.PathLike):
        with open(data, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                held.write(piece)
    else:
        held.write(data.encode() if isinstance(data, str) else data)
    return held.end()


class Artifact:
    """An artifact that is written bit by bit; what is not ended never shows. One session, so one thread, writes it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rest = b""
        self._sent = 0

    def write(self, data: bytes) -> None:
        """Add bytes. Raises CallRefused."""
        for piece in self._pieces(data):
            self._put(piece, last=False)

    def end(self) -> str:
        """Make it whole; return its SHA-256 in hex. Raises CallRefused."""
        return str(self._put(self._rest, last=True)["sha256"])

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield whole pieces; what is left waits for more, so that the last piece is never sent too early."""
        data = self._rest + data
        while len(data) > PIECE_BYTES:
            piece, data = data[:PIECE_BYTES], data[PIECE_BYTES:]
            yield piece
        self._rest = data

    def _put(self, piece: bytes, *, last: bool) -> dict[str, object]:
        text = base64.b64encode(piece).decode("ascii")
        answer = call("artifact.put", name=self._name, data=text, offset=self._sent, last=last)
        self._sent += len(piece)
        return cast("dict[str, object]", answer)
