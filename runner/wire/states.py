"""States of a job, their legal moves, the reasons of an end, and how RQ's tools see each state.

Called by client, node agent and command line. Must never gain a move out of an end state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = [
    "DEAD_STATES",
    "END_STATES",
    "MOVES",
    "NODE_LOST",
    "POISON",
    "RQ_STATUS",
    "FailReason",
    "RefuseReason",
    "State",
    "may_move",
    "retryable",
]


class State(StrEnum):
    """Where a job stands (DESIGN §9)."""

    SCHEDULED = "scheduled"
    DEFERRED = "deferred"
    QUEUED = "queued"
    CLAIMED = "claimed"
    RUNNING = "running"
    PAUSED = "paused"
    KILLING = "killing"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    REFUSED = "refused"
    EXPIRED = "expired"
    LOST = "lost"


class FailReason(StrEnum):
    """Why a job failed."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    PIDS_LIMIT = "pids_limit"
    DISK_LIMIT = "disk_limit"
    OUTPUT_LIMIT = "output_limit"
    SECCOMP = "seccomp"
    SECRET_LEAKED = "secret_leaked"  # noqa: S105 - a reason, not a secret
    RESULT_NOT_STORABLE = "result_not_storable"
    WORKER_DIED = "worker_died"
    NODE_FAULT = "node_fault"


class RefuseReason(StrEnum):
    """Why a job was refused before a byte of it ran."""

    BAD_SIGNATURE = "bad_signature"
    UNKNOWN_KEY = "unknown_key"
    REPLAYED = "replayed"
    POLICY = "policy"
    UNKNOWN_TASK = "unknown_task"
    UNENFORCEABLE = "unenforceable"
    LEVEL = "level"
    BROKER_UNAVAILABLE = "broker_unavailable"
    SECRET_DENIED = "secret_denied"  # noqa: S105 - a reason, not a secret
    BAD_HASH = "bad_hash"
    DEPENDENCY_FAILED = "dependency_failed"


#: Reasons of lost: the node was lost with the attempt; and so were too many of the job's nodes, it is not tried again.
NODE_LOST: Final = "node_lost"
POISON: Final = "poison"

END_STATES: Final = frozenset({State.FINISHED, State.FAILED, State.KILLED, State.REFUSED, State.EXPIRED, State.LOST})

#: Ends that nobody wanted: what `ps --failed` shows and `retry` takes.
DEAD_STATES: Final = frozenset({State.FAILED, State.LOST, State.EXPIRED, State.REFUSED})

#: Every legal move. An attempt that failed or was lost and may run again goes back to ``queued``,
#: or to ``scheduled`` until its backoff is over; so does a job that a rate or concurrency limit does not let start yet.
MOVES: Final[dict[State, frozenset[State]]] = {
    State.SCHEDULED: frozenset({State.QUEUED, State.KILLING, State.EXPIRED}),
    State.DEFERRED: frozenset({State.QUEUED, State.SCHEDULED, State.KILLING, State.EXPIRED, State.FAILED}),
    State.QUEUED: frozenset({State.CLAIMED, State.SCHEDULED, State.KILLING, State.EXPIRED}),
    State.CLAIMED: frozenset(
        {State.RUNNING, State.QUEUED, State.SCHEDULED, State.KILLING, State.REFUSED, State.EXPIRED, State.LOST}
        | {State.FAILED}
    ),
    State.RUNNING: frozenset(
        {State.PAUSED, State.KILLING, State.QUEUED, State.SCHEDULED, State.FINISHED, State.FAILED}
        | {State.KILLED, State.LOST}
    ),
    State.PAUSED: frozenset(
        {State.RUNNING, State.KILLING, State.QUEUED, State.SCHEDULED, State.FAILED, State.KILLED, State.LOST}
    ),
    State.KILLING: frozenset({State.KILLED, State.LOST}),
    **{state: frozenset() for state in END_STATES},
}

#: What RQ's own tools show (DESIGN §4). ``killed`` is ``stopped`` after the start and ``canceled`` before it.
RQ_STATUS: Final[dict[State, str]] = {
    State.SCHEDULED: "scheduled",
    State.DEFERRED: "deferred",
    State.QUEUED: "queued",
    State.CLAIMED: "queued",
    State.RUNNING: "started",
    State.PAUSED: "started",
    State.KILLING: "started",
    State.FINISHED: "finished",
    State.FAILED: "failed",
    State.KILLED: "stopped",
    State.REFUSED: "failed",
    State.EXPIRED: "failed",
    State.LOST: "failed",
}

_RETRYABLE: Final = frozenset(
    {FailReason.WORKER_DIED, FailReason.EXIT, FailReason.EXCEPTION, FailReason.TIME_LIMIT, FailReason.SIGNAL}
)


def may_move(old: State, new: State) -> bool:
    """Return whether a job may go from ``old`` to ``new``; an end state is final."""
    return new in MOVES[old]


def retryable(state: State, reason: str | None) -> bool:
    """Return whether another attempt may follow: after lost, worker_died, exit, signal, exception, time_limit only."""
    return (state is State.LOST and reason != POISON) or (state is State.FAILED and reason in _RETRYABLE)
