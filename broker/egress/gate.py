"""How much one attempt may ask at once, and how much it may send with one request.

Made by the door, passed by each request. Must never count a request twice, or let one go on beyond
its size (attack 42).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from broker.egress.errors import CrowdedError, TooLargeError
from broker.egress.rules import Destination

__all__ = ["Gate"]

_MIB: Final = 1 << 20


class Gate:
    """``most``: requests under way at once. ``body_bytes``: of one request."""

    def __init__(self, most: int, body_bytes: int) -> None:
        self._most, self._body_bytes = most, body_bytes
        self._inside = 0
        self._at: dict[Destination, int] = {}

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Be a request that is under way. Raises CrowdedError."""
        if self._inside >= self._most:
            raise CrowdedError(f"this job has {self._most} requests under way, and may have no more at once")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @contextmanager
    def at(self, host: Destination) -> Iterator[None]:
        """Be a request to ``host``."""
        self._at[host] = self._at.get(host, 0) + 1
        try:
            yield
        finally:
            self._at[host] -= 1
            if not self._at[host]:
                del self._at[host]

    def bounded(self, host: Destination, most: int | None) -> None:
        """Let one of the requests to ``host`` go on. Raises CrowdedError: they are more than ``most``."""
        if most is not None and self._at.get(host, 0) > most:
            raise CrowdedError(f"the rule of its secret allows {most} requests to {host} at once")

    def sized(self, size: int, most: int | None = None) -> None:
        """Let a body of so many bytes pass; ``most``: a rule's bound. Raises TooLargeError."""
        bound = self._body_bytes if most is None else min(most, self._body_bytes)
        if size > bound:
            raise TooLargeError(f"a request may send {_bytes(bound)}, and no more")


def _bytes(count: int) -> str:
    return f"{count // _MIB} MiB" if count % _MIB == 0 else f"{count} bytes"
