"""From what a caller writes to the flow rules that are signed: retries, unique names, rates and concurrency limits.

Called by request (options of a job) and the command line (texts). Standard library and wire only. Must never accept a
rule that would be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from runner.errors import UsageError
from runner.wire.flow import BUDGET_UNITS, Backoff, Budget, Concurrency, Rate, RetryRule, Unique

__all__ = ["amounts_of", "budget_of", "concurrency_of", "rate_of", "retry_rule", "unique_of", "units_of"]

#: The share of a wait that chance may take off, unless a Backoff says otherwise: jobs that fail together come apart.
_JITTER: Final = 0.25
_RATE: Final = re.compile(r"(\S+)=(\d{1,7})/(\d{1,8}(?:\.\d{1,3})?)")
_BUDGET: Final = re.compile(r"(\S+):([a-z_]+=[^\s:]+)")
#: Short names of units on the command line.
_UNITS: Final = {"cost": "cost_usd", "cpu": "cpu_s", "wall": "wall_s"}
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


def budget_of(text: str) -> Budget:
    """Return the budget of ``KEY:UNIT=N,UNIT=N``; ``on_hit=kill`` may be among them. Raises UsageError."""
    match = _BUDGET.fullmatch(text)
    if match is None:
        raise UsageError("a budget is KEY:UNIT=N[,UNIT=N], such as team:tokens=100000,cost=5")
    words = [part for part in match[2].split(",") if not part.startswith("on_hit=")]
    ends = [part.removeprefix("on_hit=") for part in match[2].split(",") if part.startswith("on_hit=")]
    if len(ends) > 1 or (ends and ends[0] not in ("freeze", "kill")):
        raise UsageError("on_hit is freeze or kill")
    amounts = amounts_of(words)
    counts = {unit: int(amount) for unit, amount in amounts.items() if unit in ("requests", "tokens", "calls")}
    if any(amounts[unit] != count for unit, count in counts.items()):
        raise UsageError("requests, tokens and calls are whole numbers")
    times = {unit: amount for unit, amount in amounts.items() if unit not in counts}
    return Budget(match[1], **counts, **times, on_hit="kill" if ends == ["kill"] else "freeze")  # type: ignore[arg-type]  # units


def amounts_of(words: Sequence[str]) -> dict[str, float]:
    """Return the amounts of ``UNIT=N`` words. Raises UsageError."""
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        unit = _UNITS.get(name, name)
        try:
            amount = float(number)
        except ValueError:
            amount = -1.0
        if unit not in BUDGET_UNITS or unit in found or not 0 <= amount < float("inf"):
            raise UsageError(f"{word!r}: an amount is UNIT=N, each unit once, with UNIT one of {_known_units()}")
        found[unit] = amount
    return found


def units_of(amounts: Mapping[str, float]) -> dict[str, float]:
    """Return amounts by the budget's own units, of either spelling (``wall`` is ``wall_s``). Raises UsageError."""
    found = {_UNITS.get(name, name): amount for name, amount in amounts.items()}
    if not found.keys() <= BUDGET_UNITS or len(found) < len(amounts):
        raise UsageError(f"an amount has a unit, each once, of {_known_units()}; not {', '.join(amounts)}")
    return found


def _known_units() -> str:
    return ", ".join(sorted({*BUDGET_UNITS - set(_UNITS.values()), *_UNITS}))
