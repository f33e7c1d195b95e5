"""One budget as one node knows it: what was used, what was added, what waits to be told. State and arithmetic, no I/O.

Called by budgets. Must never make more of a budget than its job's own signed bound and what operators signed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from node_agent.run import Run
from runner.wire.command import Command
from runner.wire.flow import BUDGET_UNITS, Budget

__all__ = ["UNREADABLE", "Account", "Member", "Over"]

#: What a counter stands for that is no number: more than any bound.
UNREADABLE: Final = 1e300
DEFAULT_TTL_S: Final = 30 * 86_400.0
#: A sum of shares of a second is over its bound by more than the rounding of floats.
_SLACK: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Over:
    """A bound that was passed."""

    unit: str
    used: float
    bound: float

    def __str__(self) -> str:
        return f"{self.unit}: {self.used:g} of {self.bound:g} used"


@dataclass(slots=True, eq=False)
class Member:
    """One attempt that spends from a budget. ``wall_s``, ``cpu_s``: what was charged for it so far."""

    run: Run
    attempt: str
    budget: Budget
    wall_s: float = 0.0
    cpu_s: float = 0.0
    looked_s: float = 0.0
    #: Before this its CPU time is not looked at again.
    rested_s: float = 0.0
    #: Not released yet: nothing of it runs.
    waits: bool = True
    #: An order for it is under way.
    busy: bool = False
    #: Somebody was told that a model of its has no price.
    unpriced: bool = False
    ended_s: float | None = None


@dataclass(slots=True, eq=False)
class Account:
    """The budget ``key`` of a tenant. ``known``: the store was asked at least once; ``era``: verified words so far."""

    tenant: str
    key: str
    members: dict[str, Member] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    words: dict[str, Command] = field(default_factory=dict)
    #: Words that no trusted key signed, so that each is looked at once.
    void: set[str] = field(default_factory=set)
    pending: dict[str, float] = field(default_factory=dict)
    sending: dict[str, float] | None = None
    batch: int = 0
    known: bool = False
    #: Attempts of this node that a word is to be answered for yet: those that were here when it was read.
    unanswered: dict[str, set[str]] = field(default_factory=dict)
    hit_told: int = -1
    #: What the store has to hold at least, and what it has lost: that counts here all the same.
    floor: dict[str, float] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    #: What its last member wanted, once it has none.
    kept_s: float = DEFAULT_TTL_S

    def charge(self, unit: str, amount: float) -> None:
        """Note what was used; it is told with the next batch."""
        if amount > 0:
            self.pending[unit] = self.pending.get(unit, 0.0) + amount

    def next_batch(self, numbers: Iterator[int]) -> dict[str, float]:
        """Return what is to be told: the last batch as long as nobody has acknowledged it, else a new one.

        ``numbers``: of this boot. Who comes back to a budget later must not repeat those that the store knows.
        """
        if self.sending is None:
            self.sending, self.pending = self.pending, {}
            self.batch = next(numbers)
        return self.sending

    def acknowledged(self, used: dict[str, float]) -> None:
        """The store has added the batch, and this is the sum of the whole fleet.

        A sum only grows while somebody spends from it: one that was set back gives nothing to this node's jobs.
        """
        for unit, sent in (self.sending or {}).items():
            self.floor[unit] = self.floor.get(unit, 0.0) + sent
        for unit in self.floor.keys() | used.keys():
            least, found = self.floor.get(unit, 0.0), used.get(unit, 0.0)
            if found < least - _SLACK * max(1.0, least):
                self.lost[unit] = self.lost.get(unit, 0.0) + least - found
            if found < UNREADABLE:
                self.floor[unit] = found
        self.sending, self.used, self.known = None, used, True

    def heard(self, word: Command) -> None:
        """A verified word was read for the first time."""
        self.words[word.id] = word
        self.unanswered[word.id] = set(self.members)

    def leave(self, attempt: str) -> None:
        """An attempt is over."""
        self.kept_s = self.ttl_s
        self.members.pop(attempt, None)

    def total(self, unit: str) -> float:
        """Return what was used of a unit, as far as this node knows."""
        sending = self.sending or {}
        told = self.used.get(unit, 0.0) + self.lost.get(unit, 0.0)
        return told + sending.get(unit, 0.0) + self.pending.get(unit, 0.0)

    def bound(self, budget: Budget, unit: str) -> float | None:
        """Return a job's bound with what was added: of an approval without amounts, the bound once more."""
        first = budget.bounds.get(unit)
        if first is None:
            return None
        added = (word.add.get(unit, 0.0) if word.add else first for word in self.words.values() if word.op == "approve")
        return first + sum(added)

    def over(self, budget: Budget) -> Over | None:
        """Return a bound of a job that was passed, None while there is room."""
        for unit in budget.bounds:
            bound, used = self.bound(budget, unit), self.total(unit)
            if bound is not None and used > bound + _SLACK * max(1.0, bound):
                return Over(unit, used, bound)
        return None

    @property
    def denied(self) -> Command | None:
        """The last word, if it was a no."""
        last = max(self.words.values(), key=lambda word: (word.issued_at_ms, word.id), default=None)
        return last if last is not None and last.op == "deny" else None

    @property
    def ttl_s(self) -> float:
        """How long after its last use it is kept, as the job wants it that wants it longest."""
        return max((member.budget.ttl_s for member in self.members.values()), default=self.kept_s)

    def view(self, budget: Budget) -> dict[str, dict[str, float]]:
        """Return used, bound and left of each bounded unit."""
        found = {}
        for unit in sorted(BUDGET_UNITS & budget.bounds.keys()):
            bound = self.bound(budget, unit) or 0.0
            used = self.total(unit)
            found[unit] = {"used": used, "bound": bound, "left": max(0.0, bound - used)}
        return found
