"""Port: broker.egress. From a job's grants and the policy's list to the rules of its door. Pure.

Called by egress.py. Must never let a pattern of the policy name an address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from broker.egress.errors import BadRequestError
from broker.egress.orders import MAX_RECORD_BYTES, MAX_RULES, dump_rules
from broker.egress.rules import LOCAL_NAMES, Destination, Route, Rules, canonical
from node_agent.errors import EgressRefusedError
from runner.wire import codec
from runner.wire.grants import NetGrant

__all__ = ["rules_of"]

#: Leaves room for what else an order says.
_MAX_RULES_BYTES: Final = MAX_RECORD_BYTES - 1024


def rules_of(
    net: Sequence[NetGrant],
    named: Iterable[str],
    never: Iterable[tuple[str, int]],
    keyed: Sequence[NetGrant] = (),
    routes: Sequence[Route] = (),
) -> Rules:
    """Return the rules of one attempt.

    ``named``: what the policy rule lists; its patterns name no address. ``keyed``: the hosts of proxied secrets.
    ``routes``: other ways to say some of both.

    Raises:
        EgressRefusedError: a grant is no destination, or they are too many.
    """
    try:
        hosts = frozenset(canonical(grant.host, grant.port) for grant in keyed)
        granted = frozenset(canonical(grant.host, grant.port) for grant in net) - hosts
    except BadRequestError as error:
        raise EgressRefusedError(f"a net grant is not understood: {error}") from None
    ports = {each.port for each in granted | hosts}
    spelt = [each for each in map(_spelt, named) if each is not None and each.port in ports]
    own = [each for each in (_spelt(f"{host}:{port}", any_name=True) for host, port in never) if each is not None]
    if max(len(granted), len(own), len(hosts), len(routes)) > MAX_RULES:
        raise EgressRefusedError(f"a job may have {MAX_RULES} net grants")
    rules = Rules(granted, frozenset(spelt[:MAX_RULES]), frozenset(own), hosts, tuple(routes))
    size = len(codec.dump(dump_rules(rules)))
    if size > _MAX_RULES_BYTES:
        # Such a record would arrive cut off, and end the line with every other job's door.
        raise EgressRefusedError(f"a job's net grants may take {_MAX_RULES_BYTES} bytes, not {size}; grant fewer")
    return rules


def _spelt(text: str, *, any_name: bool = False) -> Destination | None:
    """Return the destination that an entry spells out: an address or this host; None for patterns and names."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit():
        return None
    try:
        found = canonical(host, int(port[:6]))
    except BadRequestError:
        return None
    return found if any_name or found.address is not None or found.host in LOCAL_NAMES else None
