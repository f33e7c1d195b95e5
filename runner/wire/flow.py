"""Flow rules of one job, as they are signed: retries, dependencies, unique names, rate and concurrency limits.

Called by the client (builds them), the scripts' callers (hints of the hash) and admission (compares hints with what was
signed). Must never name a key of another tenant: every name here lives below its job's tenant (attack 56).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from runner.wire import ids
from runner.wire.errors import RecordError

__all__ = [
    "BUDGET_UNITS",
    "MAX_AFTER",
    "MAX_BUDGET",
    "MAX_RETRIES",
    "MAX_SPAN_S",
    "After",
    "Backoff",
    "Budget",
    "Concurrency",
    "Rate",
    "RetryRule",
    "Unique",
]

#: Most further attempts of one job, and most jobs that one job may wait for.
MAX_RETRIES: Final = 1000
MAX_AFTER: Final = 1000
#: Longest period, delay or hold, in seconds.
MAX_SPAN_S: Final = 366 * 86_400.0
#: Largest bound of a budget, in its unit.
MAX_BUDGET: Final = 1e15
#: What a budget can bound.
BUDGET_UNITS: Final = frozenset({"requests", "tokens", "cost_usd", "cpu_s", "wall_s", "calls"})
_MAX_COUNT: Final = 1_000_000
_MAX_FACTOR: Final = 100
_KEY: Final = re.compile(r"[\x21-\x7e]{1,128}")
_DIGEST: Final = re.compile(r"([0-9a-f]{64})?")
_REASON: Final = re.compile(r"[a-z_]{1,32}(:[A-Za-z_][A-Za-z0-9_]{0,127})?")


@dataclass(frozen=True, slots=True)
class Backoff:
    """The wait before attempt ``n + 1``: ``min(max_delay_s, delay_s * factor ** (n - 1))``, in seconds.

    A random share of up to ``jitter`` (0 to 1) is taken off.
    """

    delay_s: float
    factor: float = 2.0
    max_delay_s: float = 3600.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.delay_s <= MAX_SPAN_S and 0 <= self.max_delay_s <= MAX_SPAN_S):
            raise RecordError("a delay is 0 to 366 days, in seconds", path="retry.backoff")
        if not 1 <= self.factor <= _MAX_FACTOR or not 0 <= self.jitter <= 1:
            raise RecordError(f"a factor is 1 to {_MAX_FACTOR}, a jitter 0 to 1", path="retry.backoff")


@dataclass(frozen=True, slots=True)
class RetryRule:
    """How many further attempts may follow a retryable end; without ``backoff`` at once, at the head of the lane.

    ``retry_on``: only after these reasons (None: every retryable one); ``never_on`` wins over it. ``exception:NAME``
    means exceptions of the class NAME, ``lost`` every reason of lost. A kill or a refusal is never retried.
    """

    count: int = 0
    backoff: Backoff | None = None
    retry_on: tuple[str, ...] | None = None
    never_on: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.count <= MAX_RETRIES:
            raise RecordError(f"retries are 0 to {MAX_RETRIES}", path="retry.count")
        for reason in (*(self.retry_on or ()), *(self.never_on or ())):
            if not _REASON.fullmatch(reason):
                raise RecordError("a reason is lower-case letters and _, or exception:NAME", path="retry.retry_on")


@dataclass(frozen=True, slots=True)
class After:
    """Jobs of the same tenant that must have ended first.

    If one of them did not finish, this job is refused, or with ``failed`` = run it runs all the same.

    ``envelopes``: the SHA-256 of each one's signed envelope in hex, or an empty text where the client did not know it;
    clients choose job ids, so an id alone does not say whose job is meant.
    """

    jobs: tuple[str, ...]
    failed: Literal["refuse", "run"] = "refuse"
    envelopes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.jobs) <= MAX_AFTER or len(set(self.jobs)) != len(self.jobs):
            raise RecordError(f"a job waits for 1 to {MAX_AFTER} other jobs", path="after.jobs")
        for job in self.jobs:
            ids.check_job_id(job)
        if self.envelopes and len(self.envelopes) != len(self.jobs):
            raise RecordError("there is one hash for each job, or none at all", path="after.envelopes")
        if not all(_DIGEST.fullmatch(digest) for digest in self.envelopes):
            raise RecordError("a hash is 64 hex digits, or empty where it is not known", path="after.envelopes")


@dataclass(frozen=True, slots=True)
class Unique:
    """At most one job of a tenant holds ``key``: until it starts, until it ends, or for ``ttl_s`` whatever happens.

    ``ttl_s`` 0 = the job's own not_after bounds the hold, so that no key is left behind.
    """

    key: str
    until: Literal["start", "end", "ttl"] = "end"
    ttl_s: float = 0.0

    def __post_init__(self) -> None:
        _check_key(self.key, "unique.key")
        if not 0 <= self.ttl_s <= MAX_SPAN_S or (self.until == "ttl" and self.ttl_s <= 0):
            raise RecordError("until = ttl needs ttl_s: a positive number of seconds", path="unique.ttl_s")


@dataclass(frozen=True, slots=True)
class Rate:
    """At most ``count`` starts in any ``period_s`` seconds among the tenant's jobs with this ``key``."""

    key: str
    count: int
    period_s: float

    def __post_init__(self) -> None:
        _check_key(self.key, "rate.key")
        if not 1 <= self.count <= _MAX_COUNT or not 0 < self.period_s <= MAX_SPAN_S:
            raise RecordError("a rate is 1 to 1,000,000 starts in up to 366 days", path="rate.count")


