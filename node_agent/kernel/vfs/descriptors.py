"""Open files of one session: a number, a place in the file, and what may be done by it.

Called by the files part; ends with its session. Must never hand out a number twice while it is open, or more than
MAX_OPEN of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs.nodes import File
from node_agent.kernel.vfs.volume import Volume
from runner.wire.calls import ErrorCode

__all__ = ["MAX_OPEN", "Descriptor", "Descriptors"]

#: Most open descriptors of a session.
MAX_OPEN: Final = 64


@dataclass(slots=True, eq=False)
class Descriptor:
    """One open file. ``append``: every write goes to the end."""

    file: File
    volume: Volume
    read: bool
    write: bool
    append: bool
    offset: int = 0

    def for_reading(self) -> File:
        """Return the file. Raises CallError: it was opened for writing only."""
        if not self.read:
            raise CallError(ErrorCode.BAD_DESCRIPTOR, "this descriptor was not opened for reading")
        return self.file

    def for_writing(self) -> File:
        """Return the file. Raises CallError: it was opened for reading only."""
        if not self.write:
            raise CallError(ErrorCode.BAD_DESCRIPTOR, "this descriptor was not opened for writing")
        return self.file


class Descriptors:
    """All open files of one session."""

    def __init__(self) -> None:
        self._open: dict[int, Descriptor] = {}
        self._ended = False

    def check_room(self) -> None:
        """Raise CallError: the session has no further descriptor, or is over."""
        if self._ended:
            raise CallError(ErrorCode.ENDED, "the session is over")
        if len(self._open) >= MAX_OPEN:
            raise CallError(ErrorCode.QUOTA, f"a session has at most {MAX_OPEN} open files: close some")

    def add(self, descriptor: Descriptor) -> int:
        """Return the lowest free number, which is the descriptor's now; its file counts as open. Raises CallError."""
        self.check_room()
        number = next(number for number in range(MAX_OPEN) if number not in self._open)
        self._open[number] = descriptor
        descriptor.volume.tree.opened(descriptor.file)
        return number

    def get(self, number: int) -> Descriptor:
        """Return an open descriptor. Raises CallError(BAD_DESCRIPTOR)."""
        found = self._open.get(number)
        if found is None:
            raise CallError(ErrorCode.BAD_DESCRIPTOR, f"{number} is not open in this session")
        return found

    def close(self, number: int) -> None:
        """Close one; what was not published through it is not. Raises CallError(BAD_DESCRIPTOR)."""
        found = self.get(number)
        del self._open[number]
        found.volume.close(found.file)

    def discard(self, number: int, descriptor: Descriptor) -> None:
        """Close a descriptor if the number is still its own."""
        if self._open.get(number) is descriptor:
            self.close(number)

    def check_open(self, number: int, descriptor: Descriptor) -> None:
        """Raise CallError: the session ended, or closed it, meanwhile."""
        if self._open.get(number) is not descriptor:
            raise CallError(ErrorCode.ENDED, "the session is over")

    def end(self) -> None:
        """The session is over."""
        self._ended = True
        for number in tuple(self._open):
            self.close(number)
