"""The smallest module of tasks there is: what the guest's rehearsal loads and calls, in the zygote and never in a job.

Called by call.rehearse. Must never do anything: it stands for a user's module, of which nothing is loaded before the
worker is restricted.
"""

from __future__ import annotations

import importlib

__all__ = ["app", "nothing"]

# By name: the guest must not depend on the application's side.
app = importlib.import_module("runner.app").App()


@app.task()  # type: ignore[untyped-decorator] # loaded by name
def nothing(value: int = 1) -> int:
    """Return the value."""
    return value
