"""Node cards and trust entries: who may sign what (DESIGN §8).

Called by keys (issues them), clients (verify results and receipts) and agents (verify jobs and commands). A card is a
record signed by the fleet key; look-ups compare the whole public key, the 16-digit id is only a label (attack 29).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from runner.wire import ids
from runner.wire.errors import RecordError

__all__ = ["CARD_TTL_S", "MAX_CARD_BYTES", "NodeCard", "SignedCard", "TrustedKey"]

#: A node card is valid for 90 days.
CARD_TTL_S: Final = 90 * 86_400
MAX_CARD_BYTES: Final = 16 * 1024
_RECIPIENT: Final = re.compile(r"age1[02-9ac-hj-np-z]{58}")


@dataclass(frozen=True, slots=True)
class NodeCard:
    """A node's public key and what it may serve. ``*`` in tenants or queues means every one. Times: Unix ms.

    ``age_recipient``: whom sealed arguments for this node are encrypted to; its broker made the key.
    """

    node: str
    public: str
    level: str
    not_after_ms: int
    tenants: tuple[str, ...] = ("*",)
    queues: tuple[str, ...] = ("*",)
    labels: dict[str, str] | None = None
    age_recipient: str | None = None
    v: int = 1

    def __post_init__(self) -> None:
        ids.check_node(self.node)
        if len(self.public) != 64:
            raise RecordError("a public key is 64 hex digits", path="public")
        for label in self.labels or {}:
            ids.check_name(label, "label")
        if self.age_recipient is not None and not _RECIPIENT.fullmatch(self.age_recipient):
            raise RecordError("an age recipient looks like age1…", path="age_recipient")

    def may_serve(self, tenant: str, queue: str) -> bool:
        """Return whether this node's signature counts for a job of that tenant and queue."""
        return ("*" in self.tenants or tenant in self.tenants) and ("*" in self.queues or queue in self.queues)


@dataclass(frozen=True, slots=True)
class SignedCard:
    """A card as it is stored and published: its exact bytes as text, and the fleet key's signature over them."""

    card: str
    sig: str


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """One entry of trust.toml: a client's or operator's public key (64 hex digits) and its rights on this node."""

    id: str
    public: str
    may: tuple[Literal["enqueue", "kill", "operate"], ...] = ()
    tenants: tuple[str, ...] = ()
    queues: tuple[str, ...] = ("*",)
    revoked: bool = False
