"""What one job passes to another: where its result stands in the next one's arguments, and what stands there instead.

Called by the client (which jobs do these arguments name?) and the node agent (puts verified results in their place).
Pure. Must never look for a placeholder inside a result: what a job returned stays data.

A placeholder is ``{"$": "result", "v": "JOB"}`` in the encoded form of a job's arguments (values.py), only for jobs
that the same envelope names in ``after``. For a job that did not finish, a `Failure` stands there, if the envelope lets
the next job run all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from runner.wire import values
from runner.wire.codec import Json
from runner.wire.values import RESULT, TAG

__all__ = ["MAX_PASSED_BYTES", "MAX_PASSED_VALUES", "Failure", "failure_form", "filled", "references"]

#: Most bytes of results that one job is passed, all together: as much as its own arguments may have.
MAX_PASSED_BYTES: Final = 1024 * 1024
#: And most values in them: a hostile one of a few bytes each would hold up the node that puts it in place (attack 41).
MAX_PASSED_VALUES: Final = 65_536
_PLACEHOLDER: Final = (TAG, "v")


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands for the result of a job that has none; ``state`` and ``reason`` are those of its signed end."""

    job: str
    state: str
    reason: str | None = None
    detail: str | None = None


def failure_form(failure: Failure) -> Json:
    """Return a failure as it stands in encoded arguments."""
    return values.encode(failure)


def references(encoded: Iterable[Json]) -> frozenset[str]:
    """Return the jobs whose results these encoded values ask for."""
    found: set[str] = set()
    left = list(encoded)
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            job, inner = _named(value), value.get("v")
            if job is not None:
                found.add(job)
            elif value.get(TAG) == "dict" and isinstance(inner, dict):
                left += inner.values()
            else:
                left += value.values()
    return frozenset(found)


def filled(encoded: Json, results: Mapping[str, Json]) -> Json:
    """Return an encoded value with every placeholder replaced. Raises KeyError for a job without a result."""
    if isinstance(encoded, list):
        return [filled(item, results) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    job, inner = _named(encoded), encoded.get("v")
    if job is not None:
        return results[job]
    if encoded.get(TAG) == "dict" and isinstance(inner, dict):
        # A dict of the caller that has a key "$" itself: its keys mean nothing to us.
        return {**encoded, "v": {key: filled(item, results) for key, item in inner.items()}}
    return {key: filled(item, results) for key, item in encoded.items()}


def _named(value: dict[str, Json]) -> str | None:
    """Return the job whose result stands here, if this is a placeholder."""
    job = value.get("v")
    return job if value.get(TAG) == RESULT and isinstance(job, str) and len(value) == len(_PLACEHOLDER) else None
