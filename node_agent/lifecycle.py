"""From an attempt's verdict to the job's end: state, reason, exit code, and whether another attempt follows.

Called by the supervisor after the proof. Pure. Must never turn a kill into anything but ``killed``, and never call a
job finished whose end was forced.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final, Literal

from node_agent.containment.plan import Verdict
from runner.wire.flow import Backoff, RetryRule
from runner.wire.spec import JobSpec
from runner.wire.states import FailReason, RefuseReason, State, retryable

__all__ = ["LIMIT_REASONS", "Cause", "Ending", "conclude", "left", "next_attempt_ms"]

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

Cause = Literal[
    "",
    "kill",
    "time_limit",
    "pause_limit",
    "output_limit",
    "secret_leaked",
    "lease",
    "shutdown",
    "drain",
    "parked",
    "crowded",
    "exit",
    "policy",
    "trust",
]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ended. ``exit_code``/``signal`` are the first process's own; ``detail`` is for people.

    ``error_type``: the name of the exception's class, as the job tells it.
    """

    state: State
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    detail: str | None = None
    error_type: str = ""


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


def left(code: int) -> Ending:
    """Return the end of an attempt that asked its node to end it with this exit code."""
    if code:
        return Ending(State.FAILED, FailReason.EXIT, code, detail=f"exit code {code}, by the job's own call")
    return Ending(State.FINISHED, None, 0)


def next_attempt_ms(
    ending: Ending, spec: JobSpec, attempt: int, *, now_ms: int, share: float, asked_s: float | None = None
) -> int | None:
    """Return in how many milliseconds the next attempt is due (0: at once), or None if this end is the job's last.

    ``share``: a random number, 0 to 1, for the jitter. ``asked_s``: the task itself asked for another attempt then
    (`runner.Retry`), which no reason forbids, only the signed count. One that would come after not_after is none.
    """
    if spec.at_most_once or attempt > spec.retry.count:
        return None
    asked = asked_s is not None and ending.reason == FailReason.EXCEPTION
    if not asked and not (retryable(ending.state, ending.reason) and _wanted(spec.retry, ending)):
        return None
    delay_s = asked_s if asked and asked_s is not None else _backoff_s(spec.retry.backoff, attempt, share)
    delay_ms = round(1000 * delay_s)
    return delay_ms if not delay_ms or now_ms + delay_ms < spec.not_after_ms else None


def _wanted(rule: RetryRule, ending: Ending) -> bool:
    names = {str(ending.state), str(ending.reason), f"{ending.reason}:{ending.error_type}"}
    if not names.isdisjoint(rule.never_on or ()):
        return False
    return rule.retry_on is None or not names.isdisjoint(rule.retry_on)


def _backoff_s(backoff: Backoff | None, attempt: int, share: float) -> float:
    if backoff is None:
        return 0.0
    try:
        delay_s = min(backoff.max_delay_s, backoff.delay_s * backoff.factor ** (attempt - 1))
    except OverflowError:
        delay_s = backoff.max_delay_s if backoff.delay_s else 0.0
    return delay_s * (1 - backoff.jitter * share)


def _forced(verdict: Verdict, cause: Cause) -> Ending:
    match cause:
        case "time_limit":
            return Ending(State.FAILED, FailReason.TIME_LIMIT, 124, detail="the job reached its time limit")
        case "pause_limit":
            return Ending(State.FAILED, FailReason.TIME_LIMIT, 124, detail="the job was still paused at its not_after")
        case "output_limit":
            return Ending(State.FAILED, FailReason.OUTPUT_LIMIT, detail="the job wrote more output than it may")
        case "secret_leaked":
            detail = "its output or result held the value of a secret whose rule says on_leak = kill; the value was "
            detail += "masked, and the event secret.leaked names the secret"
            return Ending(State.FAILED, FailReason.SECRET_LEAKED, detail=detail)
        case "lease":
            return Ending(State.LOST, "lease", detail="the node could not renew its lease; the job was stopped first")
        case "parked":
            detail = "a person decides on a call of it; it goes on with its next attempt"
            return Ending(State.LOST, "parked", *_codes(verdict), detail=detail)
        case "drain":
            return Ending(State.LOST, "drain", *_codes(verdict), detail="its node was drained, and its time was over")
        case "shutdown":
            return Ending(State.LOST, "shutdown", detail="the node agent was stopped while the job ran")
        case "policy" | "trust":
            return Ending(State.KILLED, cause, *_codes(verdict))
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
