"""Errors of the node agent, one root.

    NodeError
    ├── PolicyError     policy or trust file that can't be used: the agent does not start
    ├── SetupError      this host or home can't run an agent (exit 78)
    ├── NameTakenError  another live agent has this name
    ├── StoreAwayError  the store did not answer; the same call may succeed later
    ├── LeaseLostError  this agent start was declared dead by others; everything it holds is void
    └── InvariantError  a state that must not exist; a defect of ours

Called by the agent's own modules and its __main__. Must never cross to a job.
"""

from __future__ import annotations

__all__ = [
    "InvariantError",
    "LeaseLostError",
    "NameTakenError",
    "NodeError",
    "PolicyError",
    "SetupError",
    "StoreAwayError",
]


class NodeError(Exception):
    """Root of the node agent's errors."""

    code = "node"
    retryable = False


class PolicyError(NodeError):
    """The policy or trust file does not load; fail closed."""

    code = "policy_file"


class SetupError(NodeError):
    """The host or home is not fit to run an agent."""

    code = "setup"


class NameTakenError(NodeError):
    """Another live agent holds this node name."""

    code = "name_taken"


class StoreAwayError(NodeError):
    """Redis did not answer, or answered with an error of its own; nothing is known of the call's effect."""

    code = "store_away"
    retryable = True


class LeaseLostError(NodeError):
    """This boot's lease is gone: others may run its jobs."""

    code = "lease_lost"
    retryable = True


class InvariantError(NodeError):
    """Never expected: a defect of the agent."""

    code = "invariant"
