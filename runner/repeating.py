"""Dead letters: an ended job is run again as a new one that its own signer signs.

Called by job handles, app and command line. Must never sign what another key signed, or what the store merely shows:
who writes the store, or a weaker key, would have its job run with this key's rights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from runner import listing, results, signing
from runner.client import Client
from runner.errors import (
    DuplicateJobError,
    EnqueueError,
    ResultTimeoutError,
    RingfenceError,
    UsageError,
)
from runner.scripts import payload
from runner.wire import ids
from runner.wire import schedule as schedules
from runner.wire.errors import WireError
from runner.wire.spec import JobSpec
from runner.wire.states import DEAD_STATES
from runner.wire.times import parse_ms
from runner.wire.view import JobView

__all__ = ["Repeated", "attempt", "repeat", "repeat_all"]

#: The tag by which the new job names the old one.
TAG: Final = "retry_of"
_MOST: Final = 10_000


@dataclass(frozen=True, slots=True)
class Repeated:
    """What became of one job: ``repeated_as`` is the new job's id, or None and ``why`` says what stood against it."""

    job: str
    repeated_as: str | None
    why: str = ""


def repeat(client: Client, job_id: str, *, force: bool = False) -> JobSpec:
    """Enqueue an ended job anew, with a fresh id, nonce and time, and the tag ``retry_of``; once, unless ``force``.

    ``force``: also one that finished, was killed, was to run at most once, or was repeated already.

    Raises:
        UsageError: it has not ended, or needs ``force``. EnqueueError: another key signed it (DuplicateJobError: it was
        repeated already). JobNotFoundError, UnverifiedResultError, StoreError.
    """
    old = _signed_here(client, job_id)
    try:
        state = results.wait(client, job_id, old, 0.0).outcome.state
    except ResultTimeoutError:
        raise UsageError(f"job {job_id} has not ended: wait for its end, or kill it") from None
    if state not in DEAD_STATES and not force:
        raise UsageError(f"job {job_id} {state}: nothing failed; force (--force) runs it again all the same")
    if old.at_most_once and not force:
        raise UsageError(f"job {job_id} was to run at most once: force (--force) runs it again all the same")
    now_ms = time.time_ns() // 1_000_000
    new = replace(
        old,
        id=ids.new_job_id(old.tenant),
        nonce=ids.new_nonce(),
        not_before_ms=now_ms,
        not_after_ms=now_ms + old.not_after_ms - old.not_before_ms,
        tags={**old.tags, TAG: old.id},
        schedule=None,
    )
    client.enqueue([new], {} if force else {new.id: old.id})
    return new


def repeat_all(
    client: Client, tenant: str, *, since_s: float | None = None, queue: str | None = None, force: bool = False
) -> Iterator[Repeated]:
    """Repeat every dead job of a tenant that nobody repeated yet, oldest first, and yield what became of each.

    ``since_s``: only those that ended in the last so many seconds. ``force``: also those that were to run at most once.
    Raises StoreError.
    """
    now_ms = client.now_ms()
    for view in reversed(listing.jobs(client, tenant, _MOST)):
        if view.state not in DEAD_STATES or view.repeated_as is not None or (queue is not None and view.queue != queue):
            continue
        if since_s is None or _ended_ms(view) >= now_ms - 1000 * since_s:
            yield attempt(client, view.job, force=force)


def attempt(client: Client, job_id: str, *, force: bool) -> Repeated:
    """Repeat one job; what stands against it is the answer. Raises StoreError."""
    try:
        return Repeated(job_id, repeat(client, job_id, force=force).id)
    except DuplicateJobError as error:
        return Repeated(job_id, None, str(error))
    except RingfenceError as error:
        if error.retryable:
            raise
        return Repeated(job_id, None, str(error))


def _ended_ms(view: JobView) -> int:
    return parse_ms(view.ended_at or "") or 0


def _signed_here(client: Client, job_id: str) -> JobSpec:
    """The job as this client's own key signed it."""
    data = client.fields(client.keys.job(job_id), ["data"]).get("data")
    if data is None:
        raise results.missing(client, job_id)
    try:
        found = payload.parse(data)
        domain = schedules.domain_of(found.occurrence)
        if not signing.verify(client.signer.public, domain, found.envelope, found.signature):
            signer = signing.signer_of(found.signature) or "unknown"
            raise EnqueueError(f"job {job_id} was signed by key {signer}: only that key may repeat it, not this home's")
        if found.links:
            raise EnqueueError(
                f"job {job_id} was started by another job, which chose its arguments: this key must not sign it; "
                "repeat the job above all (`ringfence show` names it)"
            )
        spec = schedules.job_of(found.envelope, found.occurrence)
    except WireError as error:
        raise EnqueueError(f"job {job_id} can't be repeated, the stored one is not readable: {error}") from None
    if spec.id != job_id:
        raise EnqueueError(f"job {job_id} can't be repeated: the stored one is another job's")
    if spec.sealed is not None:
        raise EnqueueError(f"job {job_id} can't be repeated: its sealed values are bound to it; enqueue it anew")
    return spec
