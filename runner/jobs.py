"""The function that every job names for RQ, and that nobody may run.

Loaded only by a stock RQ worker that was pointed at our queues by mistake. Must never run anything: a worker of RQ has
no isolation, checks no signature and no policy, so the job fails closed.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["run"]


def run(**_job: str) -> NoReturn:
    """Refuse.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "this is a Ringfence job: only a node agent may run it. Stop this RQ worker, or give it other queues, "
        "and start `ringfence agent`"
    )
