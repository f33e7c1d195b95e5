"""What the API warns about, as a line of the command's own.

Called by the commands that enqueue jobs. Must never hide a warning, or turn one into an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from runner.cli.output import say
from runner.suspects import PlainSecretWarning

__all__ = ["warnings_said"]

_R = TypeVar("_R")


def warnings_said(act: Callable[[], _R]) -> Callable[[], _R]:
    """Return ``act``, which now says what it warns about once it has ended, however it ends."""

    def run() -> _R:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", PlainSecretWarning)
            try:
                return act()
            finally:
                for one in told:
                    say(f"warning: {one.message}")

    return run
