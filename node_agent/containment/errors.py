"""Errors of the containment, one root.

    ContainmentError
    ├── SpawnError          no mould could be made for a slot
    │   └── CrowdedError    this user has too many descriptors in flight: none can be passed (attack 34)
    ├── SetupError          a worker could not be restricted or given its view; nothing of the job ran
    ├── ResultTooLarge      a task's result is over its limit
    ├── GrantRefused        a path can't be granted on this host (reason: policy or unenforceable)
    ├── GroupError          a cgroup can't be made or written
    │   ├── GroupBusy       another agent holds this node's name
    │   └── LimitBusy       the slot's leaf can't take this limit now: a new mould and leaf are needed
    ├── DoorError           a job's net grants could not be connected; nothing of it ran
    └── UidsUnavailable     no uid is free, or the range is unusable

Called by every file of the package and by the supervisor. Must never carry a job's arguments or output.
"""

from __future__ import annotations

import errno
import os
from typing import Literal

__all__ = [
    "ContainmentError",
    "CrowdedError",
    "DoorError",
    "GrantRefused",
    "GroupBusy",
    "GroupError",
    "LeaseError",
    "LimitBusy",
    "ResultTooLarge",
    "SetupError",
    "SpawnError",
    "UidsUnavailable",
    "unsent",
]


class ContainmentError(Exception):
    """Root. ``code`` is stable; ``retryable`` says whether the same call may succeed later."""

    code = "containment"
    retryable = False


class SpawnError(ContainmentError):
    """No mould could be made; the message names the step."""

    code = "spawn"
    retryable = True


class CrowdedError(SpawnError):
    """The kernel passes no more descriptors for this user (ETOOMANYREFS): some job keeps too many in flight."""

    code = "crowded"


class SetupError(ContainmentError):
    """The worker failed before READY and is proved gone. ``step`` and ``errno`` come from the worker."""

    code = "setup"

    def __init__(self, step: str, errno: int, detail: str = "") -> None:
        text = f"{step}: {os.strerror(errno) if errno else 'failed'}"
        super().__init__(f"{text} ({detail})" if detail else text)
        self.step = step
        self.errno = errno
        self.detail = detail


class ResultTooLarge(ContainmentError):
    """The result written to descriptor 102 is over its limit."""

    code = "result_too_large"


class GrantRefused(ContainmentError):
    """The host does not grant this path. ``reason`` is a refuse reason of the wire; the message says what to do."""

    code = "grant_refused"

    def __init__(self, reason: Literal["policy", "unenforceable"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GroupError(ContainmentError):
    """A cgroup could not be made, written or removed, or can't enforce what is asked."""

    code = "group"


class GroupBusy(GroupError):
    """Another process of this host holds the cgroups of this node name and home."""

    code = "group_busy"


class LimitBusy(GroupError):
    """The kernel can't lower the limit under what the leaf still holds (EBUSY): make a new mould and leaf."""

    code = "limit_busy"
    retryable = True


class DoorError(ContainmentError):
    """The egress process did not take the attempt's listener; the attempt is proved gone."""

    code = "door"
    retryable = True


class LeaseError(ContainmentError):
    """The broker did not open the attempt's lease; the attempt is proved gone. ``reason``: the refusal's."""

    code = "lease"
    retryable = True

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UidsUnavailable(ContainmentError):
    """The range of job uids is unusable here, or every uid is taken."""

    code = "uids"
    retryable = True


def unsent(what: str, error: Exception) -> SpawnError:
    """Return the error of a message with descriptors that could not be sent."""
    crowded = isinstance(error, OSError) and error.errno == errno.ETOOMANYREFS
    return (CrowdedError if crowded else SpawnError)(f"{what}: {error}")
