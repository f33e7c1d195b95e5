"""Port: redis, runner.signing. What nodes say to each other for their jobs: signed by one node, believed by another.

Called by mail and signals. Must never believe a record because of where it lay: only a node whose card, signed by the
fleet's key, may serve the tenant speaks for the tenant's jobs, and only in its own name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

from redis.exceptions import RedisError

from node_agent.errors import StoreAwayError
from node_agent.kernel.errors import CallError
from node_agent.records import Notary
from runner import signing, trust
from runner.wire import ids, record
from runner.wire import spec as specs
from runner.wire.calls import ErrorCode
from runner.wire.card import NodeCard
from runner.wire.envelope import Domain
from runner.wire.errors import GrammarError, WireError
from runner.wire.letters import MAX_LETTER_BYTES
from runner.wire.spec import JobSpec

__all__ = ["Peers", "Seals"]

T = TypeVar("T", bound="_Named")
_FORMS: Final = (False, True)
#: Longest wait for the store, in seconds.
WAIT_S: Final = 2.0


class _Named(Protocol):
    @property
    def node(self) -> str:
        """The node that signed it."""


class Peers(Protocol):
    """Who else is in the fleet (Dependencies)."""

    async def fleet_cards(self, *, fresh: bool) -> Sequence[NodeCard]:
        """Return the valid cards of the fleet."""

    async def known(self, job: str, tenant: str) -> JobSpec | None:
        """Return a stored job as a key that may has signed it. Raises StoreAwayError."""


class Seals:
    """Signs as one node, and reads what nodes signed."""

    def __init__(self, notary: Notary, peers: Peers) -> None:
        self._notary, self._peers = notary, peers

    def seal(self, word: object) -> tuple[bytes, str]:
        """Return a record's bytes and this node's signature over them."""
        payload = record.dumps(word)
        return payload, self._notary.signer.sign(Domain.MAIL, payload)

    async def read(self, kind: type[T], data: bytes, signature: str, tenant: str) -> T | None:
        """Return the record, None unless a node that may serve ``tenant`` signed it in its own name.

        Raises CallError(UNAVAILABLE): the cards could not be read.
        """
        card = await self.signer(Domain.MAIL, data, signature, tenant)
        try:
            found = record.loads(kind, data, limit_bytes=MAX_LETTER_BYTES) if card is not None else None
        except WireError:
            return None
        return found if card is not None and found is not None and found.node == card.node else None

    async def signer(self, domain: Domain, data: bytes, signature: str, tenant: str) -> NodeCard | None:
        """Return the card of the node that signed this and may serve ``tenant``. Raises CallError(UNAVAILABLE)."""
        label = signing.signer_of(signature)
        for fresh in _FORMS:
            for card in await self._cards(fresh=fresh):
                if signing.key_id_of(card.public) != label or not ("*" in card.tenants or tenant in card.tenants):
                    continue
                if signing.verify(card.public, domain, data, signature):
                    return card
        return None

    async def speaks(self, node: str, spec: JobSpec) -> bool:
        """Return whether a node may serve a job, and so speak for it. Raises CallError(UNAVAILABLE)."""
        lane = specs.lane_of(spec)
        for fresh in _FORMS:
            cards = await self._cards(fresh=fresh)
            if any(card.node == node and trust.serves(card, spec.tenant, lane) for card in cards):
                return True
        return False

    async def known(self, job: str, tenant: str) -> JobSpec | None:
        """Return a stored job as a trusted key signed it; None: there is none. Raises CallError(UNAVAILABLE)."""
        try:
            ids.check_job_id(job)
            async with asyncio.timeout(WAIT_S):
                return await self._peers.known(job, tenant)
        except GrammarError:
            return None
        except (StoreAwayError, RedisError, TimeoutError, OSError) as error:
            raise _away(error) from None

    async def _cards(self, *, fresh: bool) -> Sequence[NodeCard]:
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._peers.fleet_cards(fresh=fresh)
        except (StoreAwayError, RedisError, TimeoutError, OSError) as error:
            raise _away(error) from None


def _away(error: BaseException) -> CallError:
    return CallError(ErrorCode.UNAVAILABLE, f"the store does not answer ({type(error).__name__}); ask again")
