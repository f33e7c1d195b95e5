"""Which pauses and resumes this node has carried out, on its own disk: none is done twice, none after a later one.

Called by control before it acts. Must never let an order through that the store repeats, holds back past its expiry or
delivers behind a later one (attack 27): a replayed resume would wake a job that was stopped on purpose.

Kept per key and selector, because the orders of one operator for different jobs may overtake each other. A line holds
``KEY SEQUENCE EXPIRES_MS COMMAND SELECTOR``; what has expired is forgotten, since an expired order is refused anyway.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from runner.wire.command import Command

__all__ = ["Sequences"]

#: A client's clock may lead this node's by so much, in milliseconds; beyond it one order would lock out all later ones.
SLACK_MS: Final = 120_000
_FIELDS: Final = 5


class Sequences:
    """The newest order per key and selector."""

    def __init__(self, path: Path, now_ms: int) -> None:
        self._path = path
        self._last: dict[tuple[str, str], tuple[int, int, str]] = {}
        self._fd = -1
        self._load(now_ms)

    def take(self, key_id: str, command: Command, now_ms: int) -> Literal["new", "repeat", "old"]:
        """Judge an order and note a new one durably. ``repeat``: this very order was taken before.

        Raises OSError when it can't be noted: then it must not be carried out.
        """
        if command.sequence > (now_ms + SLACK_MS) * 1000 or command.expires_at_ms <= now_ms:
            return "old"
        last = self._last.get((key_id, command.selector.field))
        if last is not None and command.sequence <= last[0]:
            return "repeat" if (command.sequence, command.id) == (last[0], last[2]) else "old"
        entry = (command.sequence, command.expires_at_ms, command.id)
        self._append(key_id, command.selector.field, entry)
        return "new"

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, key_id: str, selector: str, entry: tuple[int, int, str]) -> None:
        sequence, expires_at_ms, command_id = entry
        line = f"{key_id} {sequence} {expires_at_ms} {command_id} {selector.encode('unicode_escape').decode('ascii')}\n"
        os.write(self._fd, line.encode("ascii"))
        self._last[key_id, selector] = entry

    def _load(self, now_ms: int) -> None:
        text = self._path.read_text("ascii", errors="replace") if self._path.exists() else ""
        for line in text.splitlines():
            parts = line.split(" ", _FIELDS - 1)
            if len(parts) != _FIELDS or not (parts[1] + parts[2]).isdigit() or int(parts[2]) <= now_ms:
                continue
            selector = parts[4].encode("ascii", "replace").decode("unicode_escape", "replace")
            place, entry = (parts[0], selector), (int(parts[1]), int(parts[2]), parts[3])
            if entry[0] > self._last.get(place, (0, 0, ""))[0]:
                self._last[place] = entry
        fresh = self._path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(fresh, flags, 0o600)
        for (key_id, selector), entry in dict(self._last).items():
            self._append(key_id, selector, entry)
        fresh.replace(self._path)
