"""How far a job says it is: the last word of each moment, as an event of the job's own stream.

Put together by the desk. Must never write as often as a job says something: between two events lies EVERY_S.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.event import EventType

__all__ = ["EVERY_S", "Progress", "SetProgress"]

EVERY_S: Final = 0.5
MAX_NOTE: Final = 256


@dataclass(frozen=True, slots=True)
class SetProgress:
    """``value``: 0 to 1. ``note``: a few words for people."""

    value: float
    note: str = ""


@dataclass(slots=True)
class _Word:
    """What an attempt has said last. ``timer`` runs while the next event has to wait."""

    said: SetProgress | None = None
    timer: asyncio.TimerHandle | None = None


class Progress:
    """The progress of one boot's attempts."""

    def __init__(self, around: Around, every_s: float = EVERY_S) -> None:
        self._around = around
        self._every_s = every_s
        self._words: dict[str, _Word] = {}
        around.ending.append(self._ended)

    def entries(self) -> tuple[Entry, ...]:
        """Return this part's calls."""
        return (
            Entry(
                "progress.set",
                SetProgress,
                self._set,
                "Say how far the job is, 0 to 1, with a note for people; the last word of each half second is shown.",
                "null",
                late=True,
            ),
        )

    def _set(self, caller: Caller, ask: SetProgress) -> Json:
        if not 0.0 <= ask.value <= 1.0 or len(ask.note) > MAX_NOTE:
            raise CallError(ErrorCode.BAD_REQUEST, f"progress is 0 to 1, with a note of at most {MAX_NOTE} characters")
        word = self._words.setdefault(caller.attempt, _Word())
        word.said = ask
        if word.timer is None:
            self._tell(caller, word)
        return None

    def _tell(self, caller: Caller, word: _Word) -> None:
        word.timer = None
        if word.said is None:
            return
        detail: dict[str, str | int | float | bool] = {"value": float(word.said.value), "note": word.said.note}
        word.said = None
        self._around.told(caller.job, caller.run.attempt, EventType.JOB_PROGRESS, detail)
        word.timer = asyncio.get_running_loop().call_later(self._every_s, self._tell, caller, word)

    def _ended(self, caller: Caller) -> None:
        """What it said last still counts."""
        word = self._words.pop(caller.attempt, None)
        if word is None:
            return
        if word.timer is not None:
            word.timer.cancel()
        self._tell(caller, word)
        if word.timer is not None:
            word.timer.cancel()
