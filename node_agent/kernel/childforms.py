"""What child jobs are asked for with, and how one's end is told.

Called by children. Must never tell a job more than fits into one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node_agent.dependencies import Ended
from runner.wire import codec
from runner.wire.calls import MAX_DATA_BYTES
from runner.wire.codec import Json
from runner.wire.grants import Grants
from runner.wire.spec import Limits
from runner.wire.states import State

__all__ = ["ExitAsk", "JobAsk", "SpawnAsk", "WaitAsk", "told"]


@dataclass(frozen=True, slots=True)
class ExitAsk:
    """Fields of job.exit."""

    code: int = 0


@dataclass(frozen=True, slots=True)
class SpawnAsk:
    """Fields of job.spawn. ``grants`` None: none, or with ``inherit`` the parent's own, but for ``spawn``."""

    task: str | None = None
    argv: tuple[str, ...] | None = None
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    grants: Grants | None = None
    inherit: bool = False
    limits: Limits = Limits()
    retries: int = 0
    priority: int | None = None
    not_after_ms: int | None = None
    node: str | None = None
    fresh: bool = False
    at_most_once: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class JobAsk:
    """Fields of job.status."""

    job: str


@dataclass(frozen=True, slots=True)
class WaitAsk:
    """Fields of job.wait."""

    job: str
    timeout_s: float = 60.0


def told(end: Ended) -> Json:
    """Return a child's end as its node signed it, with its result where that fits."""
    outcome = end.outcome
    value: Json = None
    omitted = end.value is not None and len(end.value) > MAX_DATA_BYTES
    if end.value is not None and outcome.state == State.FINISHED and not omitted:
        value = codec.load(end.value)
    return {
        "job": outcome.job,
        "state": outcome.state,
        "reason": outcome.reason,
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "node": outcome.node,
        "attempt": outcome.attempt,
        "detail": (outcome.detail or "")[:1000],
        "result": value,
        "omitted": omitted,
    }
