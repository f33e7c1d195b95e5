"""From what a caller writes to the flow rules that are signed: retries, unique names, rates and concurrency limits.

Called by request (options of a job) and the command line (texts). Standard library and wire only. Must never accept a
rule that would be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from runner.errors import UsageError
from runner.wire.flow import Backoff, Concurrency, Rate, RetryRule, Unique

__all__ = ["concurrency_of", "rate_of", "retry_rule", "unique_of"]

#: The share of a wait that chance may take off, unless a Backoff says otherwise: jobs that fail together come apart.
_JITTER: Final = 0.25
_RATE: Final = re.compile(r"(\S+)=(\d{1,7})/(\d{1,8}(?:\.\d{1,3})?)")
_PLACES: Final = re.compile(r"(\S+)=(\d{1,7})")


def retry_rule(
    retries: int, backoff: float | Backoff | None, retry_on: Sequence[str] | None, never_on: Sequence[str] | None
) -> RetryRule:
    """Return the rule. A number of seconds doubles from attempt to attempt, up to an hour, less up to a quarter.

    Raises UsageError, RecordError.
    """
    if isinstance(retry_on, str) or isinstance(never_on, str):
        raise UsageError("retry_on and never_on are lists of reasons, such as ['exit', 'exception:TimeoutError']")
    if not retries and (backoff is not None or retry_on is not None or never_on is not None):
        raise UsageError("backoff, retry_on and never_on say how to retry: say how often, too (retries=N)")
    if isinstance(backoff, int | float):
        backoff = Backoff(float(backoff), jitter=_JITTER)
    on = None if retry_on is None else tuple(retry_on)
    return RetryRule(retries, backoff, on, None if never_on is None else tuple(never_on))


def unique_of(asked: str | Unique | None) -> Unique | None:
    """Return the rule of a name: a text holds until the job's end."""
    return Unique(asked) if isinstance(asked, str) else asked


def rate_of(text: str) -> Rate:
    """Return the rate of ``KEY=COUNT/SECONDS``. Raises UsageError, RecordError."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise UsageError("a rate is KEY=COUNT/SECONDS, such as mail=10/60")
    return Rate(match[1], int(match[2]), float(match[3]))


def concurrency_of(text: str) -> Concurrency:
    """Return the limit of ``KEY=COUNT``. Raises UsageError, RecordError."""
    match = _PLACES.fullmatch(text)
    if match is None:
        raise UsageError("a concurrency limit is KEY=COUNT, such as licence=2")
    return Concurrency(match[1], int(match[2]))
