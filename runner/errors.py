"""Errors that applications see, one root.

    RingfenceError
    ├── ConfigError             no usable home, client.json, key, trust file or card; the message says the next step
    │   ├── UnsafeFileError     a key, home or trust file that another user could write or read
    │   └── UsageError          a call that cannot mean anything: two selectors, a bad tag
    ├── StoreError              the queue's store did not answer (retryable)
    ├── EnqueueError            the job was not accepted; nothing was written
    │   └── DuplicateJobError   another job holds its unique name, or has repeated the ended job already
    ├── TaskNameError           a function that no node could find by name
    ├── InsideJobError          enqueue from inside a job
    ├── NotInJobError           current_job outside a job
    ├── JobNotFoundError        the store knows no such job
    │   └── ResultExpiredError  it did: the job has ended, and its time in the store is over
    ├── ArtifactError           the job has no such artifact, or it is not what its node signed
    ├── ResultTimeoutError      the job had not ended in the time given (also a TimeoutError; retryable)
    ├── UnverifiedResultError   a stored end that no trusted node signed: never returned as a result
    ├── Retry                   raised by a task inside a job: try me again later
    └── JobEndError             the job ended without a value; carries state, reason and the signed outcome
        ├── JobFailed
        ├── JobKilled
        ├── JobRefused
        ├── JobExpired
        └── JobLost

Called by every module of the package. Must never carry arguments, results or secrets of a job; what a job printed
last is in ``evidence.tail``, and is its own text.
"""

from __future__ import annotations

from typing import ClassVar

from runner.wire.flow import MAX_SPAN_S
from runner.wire.receipt import Outcome
from runner.wire.states import State

__all__ = [
    "ArtifactError",
    "ConfigError",
    "DuplicateJobError",
    "EnqueueError",
    "InsideJobError",
    "JobEndError",
    "JobExpired",
    "JobFailed",
    "JobKilled",
    "JobLost",
    "JobNotFoundError",
    "JobRefused",
    "NotInJobError",
    "ResultExpiredError",
    "ResultTimeoutError",
    "Retry",
    "RingfenceError",
    "StoreError",
    "TaskNameError",
    "UnsafeFileError",
    "UnverifiedResultError",
    "UsageError",
    "end_error",
]


class RingfenceError(Exception):
    """Root. ``code`` is stable; ``retryable`` says whether the same call may succeed later."""

    code: ClassVar[str] = "ringfence"
    retryable: ClassVar[bool] = False


class ConfigError(RingfenceError):
    """This machine or account is not set up; the message names the file and the command that helps."""

    code = "config"


class UnsafeFileError(ConfigError):
    """A file or folder that someone else could change or read where nobody else may."""

    code = "unsafe_file"


class UsageError(ConfigError):
    """The call can't mean anything; the message says how it is written."""

    code = "usage"


class StoreError(RingfenceError):
    """Redis or Valkey did not answer or refused us. Nothing is known about the last call: commands are idempotent."""

    code = "store"
    retryable = True


class EnqueueError(RingfenceError):
    """The job was not accepted, and nothing was written."""

    code = "enqueue"


class DuplicateJobError(EnqueueError):
    """A job that has not ended holds the unique name, or the ended job was repeated already; ``holder`` is its id."""

    code = "duplicate_job"

    def __init__(self, message: str, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class Retry(RingfenceError):
    """Raised inside a task: this attempt is over, the next one is due in ``in_s`` seconds.

    It counts as an attempt: when none of the job's ``retries`` is left, the job ends as failed(exception).
    """

    code = "retry"
    retryable = True

    def __init__(self, message: str = "", *, in_s: float = 0.0) -> None:
        if not 0 <= in_s <= MAX_SPAN_S:
            raise UsageError("Retry takes in_s, a number of seconds from 0 to 366 days")
        super().__init__(message or f"to be tried again in {in_s:g} s")
        self.in_s = in_s


class TaskNameError(RingfenceError):
    """The function has no name under which a node could import it."""

    code = "task_name"


class InsideJobError(RingfenceError):
    """Jobs can't enqueue jobs: they hold no key and see no store."""

    code = "inside_job"


class NotInJobError(RingfenceError):
    """``current_job`` was used in a process that is no attempt."""

    code = "not_in_job"


class JobNotFoundError(RingfenceError):
    """The store has no such job: a wrong id, or one so old that nothing is left of it."""

    code = "job_not_found"


class ResultExpiredError(JobNotFoundError):
    """The job was there and ended; what was kept of it has passed its time (7 days)."""

    code = "result_expired"


class ArtifactError(RingfenceError):
    """There is no such artifact, or what the store holds is not what a node signed."""

    code = "artifact"


class ResultTimeoutError(RingfenceError, TimeoutError):
    """The job had not ended in the time given; it goes on."""

    code = "result_timeout"
    retryable = True


class UnverifiedResultError(RingfenceError):
    """The store shows an end that no node signed which may serve this job; it is not a result (attacks 3, 20)."""

    code = "unverified_result"


class JobEndError(RingfenceError):
    """The job ended, but not with a value. ``evidence`` is the outcome that the node signed."""

    code = "job_end"

    def __init__(self, evidence: Outcome) -> None:
        self.evidence = evidence
        self.job = evidence.job
        self.state = evidence.state
        self.reason = evidence.reason
        why = evidence.reason or "no reason given"
        detail = f": {evidence.detail}" if evidence.detail else ""
        super().__init__(f"job {evidence.job} {evidence.state} ({why}){detail}")

    def __reduce__(self) -> tuple[type[JobEndError], tuple[Outcome]]:
        return type(self), (self.evidence,)


class JobFailed(JobEndError):
    """It ran and failed. ``exit_code``, ``signal`` and ``error`` (type, message, traceback) say how."""

    code = "job_failed"

    @property
    def exit_code(self) -> int | None:
        """The process's exit code, if it exited."""
        return self.evidence.exit_code

    @property
    def signal(self) -> int | None:
        """The signal that ended the process, if one did."""
        return self.evidence.signal

    @property
    def error(self) -> dict[str, str]:
        """Type, message and traceback of a task's exception: text of the job, never an exception object."""
        return dict(self.evidence.error or {})


class JobKilled(JobEndError):
    """It was killed; no process of it is left."""

    code = "job_killed"


class JobRefused(JobEndError):
    """A node refused it before a byte of it ran."""

    code = "job_refused"


class JobExpired(JobEndError):
    """It was not started before its not_after."""

    code = "job_expired"


class JobLost(JobEndError):
    """Its node was lost and no attempt was left."""

    code = "job_lost"


_ENDS: dict[str, type[JobEndError]] = {
    State.FAILED: JobFailed,
    State.KILLED: JobKilled,
    State.REFUSED: JobRefused,
    State.EXPIRED: JobExpired,
    State.LOST: JobLost,
}


def end_error(evidence: Outcome) -> JobEndError:
    """Return the error that fits a signed end other than ``finished``."""
    return _ENDS.get(evidence.state, JobEndError)(evidence)
