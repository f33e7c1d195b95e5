"""A person's word on a secret that waits for it: from an operator on this host, or from afar through the node's agent.

Called by the counter and the desk. Must never let a secret be had before the decision is in the record, and never say
yes twice to one question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from broker.vault.errors import VaultUsageError
from broker.vault.leases import Leases

__all__ = ["decide", "decisions"]

_MAX_BY: Final = 300


def decisions(lines: Iterable[Mapping[str, object]]) -> dict[tuple[str, str], bool]:
    """Return each person's word as the record has it, by (attempt, name), for attempts whose lease may be live."""
    found: dict[tuple[str, str], bool] = {}
    for line in lines:
        if line["event"] in {"secret.approved", "secret.denied"}:
            found[str(line["attempt"]), str(line["name"])] = line["event"] == "secret.approved"
        elif line["event"] == "lease.ended" and line.get("why") == "done":
            for key in [key for key in found if key[0] == str(line["attempt"])]:
                del found[key]
    return found


def decide(
    leases: Leases, write: Callable[..., None], order: Mapping[str, object], now_s: float, *, origin: str
) -> dict[str, object]:
    """Carry out ``{"op": "approve" | "deny", "attempt", "name", "by"}``; returns an answer without facts.

    ``origin``: whose socket it came on. A secret that nobody says yes to stays out of reach until its time is over.

    Raises:
        VaultUsageError: nothing waits there. AuditError: nothing has changed.
    """
    attempt, name, approved = str(order["attempt"]), str(order["name"]), order["op"] == "approve"
    if not leases.waits(attempt, name, now_s):
        raise VaultUsageError(f"nothing waits for approval as {attempt} {name}")
    by = str(order.get("by", "operator"))[:_MAX_BY]
    write(f"secret.{'approved' if approved else 'denied'}", attempt=attempt, name=name, by=by, origin=origin)
    if approved:
        leases.approve(attempt, name, now_s)
    else:
        leases.deny(attempt, name)
    return {}
