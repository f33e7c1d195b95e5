"""Events: what happened to jobs, nodes and kills, in order.

Called by scripts (job.queued, job.deferred, job.claimed) and agents (all others, signed). Must never hold a secret or
raw output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Event", "EventType"]


class EventType(StrEnum):
    """Every event there is. Exactly one JOB_ENDED per job."""

    JOB_SCHEDULED = "job.scheduled"
    JOB_QUEUED = "job.queued"
    JOB_DEFERRED = "job.deferred"
    JOB_CLAIMED = "job.claimed"
    JOB_STARTED = "job.started"
    JOB_KILL_REQUESTED = "job.kill_requested"
    JOB_PAUSED = "job.paused"
    JOB_RESUMED = "job.resumed"
    JOB_RETRIED = "job.retried"
    JOB_ENDED = "job.ended"
    JOB_PROGRESS = "job.progress"
    JOB_ARTIFACT = "job.artifact"
    GRANT_CODE_CHANGED = "grant.code_changed"
    NET_DENIED = "net.denied"
    NET_USED = "net.used"
    SECRET_LEAKED = "secret.leaked"  # noqa: S105 - an event, not a secret
    SECRET_PENDING = "secret.pending"  # noqa: S105 - an event, not a secret
    SECRET_APPROVED = "secret.approved"  # noqa: S105 - as above
    SECRET_DENIED = "secret.denied"  # noqa: S105 - as above
    JOB_SIGNALLED = "job.signalled"
    JOB_ASKED = "job.asked"
    JOB_ANSWERED = "job.answered"
    BUDGET_HIT = "budget.hit"
    BUDGET_ANSWERED = "budget.answered"
    KILL_UNCONFIRMED = "kill.unconfirmed"
    NODE_UP = "node.up"
    NODE_DOWN = "node.down"
    NODE_DEGRADED = "node.degraded"
    NODE_UNHEALTHY = "node.unhealthy"
    NODE_HEALTHY = "node.healthy"
    NODE_SWEPT = "node.swept"
    NODE_DRAINING = "node.draining"
    NODE_DRAINED = "node.drained"
    NODE_UNDRAINED = "node.undrained"
    CHANNEL_VIOLATION = "channel.violation"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``at`` is Unix milliseconds; ``detail`` holds flat facts (state, reason, processes, …)."""

    type: str
    at_ms: int
    job: str = ""
    attempt: int = 0
    node: str = ""
    boot: str = ""
    detail: dict[str, str | int | float | bool] = field(default_factory=dict)
