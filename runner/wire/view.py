"""What `ps`, `show`, `nodes` print and the API returns: read models, never signed, never trusted (DESIGN §9).

Called by the client and the command line. Fields may be added, never removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ArtifactView", "EventView", "JobView", "NodeView", "ProgressView", "ScheduleView", "WaitView"]


@dataclass(frozen=True, slots=True)
class ProgressView:
    """What a job last said of how far it is, 0 to 1."""

    value: float
    note: str
    at: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ArtifactView:
    """One artifact of a job, as its node signed it."""

    name: str
    bytes: int
    sha256: str
    at: str
    attempt: int
    node: str
    pieces: int
    transfer: str


@dataclass(frozen=True, slots=True)
class WaitView:
    """What waits for a person, as `approvals` shows it. ``until``: no word by then is a no, or a budget begins anew.

    ``kind`` call: ``job``, ``attempt``, ``ask`` (the question's id), ``action`` on ``resource``, ``rule`` and ``why``,
    ``how`` it waits (wait, freeze, requeue). ``kind`` budget: ``budget`` (its key), ``why`` (what is used up).
    """

    kind: str
    tenant: str
    until: str
    job: str | None = None
    attempt: int = 0
    ask: str = ""
    action: str = ""
    resource: str = ""
    rule: str = ""
    why: str = ""
    how: str = ""
    node: str = ""
    asked_at: str | None = None
    budget: str | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as people and scripts see it. Times are ISO 8601 UTC or None. ``calls``: the last ones of a failure.

    ``parent``: the job that started it; `show` alone fills it in.
    """

    job: str
    task: str
    state: str
    reason: str | None
    exit_code: int | None
    signal: int | None
    node: str | None
    attempt: int
    queue: str
    tags: dict[str, str]
    enqueued_at: str | None
    started_at: str | None
    ended_at: str | None
    result: object = None
    usage: dict[str, float | int] = field(default_factory=dict)
    detail: str | None = None
    waiting: str | None = None
    tail: str | None = None
    verified: bool = False
    due_at: str | None = None
    repeated_as: str | None = None
    parent: str | None = None
    progress: ProgressView | None = None
    artifacts: tuple[ArtifactView, ...] = ()
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as `nodes` shows it. ``state``: starting, ready, draining, drained, degraded(...), unhealthy, lost.

    ``free``: what jobs may still ask for, ``memory_bytes`` and ``cpus``, where it is counted. ``policy``: SHA-256 of
    the policy file that it judges by.
    """

    name: str
    host: str
    pid: int
    boot: str
    state: str
    level: str
    slots: int
    busy: int
    queues: tuple[str, ...]
    labels: dict[str, str]
    heartbeat_at: str
    redis: str
    enforcement: dict[str, str] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)
    policy: str = ""


@dataclass(frozen=True, slots=True)
class EventView:
    """One event as `events` shows it. ``id`` is its place in the stream; ``verified``: a trusted node signed it."""

    id: str
    at: str
    type: str
    job: str
    attempt: int
    node: str
    boot: str
    detail: dict[str, str | int | float | bool] = field(default_factory=dict)
    verified: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """One schedule as `schedule list` shows it. ``state``: active, paused, ended.

    ``verified``: this client knows the key that signed it; ``next_at`` is the store's word.
    """

    name: str
    tenant: str
    task: str
    queue: str
    cron: str | None
    every_s: float | None
    zone: str
    missed: str
    state: str
    next_at: str | None
    start_at: str
    end_at: str | None
    expires_s: float
    verified: bool = False
