"""Which jobs may run where another one ran before (``reuse=N``): none that needs what is made for one attempt alone.

Called by the client, for an early word, and by the node's admission, which decides. Pure.
"""

from __future__ import annotations

from runner.wire.spec import JobSpec

__all__ = ["problem"]


def problem(spec: JobSpec) -> str | None:
    """Return why this job can't be run with ``reuse``, None if it can (or does not ask for it)."""
    if not spec.reuse:
        return None
    reasons = (
        (spec.task is None, "only a task can be: a command takes the place of its worker"),
        (bool(spec.grants.paths), "path grants are opened, checked and mounted anew for each attempt"),
        (bool(spec.grants.reach), "what a job reaches on the net is a door of its own attempt"),
        (spec.needs_broker, "secrets, sealed values and services belong to one attempt alone"),
        (spec.budget is not None, "what is left of a budget is looked at before each start"),
        (spec.at_most_once, "the start of an at-most-once job is written down before its worker has anything of it"),
    )
    found = next((why for applies, why in reasons if applies), None)
    return None if found is None else f"the job can't share its worker (reuse): {found}; leave reuse out"
