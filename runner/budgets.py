"""The handle of one budget: what operators say when it is used up.

Called by applications; made by App.budget. Must never load the queue's libraries before a method needs them.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.aio import twin
from runner.place import Place
from runner.wire.receipt import PauseReceipt

__all__ = ["BudgetHandle"]


class BudgetHandle:
    """The budget ``key`` of a tenant."""

    __slots__ = ("_place", "key", "tenant")

    def __init__(self, place: Place, key: str, tenant: str) -> None:
        self._place, self.key, self.tenant = place, key, tenant

    def approve(
        self, add: Mapping[str, float] | None = None, reason: str = "", wait: float = 15.0
    ) -> list[PauseReceipt]:
        """Add to the budget, and let its jobs go on; one receipt for each job that heard it.

        ``add``: unit (requests, tokens, cost, cpu, wall, calls) → more of it; empty: the bound once more. This
        key has to be trusted to operate. Raises UsageError, StoreError.
        """
        return self._answer(True, add, reason, wait)

    def deny(self, reason: str = "", wait: float = 15.0) -> list[PauseReceipt]:
        """Kill the jobs that stand still for the used-up budget, and those that start later. Raises as `approve`."""
        return self._answer(False, None, reason, wait)

    def _answer(self, yes: bool, add: Mapping[str, float] | None, reason: str, wait_s: float) -> list[PauseReceipt]:
        from runner import waiting
        from runner.client import connect

        op = "approve" if yes else "deny"
        client = connect(self._place)
        return waiting.answer_budget(client, op, self.tenant, self.key, add=add, reason=reason, wait_s=wait_s)  # type: ignore[arg-type]  # one of the two

    aapprove = twin(approve)
    adeny = twin(deny)
