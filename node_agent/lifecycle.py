"""From an attempt's verdict to the job's end: state, reason, exit code, and whether another attempt follows.

Called by the supervisor after the proof. Pure. Must never turn a kill into anything but ``killed``, and never call a
job finished whose end was forced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from node_agent.containment.plan import Verdict
from runner.wire.spec import JobSpec
from runner.wire.states import FailReason, RefuseReason, State, retryable

__all__ = ["Cause", "Ending", "conclude", "may_retry"]

Cause = Literal["", "kill", "time_limit", "output_limit", "lease", "shutdown"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended. ``exit_code``/``signal`` are the first process's own; ``detail`` is for people."""

    state: State
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    detail: str | None = None


def conclude(verdict: Verdict, cause: Cause, *, result_problem: str | None = None) -> Ending:
    """Return the end of one attempt. ``cause`` is why we killed it, if we did.

    ``result_problem`` is set when the job's own result can't be stored (too large, not decodable, missing).
    """
    if cause:
        return _forced(verdict, cause)
    if verdict.kind == "setup_error":
        where = f"step {verdict.step} failed ({verdict.detail or verdict.errno})"
        return Ending(State.REFUSED, RefuseReason.UNENFORCEABLE, detail=f"the sandbox could not be built: {where}")
    if verdict.kind == "worker_died" and verdict.limit == "memory":
        # One leaf for the job and its mould (cgroup v1): the kernel may choose either when memory is used up.
        return Ending(State.FAILED, FailReason.MEMORY_LIMIT, detail="the job hit its memory limit, and all of it ended")
    if verdict.kind in {"worker_died", "killed"}:
        return Ending(State.FAILED, FailReason.WORKER_DIED, detail="the sandbox itself was killed from outside")
    if verdict.limit and (verdict.kind == "signal" or verdict.code != 0):
        reason = FailReason.MEMORY_LIMIT if verdict.limit == "memory" else FailReason.PIDS_LIMIT
        return Ending(State.FAILED, reason, *_codes(verdict), detail=f"the job hit its {verdict.limit} limit")
    if verdict.kind == "signal":
        return Ending(State.FAILED, FailReason.SIGNAL, *_codes(verdict), detail=f"ended by signal {verdict.signal}")
    if result_problem is not None:
        return Ending(State.FAILED, FailReason.RESULT_NOT_STORABLE, *_codes(verdict), detail=result_problem)
    if verdict.code != 0:
        return Ending(State.FAILED, FailReason.EXIT, *_codes(verdict), detail=f"exit code {verdict.code}")
    return Ending(State.FINISHED, None, 0)


def may_retry(ending: Ending, spec: JobSpec, attempt: int) -> bool:
    """Return whether the next attempt follows: a retryable end, attempts left, and not at most once."""
    return not spec.at_most_once and attempt <= spec.retry.count and retryable(ending.state, ending.reason)


def _forced(verdict: Verdict, cause: Cause) -> Ending:
    match cause:
        case "time_limit":
            return Ending(State.FAILED, FailReason.TIME_LIMIT, 124, detail="the job reached its time limit")
        case "output_limit":
            return Ending(State.FAILED, FailReason.OUTPUT_LIMIT, detail="the job wrote more output than it may")
        case "lease":
            return Ending(State.LOST, "lease", detail="the node could not renew its lease; the job was stopped first")
        case "shutdown":
            return Ending(State.LOST, "shutdown", detail="the node agent was stopped while the job ran")
        case _:
            return Ending(State.KILLED, "kill", *_codes(verdict))


def _codes(verdict: Verdict) -> tuple[int | None, int | None]:
    if verdict.kind == "exit":
        return verdict.code, None
    if verdict.kind == "signal":
        return 128 + verdict.signal, verdict.signal
    return None, None
