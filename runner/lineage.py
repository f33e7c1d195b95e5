"""Port: runner.signing, runner.trust. Which job a stored payload is, once the signature over its envelope was verified.

Called by admission, dependencies and every other reader of stored jobs. Must never take a child job on the word of a
node that could not have run its parent (attacks 3, 4): each step down is signed by a node whose card, signed by the
fleet's key, may serve the job above.
"""

from __future__ import annotations

from runner import signing, trust
from runner.scripts.payload import JobData, Link
from runner.wire import derived
from runner.wire import schedule as schedules
from runner.wire import spec as specs
from runner.wire.derived import Origin
from runner.wire.envelope import Domain
from runner.wire.errors import RecordError
from runner.wire.spec import JobSpec

__all__ = ["ForgedLinkError", "job_of", "origin_of"]


class ForgedLinkError(RecordError):
    """A step from a job to its child is signed by nobody who may."""

    code = "forged_link"


def job_of(found: JobData, fleet: str | None, now_ms: int) -> JobSpec:
    """Return the job: the one that was signed, a schedule's occurrence, or a child of either.

    ``fleet``: the public key of the node cards; None: this home has none, and no child job can be verified.

    Raises:
        ForgedLinkError; derived.BeyondError: a child is more than its parent. CodecError, RecordError, GrammarError: no
        valid record.
    """
    return origin_of(found, fleet, now_ms).spec if found.links else _signed(found)


def origin_of(found: JobData, fleet: str | None, now_ms: int) -> Origin:
    """Return the job with the numbers of those that it may start. Raises as `job_of`."""
    origin = derived.origin_of(_signed(found))
    for link in found.links:
        origin = _step(origin, link, fleet, now_ms)
    return origin


def _signed(found: JobData) -> JobSpec:
    return schedules.job_of(found.envelope, found.occurrence)


def _step(origin: Origin, link: Link, fleet: str | None, now_ms: int) -> Origin:
    if fleet is None:
        raise ForgedLinkError("a child job needs the fleet's public key (keys/fleet.pub) to be verified: copy it here")
    card = trust.read_card(link.card, fleet, now_ms)
    if card is None or not signing.verify(card.public, Domain.CHILD, link.child, link.signature):
        raise ForgedLinkError("no node of this fleet has signed what was asked for this child job")
    child = derived.decode(link.child)
    parent = origin.spec
    if child.node != card.node or not trust.serves(card, parent.tenant, specs.lane_of(parent)):
        raise ForgedLinkError(f"node {card.node} could not have run the parent of this child job")
    return derived.child_of(origin, child)
