"""Commands that operators and clients send to nodes, signed.

Called by client, command line and the agents' control loop. Must never be acted on before its signature, audience and
expiry are checked; a kill that names one job and attempt is executed even if expired (killing is the safe side). A
pause or a resume is never executed after its expiry, nor twice, nor after a later one of the same key (attack 27).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from runner.wire.errors import RecordError

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
    A drain with ``force`` ends what still runs after ``grace_s``: by SIGTERM, and ``checkpoint_s`` later for good.
    """

    id: str
    op: Literal["kill", "pause", "resume", "approve", "deny", "drain", "undrain", "suspend", "unsuspend"]
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
    v: int = VERSION

    def __post_init__(self) -> None:
        if self.v != VERSION:
            raise RecordError(f"version {self.v} is not supported", path="v")
        if (self.op == "kill") != (self.sequence == 0) or self.sequence < 0:
            raise RecordError("a pause and a resume have a sequence, a kill has none", path="sequence")
        decides = self.op in ("approve", "deny")
        if decides != (self.secret is not None) or decides != (self.attempt is not None):
            raise RecordError("a decision names a secret and an attempt, nothing else does", path="secret")
        if decides and self.selector.kind != "job":
            raise RecordError("a decision is for one job", path="selector")
        kind = OPERATES.get(self.op)
        if kind is not None and self.selector.kind != kind:
            raise RecordError(f"{self.op} names one {kind}", path="selector")
        if not 0 <= self.grace_s <= 86_400 or not 0 <= self.checkpoint_s <= 86_400:
            raise RecordError("grace is 0 to 86,400 seconds", path="grace_s")
        if len(self.reason) > 1024 or len(self.by) > 256:
            raise RecordError("a reason has at most 1,024 characters", path="reason")
