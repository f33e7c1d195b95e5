"""Why an enqueue took nothing: what enqueue.lua said, as an error that says what to do.

Called by the client. Pure. Must never guess a reason that the script did not give.
"""

from __future__ import annotations

from typing import Final

from runner.errors import DuplicateJobError, EnqueueError

__all__ = ["refusal"]

#: Lanes that one tenant may name (enqueue.lua); a larger number is the fleet's bound.
OWN_LANES: Final = 2500


def refusal(told: str) -> EnqueueError | None:
    """Return why the script took none of a batch, None if its error is no such word."""
    word, _, job = told.partition(" ")
    if word == "UNKNOWN_AFTER":
        return EnqueueError(f"nothing was enqueued: no job {job} to wait for; a wrong id, or it ended 7 days ago")
    if word == "CROWDED_AFTER":
        return EnqueueError(f"nothing was enqueued: 1,000 jobs wait for job {job} already; split the flow")
    if word == "CROWDED_LANES":
        holder = "the fleet" if int(job) > OWN_LANES else "its tenant"
        return EnqueueError(
            f"nothing was enqueued: it needs a new lane, and {holder} has {int(job):,}, as many as may be: one for "
            "each queue with each priority, label, node and level that jobs ask for. Use fewer of these, or wait: "
            "lanes that stay empty for an hour make room"
        )
    first, _, holder = job.partition(" ")
    if word == "TAKEN":
        return DuplicateJobError(f"nothing was enqueued: already queued as {holder}, which holds its name", holder)
    if word == "REPEATED":
        return DuplicateJobError(f"nothing was enqueued: job {first} was repeated already, as {holder}", holder)
    return None
