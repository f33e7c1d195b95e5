"""Budgets in the store: one node's batches go in, the fleet's sums and operators' words come out.

Called by budgets. Must never lose or repeat a batch whose answer did not come, and never take a word for one that no
trusted key signed for this budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from node_agent.kernel.account import UNREADABLE, Account, Over
from node_agent.kernel.storecalls import StoreCalls, text_of
from node_agent.kernel.words import Words
from runner.wire.flow import BUDGET_UNITS

__all__ = ["BudgetStore"]

#: What the script says of a budget that holds more than any does.
_CROWDED: Final = "!"
#: Words that are looked at in one look: each costs a signature, and the loop is everybody's.
_MOST_NEW: Final = 16
_MOST_VOID: Final = 8192


class BudgetStore:
    """The budgets of one boot. ``source``: NODE/BOOT, whose batches are numbered."""

    def __init__(self, calls: StoreCalls, words: Words, source: str) -> None:
        self._calls, self._words, self._source = calls, words, source
        self._numbers = itertools.count(1)

    async def tell(self, account: Account) -> None:
        """Send a batch, and take the sums and words of the store. Raises CallError(UNAVAILABLE)."""
        used = account.next_batch(self._numbers)
        document: dict[str, object] = {
            "op": "charge",
            "from": self._source,
            "batch": account.batch,
            "used": used,
            "ttl": round(account.ttl_s * 1000),
        }
        texts = [text_of(part) for part in await self._calls.run("budget", self._keys(account), document)]
        table = dict(zip(texts[::2], texts[1::2], strict=True))
        if _CROWDED in table:
            account.acknowledged(dict.fromkeys(BUDGET_UNITS, UNREADABLE))
            return
        account.acknowledged({unit: _number(table[unit]) for unit in BUDGET_UNITS if unit in table})
        self._read(account, table)

    async def hit(self, account: Account, over: Over) -> bool:
        """Write down that a budget is used up; return whether this is the first word of it since the last decision.

        Raises CallError(UNAVAILABLE).
        """
        document: dict[str, object] = {
            "op": "hit",
            "key": account.key,
            "era": len(account.words),
            "over": str(over),
            "ttl": round(account.ttl_s * 1000),
        }
        (first,) = await self._calls.run("budget", self._keys(account), document)
        return first == 1

    def _read(self, account: Account, table: Mapping[str, str]) -> None:
        # A word counts from when it was read, whatever the store forgets: else a no could be taken back.
        texts = {name[2:]: text for name, text in table.items() if name.startswith("w:")}
        if len(account.void) > _MOST_VOID:
            account.void.clear()
        new = [command_id for command_id in texts if command_id not in account.words and command_id not in account.void]
        for command_id in new[:_MOST_NEW]:
            text = texts[command_id]
            word = self._words.read(text, account.tenant)
            if word is None or (word.id, word.budget, word.selector.value) != (command_id, account.key, account.tenant):
                account.void.add(command_id)
            else:
                account.heard(word)

    def _keys(self, account: Account) -> tuple[str, str]:
        keys = self._calls.keys
        return keys.budget(account.tenant, account.key), keys.asks(account.tenant)


def _number(text: str) -> float:
    """A counter that can't be read counts as used up."""
    try:
        found = float(text)
    except ValueError:
        return UNREADABLE
    return min(found, UNREADABLE) if found >= 0 else UNREADABLE
