"""Keeps agents apart that lost the store in the same moment: without it they would all come back in the same moment.

Called by every loop that waits for the store. Pure but for chance.
"""

from __future__ import annotations

import random

__all__ = ["spread"]


def spread(wait_s: float) -> float:
    """Return a time between half of ``wait_s`` and all of it."""
    return wait_s * random.uniform(0.5, 1.0)  # noqa: S311 - keeps agents apart, protects nothing
