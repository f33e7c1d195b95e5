"""The lease loop: renew, tell every mould the new deadline, and take over what lapsed agents left.

Called by the agent, one loop per boot on a connection of its own, so that a stuck call elsewhere can't delay a renewal.
Must never write a deadline that the store did not confirm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from node_agent.errors import LeaseLostError, StoreAwayError
from node_agent.lease import Lease
from node_agent.spread import spread
from node_agent.turns import Dead, Orphan

__all__ = ["Heartbeat", "Heir", "LeaseStore"]

log = logging.getLogger(__name__)

#: In the time of so many looks, killed jobs that nobody signed are looked for once, too.
SWEEP_ROUNDS: Final = 10
#: With so many other agents, each looks less often: a lapse is seen within two looks of any one of them.
MANY: Final = 3
SELDOM: Final = 2.5
#: A renewal that failed is sent again after at most this part of the time between two.
AGAIN_SHARE: Final = 0.2


class LeaseStore(Protocol):
    """What the loop needs of the store."""

    @property
    def others(self) -> int:
        """How many leases of other agent starts the last look showed."""

    async def renew(self, record: bytes, lease_ms: int, lanes: Sequence[str] | None = None) -> bool:
        """Prolong the lease from now; False if it is lost."""

    async def recover(
        self, *, lease_ms: int, margin_ms: int, named: Sequence[str] = (), serves: Sequence[str] | None = None
    ) -> tuple[tuple[Orphan, ...], tuple[Dead, ...]]:
        """Take over what lapsed agent starts held."""

    async def sweep(self, *, serves: Sequence[str] | None = None) -> tuple[Dead, ...]:
        """Take killed jobs that nobody has signed yet."""


class Heir(Protocol):
    """Who ends what dead agents left: the supervisor."""

    def inherit(self, orphan: Orphan) -> None:
        """End a started attempt, or give it its next."""

    def bury(self, dead: Dead) -> None:
        """End a claim that a kill hit."""


class Heartbeat:
    """Renews every half heartbeat. ``describe``: the node's record as canonical JSON; ``lanes``: those served now."""

    def __init__(
        self,
        store: LeaseStore,
        recovery: LeaseStore,
        lease: Lease,
        heir: Heir,
        *,
        heartbeat_s: float,
        describe: Callable[[], bytes],
        lanes: Callable[[], Sequence[str]],
    ) -> None:
        self._store = store
        self._recovery = recovery
        self._lease = lease
        self._heir = heir
        self._every_s = heartbeat_s / 2
        self._lease_ms = int(2 * heartbeat_s * 1000)
        self._margin_ms = int(heartbeat_s / 2 * 1000)
        self._describe = describe
        self._lanes = lanes
        self.degraded = False

    async def run(self) -> None:
        """Beat until cancelled. Raises LeaseLostError when others may have taken this boot's jobs."""
        while True:
            started = asyncio.get_running_loop().time()
            await self.beat()
            pause = spread(AGAIN_SHARE * self._every_s) if self.degraded else self._every_s
            wake = max(started + pause, asyncio.get_running_loop().time())
            await asyncio.sleep(wake - asyncio.get_running_loop().time())
            self._lease.late(asyncio.get_running_loop().time() - wake)

    async def run_recovery(self, every_s: float) -> None:
        """Look for lapsed agents, and now and then for kills whose notice got lost, until cancelled."""
        rounds = 0.0
        while True:
            await self.inherit()
            looks = self.pause_looks()
            rounds += looks
            if rounds >= SWEEP_ROUNDS:
                rounds = 0.0
                await self._sweep()
            await asyncio.sleep(looks * every_s)

    def pause_looks(self) -> float:
        """Return how long to wait for the next look for lapsed agents, in times of the shortest wait."""
        return spread(SELDOM) if self._recovery.others >= MANY else 1.0

    async def beat(self) -> None:
        """Renew once."""
        sent_ns = self._lease.now()
        try:
            async with asyncio.timeout(self._every_s):
                alive = await self._store.renew(self._describe(), self._lease_ms, self._lanes())
        except (StoreAwayError, TimeoutError) as error:
            if not self.degraded:
                log.warning("renewal failed, the store is away", extra={"error": str(error)})
            self.degraded = True
            return
        self.degraded = False
        if not alive:
            raise LeaseLostError("others may have taken over this agent start's jobs")
        self._lease.extend(sent_ns)

    async def inherit(self, named: Sequence[str] = ()) -> None:
        """Take over what lapsed, and the boots ``named`` (NODE/BOOT) at once."""
        try:
            orphans, dead = await self._recovery.recover(
                lease_ms=self._lease_ms, margin_ms=self._margin_ms, named=named, serves=self._lanes()
            )
        except StoreAwayError as error:
            log.warning("recovery waits, the store is away", extra={"error": str(error)})
            return
        for orphan in orphans:
            self._heir.inherit(orphan)
        for one in dead:
            self._heir.bury(one)

    async def _sweep(self) -> None:
        with contextlib.suppress(StoreAwayError):
            for one in await self._recovery.sweep(serves=self._lanes()):
                self._heir.bury(one)
