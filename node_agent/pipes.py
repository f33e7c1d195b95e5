"""Which pipes of jobs hold something to read: one poll of its own for all of them.

Called by the supervisor (owns one) and each Capture. A job's pipes are watched for some milliseconds: here that costs a
call of the kernel at each end, in the event loop also the objects that it keeps for every descriptor. Must never keep a
descriptor that its owner has closed.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

__all__ = ["Pipes"]


class Pipes:
    """Watches pipes of one loop; ``close`` is idempotent."""

    def __init__(self) -> None:
        self._readers: dict[int, Callable[[int], object]] = {}
        self._poll: select.epoll | None = None

    def watch(self, fd: int, reader: Callable[[int], object]) -> None:
        """Call ``reader(fd)`` whenever there is something to read, or the end, until ``forget``."""
        if self._poll is None:
            self._poll = select.epoll()
            asyncio.get_running_loop().add_reader(self._poll.fileno(), self._ready)
        self._poll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def forget(self, fd: int) -> None:
        """Watch it no more; before it is closed. A descriptor that is not watched is no error."""
        if self._readers.pop(fd, None) is not None and self._poll is not None:
            self._poll.unregister(fd)

    def close(self) -> None:
        """Give everything back."""
        poll, self._poll = self._poll, None
        self._readers.clear()
        if poll is not None:
            asyncio.get_running_loop().remove_reader(poll.fileno())
            poll.close()

    def _ready(self) -> None:
        poll = self._poll
        for fd, _ in poll.poll(0) if poll is not None else ():
            # A reader may have forgotten others of the same look.
            reader = self._readers.get(fd)
            if reader is not None:
                reader(fd)
