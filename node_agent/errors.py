"""Errors of the node agent, one root.

    NodeError
    ├── PolicyError     policy or trust file that can't be used: the agent does not start
    ├── SetupError      this host or home can't run an agent (exit 78)
    ├── LeftoverError   what an earlier start left is not proved gone (exit 75: try again)
    ├── NameTakenError  another live agent has this name
    ├── StoreAwayError  the store did not answer; the same call may succeed later
    ├── LeaseLostError  this agent start was declared dead by others; everything it holds is void
    ├── EgressError     a job's net grants can't be enforced (reason: a refuse reason of the wire)
    │   ├── EgressMissingError  no egress process serves this home
    │   ├── EgressAwayError     it does not answer now
    │   └── EgressRefusedError  what is granted can never be reached, or is no destination
    └── InvariantError  a state that must not exist; a defect of ours

Called by the agent's own modules and its __main__. Must never cross to a job.
"""

from __future__ import annotations

from runner.wire.states import RefuseReason

__all__ = [
    "EgressAwayError",
    "EgressError",
    "EgressMissingError",
    "EgressRefusedError",
    "InvariantError",
    "LeaseLostError",
    "LeftoverError",
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


class LeftoverError(NodeError):
    """Processes of an earlier start of this node may still live: nothing new may run beside them."""

    code = "leftover"
    retryable = True


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


class EgressError(NodeError):
    """Root of what the egress process can't give; ``reason`` is the refusal's."""

    code = "egress"
    reason = RefuseReason.UNENFORCEABLE


class EgressMissingError(EgressError):
    """No egress process was ever started for this home."""

    code = "egress_missing"


class EgressAwayError(EgressError):
    """The egress process is starting, stuck or dead."""

    code = "egress_away"
    reason = RefuseReason.BROKER_UNAVAILABLE
    retryable = True


class EgressRefusedError(EgressError):
    """A destination that policy, or no policy at all, can open."""

    code = "egress_refused"
    reason = RefuseReason.POLICY


class InvariantError(NodeError):
    """Never expected: a defect of the agent."""

    code = "invariant"
