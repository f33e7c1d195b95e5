"""What one attempt has of mail: its pace, the letters that it holds, the calls of it that wait. State, no I/O.

Called by mail. Must never let an attempt have more calls waiting than MOST_WAITING.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from node_agent.kernel.bucket import Bucket
from node_agent.kernel.errors import CallError
from runner.wire.calls import ErrorCode

__all__ = ["MAX_WAIT_S", "MOST_WAITING", "Desk", "Held", "Waiting"]

#: Longest that a call waits, in seconds.
MAX_WAIT_S: Final = 300.0
#: Most calls of an attempt that wait.
MOST_WAITING: Final = 64


@dataclass(slots=True)
class Held:
    """What an attempt holds: enough to acknowledge and to answer it."""

    times: int
    letter: str
    sender: str
    answer: bool
    confirm: bool
    until_s: float


@dataclass(slots=True)
class Desk:
    """One attempt's mail."""

    bucket: Bucket
    held: dict[tuple[str, str], Held] = field(default_factory=dict)
    waiting: int = 0
    over: bool = False


class Waiting:
    """A place among the calls of an attempt that wait; none is needed for no time."""

    def __init__(self, desk: Desk, wait_s: float) -> None:
        self._desk, self._wait_s = desk, wait_s

    def __enter__(self) -> None:
        if not 0 <= self._wait_s <= MAX_WAIT_S:
            raise CallError(ErrorCode.BAD_REQUEST, f"wait_s is 0 to {MAX_WAIT_S:g} seconds")
        if self._wait_s and self._desk.waiting >= MOST_WAITING:
            raise CallError(ErrorCode.QUOTA, f"at most {MOST_WAITING} calls of a job wait for mail at a time")
        self._desk.waiting += 1

    def __exit__(self, *_: object) -> None:
        self._desk.waiting -= 1