@dataclass(frozen=True, slots=True)
class Concurrency:
    """At most ``count`` of the tenant's jobs with this ``key`` hold a slot at a time, in the whole fleet."""

    key: str
    count: int

    def __post_init__(self) -> None:
        _check_key(self.key, "concurrency.key")
        if not 1 <= self.count <= _MAX_COUNT:
            raise RecordError("a concurrency limit is 1 to 1,000,000", path="concurrency.count")


def _check_key(key: str, path: str) -> None:
    if not _KEY.fullmatch(key):
        raise RecordError("a key is 1 to 128 printable ASCII characters without spaces", path=path)


@dataclass(frozen=True, slots=True)
class Budget:
    """What all jobs of a tenant that name the same ``key`` may spend together; None: not bounded.

    ``requests``: proxied requests. ``tokens``: of models, in and out. ``cost_usd``: by the node's price table.
    ``cpu_s``, ``wall_s``: of all attempts. ``calls``: tool calls. ``on_hit``: what happens to the jobs then. A budget
    ends ``ttl_s`` after its last use; an ended one begins anew.
    """

    key: str
    requests: int | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    calls: int | None = None
    on_hit: Literal["freeze", "kill"] = "freeze"
    ttl_s: float = 30 * 86_400.0

    @property
    def bounds(self) -> dict[str, float]:
        """What is bounded, by unit."""
        found = ((unit, getattr(self, unit)) for unit in sorted(BUDGET_UNITS))
        return {unit: float(bound) for unit, bound in found if bound is not None}

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise RecordError("a key has 1 to 128 printable ASCII characters without spaces", path="key")
        bounds = (self.requests, self.tokens, self.cost_usd, self.cpu_s, self.wall_s, self.calls)
        if all(bound is None for bound in bounds):
            raise RecordError("a budget bounds something", path="budget")
        if any(bound is not None and not 0 <= bound <= MAX_BUDGET for bound in bounds):
            raise RecordError(f"a bound is 0 to {MAX_BUDGET:g}", path="budget")
        if not 0 < self.ttl_s <= MAX_SPAN_S:
            raise RecordError("a time is more than 0 and at most 366 days", path="ttl_s")
