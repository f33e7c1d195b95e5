"""Why a call is not carried out.

Raised by handlers, answered by the session. Must never carry a value of another job or a secret in its text.
"""

from __future__ import annotations

from node_agent.errors import NodeError
from runner.wire.calls import ErrorCode

__all__ = ["CallError"]


class CallError(NodeError):
    """A call is answered with ``error``; ``why`` is for people and says the next step where there is one."""

    code = "call"

    def __init__(self, error: ErrorCode, why: str = "") -> None:
        super().__init__(why or error.value)
        self.error = error
        self.why = why
