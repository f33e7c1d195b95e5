"""What `ps`, `show`, `nodes` print and the API returns: read models, never signed, never trusted (DESIGN §9).

Called by the client and the command line. Fields may be added, never removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["EventView", "JobView", "NodeView", "ScheduleView"]


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as people and scripts see it. Times are ISO 8601 UTC or None."""

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


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node as `nodes` shows it. ``state``: starting, ready, draining, drained, degraded(...), unhealthy, lost.

    ``free``: what jobs may still ask for, ``memory_bytes`` and ``cpus``, where it is counted.
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
