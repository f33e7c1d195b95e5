"""What models cost: the node's price table, in US dollars for a million tokens. Pure.

Called by the agent's start (reads the file) and budgets. Must never guess: a model that is not listed has no price, and
a job whose budget bounds cost can't go on with it.

    version = 1
    [models."gpt-4o-mini*"]         # fnmatch patterns; the first one that matches counts
    in = 0.15
    out = 0.60
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from node_agent.errors import PolicyError

__all__ = ["Prices", "parse"]

_MILLION: Final = 1e6
_MOST_USD: Final = 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Pattern, price of a million tokens in, and out."""

    rows: tuple[tuple[str, float, float], ...] = ()

    def cost_usd(self, model: str, tokens_in: int, tokens_out: int) -> float | None:
        """Return the cost, None for a model without a price."""
        for pattern, inward, outward in self.rows:
            if fnmatchcase(model, pattern):
                return (tokens_in * inward + tokens_out * outward) / _MILLION
        return None

    def most_usd(self, tokens_in: int, tokens_out: int) -> float | None:
        """Return what the dearest listed model would cost, None if none is listed."""
        return max(
            ((tokens_in * inward + tokens_out * outward) / _MILLION for _, inward, outward in self.rows), default=None
        )


def parse(text: str) -> Prices:
    """Return the table of a TOML text. Raises PolicyError for anything not understood (fail closed)."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"the price table is not TOML: {error}") from None
    if table.pop("version", None) != 1:
        raise PolicyError("the price table needs `version = 1`")
    models = table.pop("models", {})
    if table or not isinstance(models, dict):
        raise PolicyError('the price table has `version` and [models."NAME"] tables, nothing else')
    return Prices(tuple((name, *_prices(name, entry)) for name, entry in models.items()))


def _prices(name: str, entry: object) -> tuple[float, float]:
    if not isinstance(entry, dict) or set(entry) != {"in", "out"}:
        raise PolicyError(f'[models."{name}"] has `in` and `out`: US dollars for a million tokens')
    found = []
    for price in (entry["in"], entry["out"]):
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price <= _MOST_USD:
            raise PolicyError(f'[models."{name}"]: a price is 0 to {_MOST_USD:g} US dollars for a million tokens')
        found.append(float(price))
    return found[0], found[1]
