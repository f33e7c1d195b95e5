"""What a job's own code may use: one module for each part of the kernel, loaded when it is asked for.

    from runner.inside import files, mail, progress

Called by jobs. Must never load a part that a job does not use: a worker's memory is its zygote's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.guest import files, jobs, mail, policy, progress, signals, state, tools
    from runner.guest.calls import CallRefused, Session, call

__all__ = ["CallRefused", "Session", "call", "files", "jobs", "mail", "policy", "progress", "signals", "state", "tools"]

_CALLS = ("CallRefused", "Session", "call")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "runner.guest.calls" if name in _CALLS else f"runner.guest.{name}"
    module = importlib.import_module(home)
    found: object = getattr(module, name) if name in _CALLS else module
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return list(__all__)
