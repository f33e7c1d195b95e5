"""Selector kills that this agent knows: does one hit a job?

Called by rq_store (fills the tables) and, through it, by the supervisor and control. Pure. Must never trust a number of
a job hash or a table that lies above the counter (attacks 22, 23).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from node_agent import turn_codec
from node_agent.turns import Cutoff, KillWord

__all__ = ["Cutoffs"]

#: The field of a table that counts its changes.
VERSION = "#"


class Cutoffs:
    """The controllers' table (name "") and the tables of tenants, as last read, and the job counter."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, KillWord]] = {}
        self._versions: dict[str, str] = {}
        self._counter = 0

    def versions(self) -> dict[str, str]:
        """Return the known version of each table."""
        return dict(self._versions)

    def seen(self, counter: int) -> None:
        """Note the job counter."""
        self._counter = max(self._counter, counter)

    def replace(self, name: str, table: Mapping[str, bytes]) -> None:
        """Take a table as read; malformed cutoffs are left out."""
        self._versions[name] = table.get(VERSION, b"0").decode("utf-8", "replace")
        words = ((field, turn_codec.word(value)) for field, value in table.items() if field != VERSION)
        self._tables[name] = {field: word for field, word in words if word is not None}

    def find(self, job: str, seq: int, selectors: Iterable[str]) -> KillWord | None:
        """Return a cutoff that hits the job: of the controllers, or of its own tenant; of others never."""
        number = seq if 0 <= seq <= self._counter else 0
        fields = tuple(selectors)
        for name in ("", job.partition("-")[0]):
            table = self._tables.get(name, {})
            for field in fields:
                word = table.get(field)
                if word is not None and number <= word.seq <= self._counter:
                    return word
        return None

    def all(self, names: Iterable[str]) -> tuple[Cutoff, ...]:
        """Return every known cutoff of the named tables."""
        return tuple(Cutoff(name, field, word) for name in names for field, word in self._tables.get(name, {}).items())
