"""Where the words of those who run jobs go besides the turn. An interface only.

Called by the supervisor, control and the pauser; node_agent/mail.py carries it out. Must never block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from node_agent.output import Chunk
from node_agent.records import Signed
from node_agent.run import KillOrder, Run
from node_agent.turns import Claim

__all__ = ["Desk"]


class Desk(Protocol):
    """Where the supervisor's words go besides the turn."""

    async def log(self, claim: Claim, chunks: Sequence[Chunk]) -> None:
        """Store output in order; waits while the store is away, never raises."""

    def emit(self, tenant: str | None, event: Signed) -> None:
        """Store an event soon; never blocks, never raises."""

    def answer(self, run: Run, order: KillOrder) -> None:
        """Send the receipt of a kill that was found in the store, once the end is acknowledged."""
