"""Printing: our own lines to stderr behind a fixed prefix, tables, JSON, and a job's bytes.

Called by the commands. Must never print a value of a job or of the store that `text` has not made harmless.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import BinaryIO, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner.cli.text import PREFIX, LineGuard, Screen, safe, safe_json
from runner.wire import codec, values

__all__ = ["JobOutput", "print_fields", "print_json", "print_line", "print_table", "say"]

#: File descriptors as a job's log names them.
STDOUT: Final = 1
STDERR: Final = 2
_STATE_STYLE: Final = {
    "running": "cyan",
    "finished": "green",
    "ready": "green",
    "failed": "red",
    "refused": "red",
    "lost": "red",
    "expired": "red",
    "killed": "yellow",
    "killing": "yellow",
    "unhealthy": "red",
}


def say(message: str) -> None:
    """Print one line of our own to stderr.

    ``message`` may hold foreign text: a line end in it is shown escaped, or what follows would be taken for ours.
    """
    sys.stderr.write(f"{PREFIX}{safe(message)}\n")
    sys.stderr.flush()


def print_line(text: str) -> None:
    """Print one harmless line to stdout."""
    sys.stdout.write(f"{safe(text)}\n")
    sys.stdout.flush()


def print_json(value: object) -> None:
    """Print one JSON document on one line: plain values and records, ASCII only."""
    sys.stdout.write(safe_json(json.dumps(value, ensure_ascii=True, default=_plain)) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below a heading: in colour on a terminal, in plain aligned columns otherwise."""
    clean = [[safe(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(Text(column), overflow="fold")
        for row in clean:
            table.add_row(*(Text(cell, style=_STATE_STYLE.get(cell.partition("(")[0], "")) for cell in row))
        Console(highlight=False, emoji=False, markup=False).print(table)
        return
    lines = [list(columns), *clean]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Print name and value pairs, one a line; names are ours, values are made harmless."""
    width = max((len(name) for name, _ in fields), default=0)
    for name, value in fields:
        sys.stdout.write(f"{name.ljust(width)}  {safe(value)}".rstrip() + "\n")
    sys.stdout.flush()


class JobOutput:
    """A job's two streams on ours. Terminals get harmless text; pipes get the bytes.

    A pipe that also carries our own lines (stderr, or stdout where both are the same) gets the bytes but no line that
    could be taken for ours; ``raw`` lifts that too. With ``to_stderr`` both streams go to our stderr.
    """

    def __init__(self, *, raw: bool = False, to_stderr: bool = False) -> None:
        err = _Sink(sys.stderr.buffer, raw=raw, shared=True)
        out = err if to_stderr else _Sink(sys.stdout.buffer, raw=raw, shared=_same_file())
        self._sinks = {STDOUT: out, STDERR: err}

    def write(self, descriptor: int, data: bytes) -> None:
        """Pass on what the job wrote to its ``descriptor`` (1 or 2)."""
        self._sinks.get(descriptor, self._sinks[STDERR]).write(data)

    def close(self) -> None:
        """Print what was held back, and begin a new line on a terminal, so that our lines start at its edge."""
        for sink in dict.fromkeys(self._sinks.values()):
            sink.close()


class _Sink:
    """One of our streams as the target of job bytes."""

    def __init__(self, file: BinaryIO, *, raw: bool, shared: bool) -> None:
        self._file = file
        self._screen = Screen() if file.isatty() and not raw else None
        self._guard = LineGuard() if self._screen is None and shared and not raw else None

    def write(self, data: bytes) -> None:
        if self._screen is not None:
            data = self._screen.feed(data).encode("utf-8", "backslashreplace")
        elif self._guard is not None:
            data = self._guard.feed(data)
        self._put(data)

    def close(self) -> None:
        if self._screen is not None:
            text = self._screen.close()
            if not self._screen.at_line_start:
                text += "\n"
            self._put(text.encode("utf-8", "backslashreplace"))
        elif self._guard is not None:
            self._put(self._guard.close())

    def _put(self, data: bytes) -> None:
        if data:
            self._file.write(data)
            self._file.flush()


def _plain(value: object) -> object:
    """Return a record with all its fields, also empty ones, and other values in their tagged form (DESIGN §10)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return values.encode(value, codec.MAX_BYTES)


def _same_file() -> bool:
    """Return whether stdout and stderr lead to the same place."""
    first, second = os.fstat(sys.stdout.fileno()), os.fstat(sys.stderr.fileno())
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)
