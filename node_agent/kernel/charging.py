"""What an attempt has used since the last look: its seconds, and what its requests to models cost. No I/O but a look.

Called by budgets. Must never charge a second twice, call a model cheap that has no price, nor look so often at a tree
of many processes that looking takes the agent's loop.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from node_agent.doornews import Metered
from node_agent.kernel.account import Account, Member
from node_agent.kernel.prices import Prices

__all__ = ["charge_cpu", "charge_seconds", "cost_usd"]

log = logging.getLogger(__name__)

#: A model without a price uses a cost bound up at once: more than all of it.
_ALL: Final = 1.000001
#: A look at CPU time is followed by a rest of so many times as long as it took, at most so many seconds: where there is
#: no cgroup each process is read, and a job may have hundreds.
_REST_TIMES: Final = 100
_MOST_REST_S: Final = 2.0


def charge_seconds(account: Account, member: Member, now_s: float) -> None:
    """Charge wall and CPU time since the last look; no wall time passes for a job that stands still."""
    if member.waits or member.ended_s is not None:
        return
    if not member.run.holders:
        account.charge("wall_s", now_s - member.looked_s)
    member.looked_s = now_s
    if "cpu_s" in member.budget.bounds and member.run.tree is not None and now_s >= member.rested_s:
        began_s = time.perf_counter()
        charge_cpu(account, member, member.run.tree.cpu_s())
        member.rested_s = now_s + min(_MOST_REST_S, _REST_TIMES * (time.perf_counter() - began_s))


def charge_cpu(account: Account, member: Member, used_s: float) -> None:
    """Charge the CPU time of an attempt beyond what was charged already. ``used_s``: all of it so far."""
    account.charge("cpu_s", used_s - member.cpu_s)
    member.cpu_s = max(member.cpu_s, used_s)


def cost_usd(prices: Prices, told: Metered, member: Member, bound: float, inward: int, outward: int) -> float:
    """Return what a report costs, in US dollars; ``inward``, ``outward``: its tokens; ``bound``: the job's own."""
    cost = prices.cost_usd(told.model, inward, outward)
    if cost is None and not (told.model or told.tokens_in or outward):
        # Its answer never came, so that nobody named the model: as if it were the dearest.
        cost = prices.most_usd(inward, outward)
    if cost is None:
        if not member.unpriced:
            # Once: who answers the job says what it likes, as often as it likes.
            log.warning("a model has no price", extra={"model": told.model, "attempt": told.attempt})
        member.unpriced = True
        cost = max(bound * _ALL, _ALL - 1)
    return cost
