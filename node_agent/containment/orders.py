"""The forms of what agent and mould say to each other for every attempt: few bytes, read without a parser.

Called by the mould and by the agent's handle on it. Must never take anything else than these forms for one: a record
that is none raises ValueError, and its reader ends the mould. Everything rarer is JSON (see mould.py).

    agent → mould    the order's letter, the attempt's name, NUL, the doors that it needs (commas between), NUL, and
                     what the mould is to learn (known.py); doors and lesson with BEGIN alone
    mould → agent    END_MARK, a fixed head (the fields of End in their order) and the attempt's name
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "BEGIN",
    "CONT",
    "END_MARK",
    "LETTERS",
    "SIGNALS",
    "STOP",
    "TERM",
    "End",
    "end_of",
    "end_record",
    "order_of",
    "order_record",
]

#: What a mould is told to do.
BEGIN: Final = b"b"
TERM: Final = b"t"
STOP: Final = b"s"
CONT: Final = b"c"
#: What a worker can be told, and nothing else: the order's letter for each signal.
SIGNALS: Final = {TERM: signal.SIGTERM, b"i": signal.SIGINT, b"1": signal.SIGUSR1, b"2": signal.SIGUSR2}
LETTERS: Final = {int(number): letter for letter, number in SIGNALS.items()}
END_MARK: Final = b"E"
#: Mark, raw wait status, microseconds of cpu, largest process in bytes, processes, and those left behind.
_HEAD: Final = struct.Struct("=ciqqqq")
_MICROSECONDS: Final = 1_000_000
#: An attempt, doors, a lesson.
_ORDER_WORDS: Final = 3


@dataclass(frozen=True, slots=True)
class End:
    """A mould's word on an attempt, given after kill(-1) and ECHILD. ``status`` is a raw wait status.

    ``left``: how many processes the first one left behind.
    """

    attempt: str
    status: int
    cpu_s: float
    max_rss_bytes: int
    processes: int
    left: int = 0


def order_record(order: bytes, attempt: str, doors: Sequence[str] = (), lesson: bytes = b"") -> bytes:
    """Return the record of an order."""
    return b"%b%b\0%b\0%b" % (order, attempt.encode("ascii"), ",".join(doors).encode("ascii"), lesson)


def order_of(data: bytes) -> tuple[bytes, str, list[str], bytes]:
    """Return an order's letter, attempt, doors and lesson; whoever reads it knows the letters. Raises ValueError."""
    words = data[1:].split(b"\0", 2)
    if len(words) < _ORDER_WORDS:
        raise ValueError("no order")
    attempt, doors, lesson = words
    return data[:1], attempt.decode("ascii"), doors.decode("ascii").split(",") if doors else [], lesson


def end_record(attempt: str, status: int, cpu_us: int, max_rss_bytes: int, processes: int, left: int) -> bytes:
    """Return the record of an end."""
    return _HEAD.pack(END_MARK, status, cpu_us, max_rss_bytes, processes, left) + attempt.encode("ascii")


def end_of(data: bytes) -> End:
    """Return the end that a record tells. Raises ValueError."""
    try:
        mark, status, cpu_us, max_rss_bytes, processes, left = _HEAD.unpack_from(data)
    except struct.error as error:
        raise ValueError("no end") from error
    if mark != END_MARK or min(cpu_us, max_rss_bytes, processes, left) < 0:
        raise ValueError("no end")
    attempt = data[_HEAD.size :].decode("ascii")
    return End(attempt, status, cpu_us / _MICROSECONDS, max_rss_bytes, processes, left)
