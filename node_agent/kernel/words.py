"""Port: runner.signing. An operator's word that lies in the store: read, and believed only by its signature.

Called by approvals and budgets. Must never take the store's word for a person's: who may write there may lose or repeat
a word, but makes none.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner import signing
from runner.wire import record
from runner.wire.card import TrustedKey
from runner.wire.command import MAX_COMMAND_BYTES, Command
from runner.wire.envelope import Domain
from runner.wire.errors import WireError

__all__ = ["Words"]


class Words:
    """Reads words for one node. ``trust``: the keys of its trust.toml by id."""

    def __init__(self, node: str, trust: Mapping[str, TrustedKey]) -> None:
        self._node, self._trust = node, trust

    def read(self, text: str, tenant: str) -> Command | None:
        """Return the decision in ``SIGNATURE COMMAND``, None unless a key that may operate for this tenant signed it.

        It does not expire: what it answers does, and whoever wrote it down looked at that.
        """
        signature, _, payload = text.partition(" ")
        key = self._trust.get(signing.signer_of(signature))
        if key is None or key.revoked or "operate" not in key.may:
            return None
        if "*" not in key.tenants and tenant not in key.tenants:
            return None
        data = payload.encode("utf-8", "surrogatepass")
        if len(data) > MAX_COMMAND_BYTES or not signing.verify(key.public, Domain.COMMAND, data, signature):
            return None
        try:
            command = record.loads(Command, data, limit_bytes=MAX_COMMAND_BYTES)
        except WireError:
            return None
        meant = command.op in ("approve", "deny") and command.audience in ("*", self._node)
        return command if meant and (command.tenants is None or tenant in command.tenants) else None
