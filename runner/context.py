"""The attempt that this process runs, if it runs one.

Called by tasks (``current_job``), by the guest's start (``enter``) and by everything that must not work inside a job.
Must never be taken as proof of anything: a job can write here what it likes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from runner.errors import InsideJobError, NotInJobError

__all__ = ["Attempt", "CurrentJob", "current_job", "enter", "leave", "refuse_inside"]

#: Set by the node in every job's environment, command jobs included.
_MARK = "RINGFENCE_FDS"


class Attempt(NamedTuple):
    """What a job may know of itself."""

    job: str
    attempt: int
    task: str = ""
    tags: Mapping[str, str] = MappingProxyType({})


_current: Attempt | None = None
#: The process that was found to be none of a job's. Only a fork or `enter` changes that: each enqueue asks, and a name
#: that the environment does not have is dear to look for.
_outside = 0


def enter(attempt: Attempt) -> None:
    """Make ``attempt`` the current one; called once by the guest's start, before the task's module is imported."""
    global _current
    _current = attempt


def leave() -> None:
    """Forget the attempt (tests, and a worker that is reused)."""
    global _current
    _current = None


def refuse_inside(what: str) -> None:
    """Raise InsideJobError in a process of a job; ``what`` names the call."""
    global _outside
    if _current is None and _outside == os.getpid():
        return
    if _current is not None or _MARK in os.environ:
        raise InsideJobError(
            f"{what} does not work inside a job: jobs hold no key; start a child of the job (runner.inside.jobs, with "
            "--spawn N), or return the work to the caller"
        )
    _outside = os.getpid()


class CurrentJob:
    """A proxy to this process's attempt. Every attribute raises NotInJobError outside a job."""

    __slots__ = ()

    @property
    def id(self) -> str:
        """The job's id, ``TENANT-ULID``."""
        return _attempt().job

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return _attempt().attempt

    @property
    def task(self) -> str:
        """The task's name, ``module:qualname``."""
        return _attempt().task

    @property
    def tags(self) -> Mapping[str, str]:
        """The tags that the job was enqueued with."""
        return _attempt().tags

    def __bool__(self) -> bool:
        """Return whether this process runs an attempt; never raises."""
        return _current is not None

    def __repr__(self) -> str:
        return f"<current job {_current.job}.{_current.attempt}>" if _current else "<no current job>"


def _attempt() -> Attempt:
    if _current is None:
        raise NotInJobError("current_job works in a task that a node runs, not here: test with `if current_job:`")
    return _current


#: The attempt of this process.
current_job = CurrentJob()
