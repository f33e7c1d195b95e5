"""Quotas of calls, as policy sets them: counted in the store, for the whole fleet, all or none of a call's at once.

Called by deciding before a call that a rule with a quota covers. Must never count in this process alone, and never keep
a place for an attempt that is over: who dies with its node stops keeping its places up, and they lapse.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

from node_agent.cancelling import end_all
from node_agent.kernel.errors import CallError
from node_agent.kernel.pace import Pace
from node_agent.kernel.storecalls import StoreCalls
from node_agent.policycalls import Quota
from runner.wire.calls import ErrorCode

__all__ = ["Quotas"]

log = logging.getLogger(__name__)

#: A place "at a time" lapses so long after it was last kept up, in milliseconds; how often that is, in seconds.
LIFE_MS: Final = 20_000
KEEP_S: Final = 5.0
#: Refusals of one attempt a second, after the first few.
_REFUSALS_PER_S: Final = 20.0
_BURST: Final = 50


class Quotas:
    """One boot's places in the quotas of the fleet."""

    def __init__(self, calls: StoreCalls, boot: str, keep_s: float = KEEP_S, life_ms: int = LIFE_MS) -> None:
        """``boot``: makes the places of this agent start its own."""
        self._calls, self._boot = calls, boot
        self._keep_s, self._life_ms = keep_s, life_ms
        self._number = 0
        #: Held places: member → (key, attempt).
        self._held: dict[str, tuple[str, str]] = {}
        self._paces: dict[str, Pace] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._dropping: set[asyncio.Task[None]] = set()

    async def take(self, tenant: str, attempt: str, quotas: Sequence[Quota]) -> Callable[[], None]:
        """Take one place in each quota, or in none; return what gives the places "at a time" back.

        Raises CallError: QUOTA with the time after which there may be room, or UNAVAILABLE.
        """
        keys = [self._calls.keys.quota(tenant, _digest(quota.name)) for quota in quotas]
        rows, held = [], []
        for key, quota in zip(keys, quotas, strict=True):
            self._number += 1
            member = f"{attempt} {self._boot} {self._number}"
            rows.append({"count": quota.count, "period": round(quota.period_s * 1000), "member": member})
            if not quota.period_s:
                self._held[member] = (key, attempt)
                held.append(member)
        try:
            full, *rest = await self._calls.run("quota", keys, {"op": "take", "rows": rows, "life": self._life_ms})
        except BaseException:
            # Whether they were taken is not known: given back, and lapsed if that is not heard either.
            self._give_back(held)
            raise
        if full:
            for member in held:
                self._held.pop(member, None)
            await self._pace(attempt)
            raise CallError(ErrorCode.QUOTA, _full(quotas[int(str(full)) - 1], int(str(rest[0]))))
        if held and self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
        return lambda: self._give_back(held)

    def ended(self, attempt: str) -> None:
        """An attempt is over: give back whatever it holds."""
        self._paces.pop(attempt, None)
        self._give_back([member for member, (_, holder) in self._held.items() if holder == attempt])

    async def stop(self) -> None:
        """Keep nothing up any more; what is held lapses. Idempotent."""
        tasks = [*self._dropping, *([self._keeper] if self._keeper is not None else [])]
        self._keeper = None
        await end_all(tasks)

    async def _pace(self, attempt: str) -> None:
        """A job that tries without end waits for its refusals: the store is everybody's."""
        pace = self._paces.get(attempt)
        if pace is None:
            pace = self._paces[attempt] = Pace(_REFUSALS_PER_S, _BURST)
        await pace.turn()

    def _give_back(self, members: Sequence[str]) -> None:
        found = [(member, self._held.pop(member)[0]) for member in members if member in self._held]
        if found:
            task = asyncio.get_running_loop().create_task(self._drop(found))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, found: Sequence[tuple[str, str]]) -> None:
        try:
            document: dict[str, object] = {"op": "drop", "held": [member for member, _ in found]}
            await self._calls.run("quota", [key for _, key in found], document)
        except CallError:
            log.debug("places of quotas lapse, the store is away", extra={"places": len(found)})

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._keep_s)
            held = [(member, key) for member, (key, _) in self._held.items()]
            if not held:
                continue
            document: dict[str, object] = {
                "op": "keep",
                "held": [member for member, _ in held],
                "life": self._life_ms,
            }
            try:
                await self._calls.run("quota", [key for _, key in held], document)
            except CallError:
                log.debug("places of quotas are not kept up, the store is away", extra={"places": len(held)})


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8")).hexdigest()[:32]


def _full(quota: Quota, wait_ms: int) -> str:
    if not quota.period_s:
        return (
            f"{quota.count} such calls are under way, and policy allows no more at a time; ask again when one is done"
        )
    span = {60.0: "minute", 3600.0: "hour"}.get(quota.period_s, f"{quota.period_s:g} s")
    return f"policy allows {quota.count} such calls in a {span}; there may be room in {wait_ms / 1000:.1f} s"
