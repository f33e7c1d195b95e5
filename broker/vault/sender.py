"""One message of a channel, and the process that sent it: what peer.py, darwin.py and windows.py make.

Called by all that read a channel. Must never import what one system alone has.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_MESSAGE_BYTES", "Message", "Sender"]

MAX_MESSAGE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Sender:
    """The process that sent one message. ``pidfd`` pins it; None: it could not be pinned, so it is nobody."""

    pid: int
    uid: int
    pidfd: int | None


@dataclass(frozen=True, slots=True)
class Message:
    """One message with its sender and descriptors; ``close`` when done. ``cut``: it was longer than is read."""

    data: bytes
    sender: Sender
    fds: tuple[int, ...]
    cut: bool

    def close(self) -> None:
        """Close the pin and every descriptor that was not taken over."""
        for fd in (*self.fds, *(() if self.sender.pidfd is None else (self.sender.pidfd,))):
            with suppress(OSError):
                os.close(fd)

    def without_fds(self) -> Message:
        """Return the message without its descriptors: somebody else has taken them over."""
        return Message(self.data, self.sender, (), self.cut)
