"""The files of a flight record: their names, how each begins, and where the last one ends.

Called by the recorder (goes on where an earlier start of the agent stopped) and the checker. Must never change a file,
and never take what is no line for one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from runner.wire import flight
from runner.wire.errors import RecordError

__all__ = ["FOLDER", "End", "Segment", "end_of", "found", "lines_of", "name_of", "opening_of"]

#: Below the node's own folder.
FOLDER: Final = "flight"
_SUFFIX: Final = ".rec"
_PART_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """One file. ``before``: the head of everything that was written before it, in its own word."""

    number: int
    size_bytes: int
    before: str


@dataclass(frozen=True, slots=True)
class End:
    """Where a file's whole lines end. ``fault``: what of it is no line, if anything."""

    count: int
    link: bytes
    size_bytes: int
    fault: str = ""


def name_of(number: int) -> str:
    """Return the name of a file."""
    return f"{number:08}{_SUFFIX}"


def found(folder: int) -> list[Segment]:
    """Return the files in a folder (a descriptor), the oldest first."""
    segments = []
    for name in sorted(os.listdir(folder)):
        stem = name.removesuffix(_SUFFIX)
        if stem == name or not stem.isascii() or not stem.isdigit():
            continue
        number = int(stem)
        fd = os.open(name_of(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            first = os.pread(fd, flight.MAX_LINE_BYTES, 0).partition(b"\n")
            before = opening_of(first[0] + first[1])
            segments.append(Segment(number, os.fstat(fd).st_size, before))
        finally:
            os.close(fd)
    return segments


def opening_of(line: bytes) -> str:
    """Return what a first line says of everything before it; empty if it is no first line."""
    try:
        fields = flight.parsed(flight.body_of(line)[0])
        before = str(fields.get("before", ""))
        flight.parse_head(before)
    except RecordError:
        return ""
    return before if fields.get("kind") == flight.OPENED else ""


def lines_of(fd: int) -> Iterator[bytes]:
    """Yield a file's lines, the last one without its newline if it is torn."""
    rest, at = b"", 0
    while part := os.pread(fd, _PART_BYTES, at):
        at += len(part)
        *whole, rest = (rest + part).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def end_of(folder: int, segment: Segment) -> End:
    """Return where a file ends, for the recorder to go on from. Never raises for what it holds."""
    if not segment.before:
        return End(0, flight.GENESIS, 0, f"{name_of(segment.number)} has no beginning")
    count, digest = flight.parse_head(segment.before)
    link, size, fault = bytes.fromhex(digest), 0, ""
    fd = os.open(name_of(segment.number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        for line in lines_of(fd):
            if not line.endswith(b"\n"):
                # A crash in a write may leave the start of a line, of something that was never done.
                break
            try:
                body, _ = flight.body_of(line)
            except RecordError:
                fault = f"{name_of(segment.number)}: what follows line {count} is no line"
                break
            count, link, size = count + 1, flight.linked(link, body), size + len(line)
    finally:
        os.close(fd)
    return End(count, link, size, fault)
