"""Commands that operators and clients send to nodes, signed.

Called by client, command line and the agents' control loop. Must never be acted on before its signature, audience and
expiry are checked; a kill that names one job and attempt is executed even if expired (killing is the safe side). A
pause or a resume is never executed after its expiry, nor twice, nor after a later one of the same key (attack 27).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from runner.wire.errors import RecordError
from runner.wire.flow import BUDGET_UNITS, MAX_BUDGET
from runner.wire.signals import FATAL, SignalName

__all__ = ["COMMAND_TTL_S", "MAX_COMMAND_BYTES", "OPERATES", "Command", "Selector"]

#: A command is void after this time, in seconds.
COMMAND_TTL_S: Final = 3600
MAX_COMMAND_BYTES: Final = 16 * 1024
#: Orders to nodes, not to jobs, and what each of them names.
OPERATES: Final = {"drain": "node", "undrain": "node", "suspend": "queue", "unsuspend": "queue"}
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Selector:
    """Which jobs: one by id, or every job of a kind that was enqueued at or before the kill (a cutoff).

    ``value`` is the job id, ``key=value`` for tag, the name for the others, empty for all.
    """

    kind: Literal["job", "tag", "tenant", "queue", "node", "task", "secret", "group", "all"]
    value: str = ""

    def __post_init__(self) -> None:
        if (self.kind == "all") != (not self.value) or len(self.value) > 512:
            raise RecordError("every selector but all needs a value of at most 512 characters", path="selector")

    @property
    def field(self) -> str:
        """The name in the cutoff table, equal to one of ``spec.selectors_of``."""
        return "all" if self.kind == "all" else f"{self.kind}:{self.value}"


@dataclass(frozen=True, slots=True)
class Command:
    """One signed order. ``audience`` is a node's name or ``*``. Times are Unix milliseconds, UTC.

    ``sequence`` orders the pauses and resumes of one key: Unix microseconds, always growing; 0 for a kill, which may be
    repeated. ``secret`` and ``attempt``: what an approve or a deny decides on, and for which attempt of the one job.
    Or ``ask``: the question of that job (rf:ask) that it answers. Or ``budget``, a tenant's by its key: an approve
    adds ``add`` to it (unit → more of it; empty: as much again as was given), a deny kills its jobs.
    ``signal``: which one a signal is; of a kill POLICY or TRUST, if that is why.
    A drain with ``force`` ends what still runs after ``grace_s``: by SIGTERM, and ``checkpoint_s`` later for good.
    """

    id: str
    op: Literal["kill", "pause", "resume", "signal", "approve", "deny", "drain", "undrain", "suspend", "unsuspend"]
    selector: Selector
    issued_at_ms: int
    expires_at_ms: int
    audience: str = "*"
    tenants: tuple[str, ...] | None = None
    grace_s: float = 0.0
    force: bool = False
    reason: str = ""
    by: str = ""
    sequence: int = 0
    secret: str | None = None
    attempt: int | None = None
    checkpoint_s: float = 0.0
    ask: str | None = None
    budget: str | None = None
    add: dict[str, float] = field(default_factory=dict)
    signal: SignalName | None = None
    v: int = VERSION

    def __post_init__(self) -> None:
        if self.v != VERSION:
            raise RecordError(f"version {self.v} is not supported", path="v")
        if (self.op == "kill") != (self.sequence == 0) or self.sequence < 0:
            raise RecordError("a pause and a resume have a sequence, a kill has none", path="sequence")
        self._check_decision()
        self._check_signal()
        kind = OPERATES.get(self.op)
        if kind is not None and self.selector.kind != kind:
            raise RecordError(f"{self.op} names one {kind}", path="selector")
        if not 0 <= self.grace_s <= 86_400 or not 0 <= self.checkpoint_s <= 86_400:
            raise RecordError("grace is 0 to 86,400 seconds", path="grace_s")
        if len(self.reason) > 1024 or len(self.by) > 256:
            raise RecordError("a reason has at most 1,024 characters", path="reason")

    def _check_signal(self) -> None:
        named = self.signal is not None
        fatal = self.op == "kill" and self.signal in FATAL
        if named != (self.op == "signal" or fatal) or (self.op == "signal" and self.signal in FATAL):
            raise RecordError("a signal is named by a signal's order, and one that kills by a kill's", path="signal")

    def _check_decision(self) -> None:
        named = sum(one is not None for one in (self.secret, self.ask, self.budget))
        if named != (self.op in ("approve", "deny")):
            raise RecordError("a decision names a secret, a question or a budget, nothing else does", path="op")
        if (self.secret is None) != (self.attempt is None):
            raise RecordError("a decision on a secret names an attempt, nothing else does", path="attempt")
        if named and self.selector.kind != ("tenant" if self.budget is not None else "job"):
            raise RecordError("a decision is for one job, or one tenant's budget", path="selector")
        if self.add and (self.budget is None or self.op != "approve" or not _is_more(self.add)):
            raise RecordError("an approval of a budget adds positive amounts of what budgets bound", path="add")


def _is_more(add: dict[str, float]) -> bool:
    return add.keys() <= BUDGET_UNITS and all(0 < amount <= MAX_BUDGET for amount in add.values())
