"""A job with a budget begins once that has room, and its end is charged.

Called by the supervisor between a worker's READY and its payload. Must never let a job begin whose budget nobody keeps.
"""

from __future__ import annotations

import asyncio

from node_agent.cancelling import end_all
from node_agent.containment.plan import Verdict
from node_agent.errors import InvariantError
from node_agent.kernel.desk import Desk
from node_agent.run import Run, now_ms

__all__ = ["funded"]


async def funded(kernel: Desk | None, run: Run, verdict: asyncio.Future[Verdict]) -> None:
    """Return once the job's budget has room, or its attempt is over.

    Its worker stands, nothing of the job runs, and no time limit counts but that until which the job was signed.
    """
    spec, spending = run.spec, kernel.around.spending if kernel is not None else None
    if spending is None or spec is None:
        raise InvariantError("a budget that nobody keeps")
    verdict.add_done_callback(lambda done: spending.ended(run, None if done.cancelled() else done.result().usage))
    room = asyncio.get_running_loop().create_task(spending.begin(run))
    if run.wall is not None:
        run.wall.pause((spec.not_after_ms - now_ms()) / 1000, lambda: run.stop("pause_limit"))
    try:
        await asyncio.wait((room, verdict), return_when=asyncio.FIRST_COMPLETED)
        if room.done():
            room.result()
    finally:
        await end_all((room,))
        if run.wall is not None:
            run.wall.resume()
