"""What one attempt has been sent: who of its processes listens, what waits behind their masks, and the history.

Called by signals. Pure but for ``push``. Must never hold up what is enforced: only what the job is told can wait here,
once for each name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from runner.wire.codec import Json
from runner.wire.signals import MAX_WHY, UNMASKABLE, Outcome, SignalName

__all__ = ["MOST_TOLD", "Done", "Listener", "Post", "Sent"]

#: How many signals of an attempt are remembered.
MOST_TOLD: Final = 32


@dataclass(frozen=True, slots=True)
class Sent:
    """One signal: who sent it (``job ID``, ``operator NAME``, ``node NAME``), when (Unix ms, UTC) and why.

    Whatever the sender wrote, ``why`` is short and printable here: a history has to fit into one answer.
    """

    name: SignalName
    sender: str
    at_ms: int
    why: str = ""

    def __post_init__(self) -> None:
        plain = "".join(sign if sign.isprintable() else "?" for sign in self.why[:MAX_WHY])
        object.__setattr__(self, "why", plain)

    def shown(self) -> dict[str, Json]:
        """Return it as a job sees it."""
        return {"signal": str(self.name), "from": self.sender, "at_ms": self.at_ms, "why": self.why}


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a signal."""

    outcome: Outcome
    reason: str = ""


@dataclass(slots=True, eq=False)
class Listener:
    """One process that asked for signals. ``push`` sends a record to it and returns False if it takes none now."""

    push: Callable[[dict[str, Json]], bool]
    blocked: frozenset[SignalName] = frozenset()
    #: In the order in which they came; a name that waits already is not added again.
    pending: list[Sent] = field(default_factory=list)
    #: How often what waits is tried again yet; 0: it is not.
    tries: int = 0

    def take(self, sent: Sent) -> Outcome:
        """Hand a signal over, or keep it for later."""
        if sent.name in self.blocked and sent.name not in UNMASKABLE:
            self._keep(sent)
            return "queued"
        if not self.pending_now() and self.push({"signal": sent.shown()}):
            return "delivered"
        if sent.name in UNMASKABLE:
            return "refused"
        self._keep(sent)
        return "queued"

    def mask(self, blocked: Iterable[SignalName]) -> None:
        """Hold these up from now on, and no others: what waited and may come now is handed over in order."""
        self.blocked = frozenset(blocked)
        self.flush()

    def pending_now(self) -> list[Sent]:
        """Return what waits although no mask holds it up: the process takes no records."""
        return [sent for sent in self.pending if sent.name not in self.blocked]

    def flush(self) -> bool:
        """Hand over what may come now; return whether nothing of it is left."""
        for sent in self.pending_now():
            if not self.push({"signal": sent.shown()}):
                return False
            self.pending.remove(sent)
        return True

    def _keep(self, sent: Sent) -> None:
        if all(waits.name != sent.name for waits in self.pending):
            self.pending.append(sent)


@dataclass(slots=True)
class Post:
    """One attempt's signals."""

    listeners: dict[int, Listener] = field(default_factory=dict)
    history: deque[dict[str, Json]] = field(default_factory=lambda: deque(maxlen=MOST_TOLD))

    def leave(self, number: int) -> None:
        """A process listens no more: what waited for it is gone with it."""
        self.listeners.pop(number, None)

    def tell(self, sent: Sent) -> Outcome | None:
        """Hand a signal to every process that listens; None: none does."""
        outcomes = {listener.take(sent) for listener in self.listeners.values()}
        for outcome in ("delivered", "queued", "refused"):
            if outcome in outcomes:
                return outcome
        return None

    def note(self, sent: Sent, done: Done) -> None:
        """Remember what became of a signal; the oldest goes first."""
        self.history.append({**sent.shown(), "outcome": done.outcome, "reason": done.reason})
