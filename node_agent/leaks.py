"""What the scrubber of one attempt found in its output, as its agent hears it: a name, never a value.

Called by the vault desk. Must never stop reading before the attempt is over, and never believe a word longer than a
name.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from runner.wire import codec
from runner.wire.errors import CodecError

__all__ = ["Alarm", "Leak"]

_READ_BYTES: Final = 16 * 1024
_MAX_LINE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Leak:
    """A secret whose value was found and masked. ``kill``: its rule ends the job for that."""

    name: str
    kill: bool


class Alarm:
    """The agent's end of a pipe into which the scrubber writes one line for each secret that it finds first."""

    def __init__(self, fd: int) -> None:
        """``fd`` belongs to this object."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._act: Callable[[Leak], None] | None = None
        self._rest = b""

    def watch(self, act: Callable[[Leak], None]) -> None:
        """Call ``act`` for each leak from now on, and for those that wait."""
        self._act = act
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self.hear)

    def hear(self) -> None:
        """Take what has been written so far."""
        while self._fd >= 0 and self._act is not None:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-_MAX_LINE_BYTES:]
            for line in lines:
                with suppress(CodecError, KeyError, TypeError):
                    found = codec.load(line, limit_bytes=_MAX_LINE_BYTES)
                    self._act(Leak(str(found["name"]), found["kill"] is True))  # type: ignore[index,call-overload] # no object: TypeError

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._fd >= 0:
            if self._act is not None:
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
