"""From an attempt's verdict to the job's end: state, reason, exit code, and whether another attempt follows.

Called by the supervisor after the proof. Pure. Must never turn a kill into anything but ``killed``, and never call a
job finished whose end was forced.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final, Literal

from node_agent.containment.plan import Verdict
from runner.wire.spec import JobSpec
from runner.wire.states import FailReason, RefuseReason, State, retryable

__all__ = ["LIMIT_REASONS", "Cause", "Ending", "conclude", "may_retry"]

#: The reason that a met limit gives a bad end, and the words for it.
LIMIT_REASONS: Final = {
    "memory": FailReason.MEMORY_LIMIT,
    "pids": FailReason.PIDS_LIMIT,
    "disk": FailReason.DISK_LIMIT,
}
_MET: Final = {
    "memory": "the kernel killed a process of the job for using up its memory (--memory)",
    "pids": "the job wanted more processes at a time than it may have (--pids)",
    "disk": "one of /work, /tmp and /dev/shm was full at the end (--disk is the size of /work)",
}
_SIGNALLED: Final = 128
_MOST_SIGNALS: Final = 65

Cause = Literal["", "kill", "time_limit", "pause_limit", "output_limit", "lease", "shutdown"]


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
        how = f"; {_told(verdict)}"
        return Ending(State.FAILED, LIMIT_REASONS[verdict.limit], *_codes(verdict), detail=_MET[verdict.limit] + how)
    if verdict.kind == "signal" and verdict.signal == signal.SIGSYS:
        detail = (
            "ended by SIGSYS: it made a system call of another machine (32-bit or x32 code does not run here), "
            "or a seccomp filter of its own ended it; calls that are only refused give it an error instead"
        )
        return Ending(State.FAILED, FailReason.SECCOMP, *_codes(verdict), detail=detail)
    if verdict.kind == "signal":
        return Ending(State.FAILED, FailReason.SIGNAL, *_codes(verdict), detail=_told(verdict))
    if result_problem is not None:
        return Ending(State.FAILED, FailReason.RESULT_NOT_STORABLE, *_codes(verdict), detail=result_problem)
    if verdict.code != 0:
        return Ending(State.FAILED, FailReason.EXIT, *_codes(verdict), detail=_told(verdict))
    return Ending(State.FINISHED, None, 0)


def may_retry(ending: Ending, spec: JobSpec, attempt: int) -> bool:
    """Return whether the next attempt follows: a retryable end, attempts left, and not at most once."""
    return not spec.at_most_once and attempt <= spec.retry.count and retryable(ending.state, ending.reason)


def _forced(verdict: Verdict, cause: Cause) -> Ending:
    match cause:
        case "time_limit":
            return Ending(State.FAILED, FailReason.TIME_LIMIT, 124, detail="the job reached its time limit")
        case "pause_limit":
            return Ending(State.FAILED, FailReason.TIME_LIMIT, 124, detail="the job was still paused at its not_after")
        case "output_limit":
            return Ending(State.FAILED, FailReason.OUTPUT_LIMIT, detail="the job wrote more output than it may")
        case "lease":
            return Ending(State.LOST, "lease", detail="the node could not renew its lease; the job was stopped first")
        case "shutdown":
            return Ending(State.LOST, "shutdown", detail="the node agent was stopped while the job ran")
        case _:
            return Ending(State.KILLED, "kill", *_codes(verdict))


def _told(verdict: Verdict) -> str:
    """Say how the first process ended; a shell passes on its child's signal as 128 + its number."""
    if verdict.kind == "signal":
        return f"ended by {_name(verdict.signal)}"
    number = verdict.code - _SIGNALLED
    hint = f" (as after {_name(number)})" if 0 < number < _MOST_SIGNALS else ""
    return f"exit code {verdict.code}{hint}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _codes(verdict: Verdict) -> tuple[int | None, int | None]:
    if verdict.kind == "exit":
        return verdict.code, None
    if verdict.kind == "signal":
        return 128 + verdict.signal, verdict.signal
    return None, None
