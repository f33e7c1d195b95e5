"""What applications import, and the vocabulary that every part shares.

    from runner import App, Grants, Secret, current_job

Loads a name when it is asked for: importing this package loads the standard library alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.app import App
    from runner.canvas import Chain, Group, Signature, chain, chord, group
    from runner.context import current_job
    from runner.errors import (
        ArtifactError,
        ConfigError,
        DuplicateJobError,
        EnqueueError,
        InsideJobError,
        JobEndError,
        JobExpired,
        JobFailed,
        JobKilled,
        JobLost,
        JobNotFoundError,
        JobRefused,
        NotInJobError,
        ResultExpiredError,
        ResultTimeoutError,
        Retry,
        RingfenceError,
        StoreError,
        TaskNameError,
        UnsafeFileError,
        UnverifiedResultError,
        UsageError,
    )
    from runner.flow import Flow
    from runner.grants import Grants, Secret
    from runner.guest.vault import SecretError, secret
    from runner.job import Job
    from runner.suspects import PlainSecretWarning
    from runner.task import Task
    from runner.wire.flow import Backoff, Budget, Concurrency, Rate, Unique
    from runner.wire.passing import Failure
    from runner.wire.receipt import Outcome, Receipt
    from runner.wire.sealed import Sealed
    from runner.wire.view import ArtifactView, EventView, JobView, NodeView, ProgressView, WaitView

__all__ = [
    "App",
    "ArtifactError",
    "ArtifactView",
    "Backoff",
    "Budget",
    "Chain",
    "Concurrency",
    "ConfigError",
    "DuplicateJobError",
    "EnqueueError",
    "EventView",
    "Failure",
    "Flow",
    "Grants",
    "Group",
    "InsideJobError",
    "Job",
    "JobEndError",
    "JobExpired",
    "JobFailed",
    "JobKilled",
    "JobLost",
    "JobNotFoundError",
    "JobRefused",
    "JobView",
    "NodeView",
    "NotInJobError",
    "Outcome",
    "PlainSecretWarning",
    "ProgressView",
    "Rate",
    "Receipt",
    "ResultExpiredError",
    "ResultTimeoutError",
    "Retry",
    "RingfenceError",
    "Sealed",
    "Secret",
    "SecretError",
    "Signature",
    "StoreError",
    "Task",
    "TaskNameError",
    "Unique",
    "UnsafeFileError",
    "UnverifiedResultError",
    "UsageError",
    "WaitView",
    "chain",
    "chord",
    "current_job",
    "group",
    "secret",
]

_HOMES = {
    "App": "runner.app",
    "Chain": "runner.canvas",
    "Group": "runner.canvas",
    "Signature": "runner.canvas",
    "chain": "runner.canvas",
    "chord": "runner.canvas",
    "group": "runner.canvas",
    "Flow": "runner.flow",
    "Failure": "runner.wire.passing",
    "current_job": "runner.context",
    "Grants": "runner.grants",
    "Secret": "runner.grants",
    "SecretError": "runner.guest.vault",
    "secret": "runner.guest.vault",
    "Job": "runner.job",
    "PlainSecretWarning": "runner.suspects",
    "Task": "runner.task",
    "Backoff": "runner.wire.flow",
    "Budget": "runner.wire.flow",
    "Concurrency": "runner.wire.flow",
    "Rate": "runner.wire.flow",
    "Unique": "runner.wire.flow",
    "Outcome": "runner.wire.receipt",
    "Receipt": "runner.wire.receipt",
    "Sealed": "runner.wire.sealed",
    "ArtifactView": "runner.wire.view",
    "EventView": "runner.wire.view",
    "JobView": "runner.wire.view",
    "NodeView": "runner.wire.view",
    "ProgressView": "runner.wire.view",
    "WaitView": "runner.wire.view",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_HOMES.get(name, "runner.errors")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
