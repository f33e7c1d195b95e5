"""Encrypts a job's sealed values to the brokers of the nodes that may run it.

Called by the client right before it signs. Must never seal to a card that the fleet key did not sign, to a node that
may not serve the job's lane (attack 3), or leave out whose the value is, who signs it and where it stands (attack 2).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace

import pyrage
from pyrage import x25519

from runner import trust
from runner.errors import EnqueueError
from runner.wire import sealed
from runner.wire.card import NodeCard
from runner.wire.sealed import Binding, Sealed
from runner.wire.spec import JobSpec, lane_of

__all__ = ["seal"]


def seal(job: JobSpec, cards: Sequence[NodeCard], signer: str) -> JobSpec:
    """Return the job with ciphertexts in place of its sealed values. ``cards``: verified, in date.

    ``signer``: the id of the key that will sign the job; under no other do the values open.

    Raises:
        EnqueueError: no node that may run it has a key to seal to, or they are too many for one value.
    """
    texts = sorted({card.age_recipient for card in cards if card.age_recipient is not None and _may_run(card, job)})
    if not texts:
        raise EnqueueError(
            f"the job has sealed arguments, and no node card for {lane_of(job)} (tenant {job.tenant}) names a key to "
            "seal them to: `ringfence vault recipient` on such a node prints it, `ringfence keys card NODE --recipient "
            "AGE1…` puts it into the card; then start the node agent again"
        )
    try:
        recipients = [x25519.Recipient.from_str(text) for text in texts]
    except pyrage.RecipientError:
        raise EnqueueError(
            f"a node card for {lane_of(job)} names no age key: sign it anew with `ringfence keys card NODE --recipient`"
        ) from None
    held: dict[str, object] = {
        place: _text(Binding(job.tenant, job.id, place, signer, text=True), value, recipients)
        for place, value in (job.sealed or {}).items()
    }
    return replace(job, sealed=held)


def _may_run(card: NodeCard, job: JobSpec) -> bool:
    """Return whether the fleet key lets this node run the job: tenant, queue, pin, labels and level."""
    return trust.serves(card, job.tenant, lane_of(job)) and card.level <= job.min_level


def _text(binding: Binding, value: object, recipients: Sequence[x25519.Recipient]) -> str:
    if not isinstance(value, Sealed):
        raise EnqueueError(
            f"{binding.place} was sealed for another job, and opens in no other: enqueue it with the value, not with "
            "its copy"
        )
    clear = value.open()
    value_bytes = clear.encode() if isinstance(clear, str) else clear
    plain = sealed.pack(replace(binding, text=isinstance(clear, str)), value_bytes)
    found = base64.b64encode(pyrage.encrypt(plain, list(recipients))).decode("ascii")
    if len(found) > sealed.MAX_TEXT_BYTES:
        raise EnqueueError(
            f"{binding.place}, sealed for {len(recipients)} nodes, takes {len(found)} bytes, the limit is "
            f"{sealed.MAX_TEXT_BYTES}: pin the job to fewer nodes (labels, node) or pass less"
        )
    return found
