"""Jobs that gave their slot free until a person has decided: how they come back, and how often they may.

Called by approvals (on_ask = "requeue"), the desk (before an attempt is let in) and, through the desk, the supervisor.
A job parks by ending its attempt and waiting, like one whose retry is due when the time to decide is over; a decision
makes it due at once. Must never let an attempt more in than were signed, but one for each word that an operator signed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Final

from node_agent.cancelling import end_all
from node_agent.kernel.errors import CallError
from node_agent.kernel.storecalls import StoreCalls, text_of
from node_agent.kernel.words import Words
from node_agent.run import Run
from runner.wire import ids
from runner.wire.calls import ErrorCode

__all__ = ["Parking"]

log = logging.getLogger(__name__)

#: What a job has between SIGTERM and its end, to write down what it wants to know in its next attempt, in seconds.
GRACE_S: Final = 5.0
_AGAIN_S: Final = 0.5


class Parking:
    """One boot's parked jobs."""

    def __init__(self, calls: StoreCalls, words: Words) -> None:
        self._calls, self._words = calls, words
        self._watching: set[asyncio.Task[None]] = set()

    def park(self, run: Run, left_s: float) -> None:
        """End an attempt whose job comes back after a decision, or when its time is over, in ``left_s`` seconds."""
        if run.stopping:
            return
        run.parked_ms = max(1, round(left_s * 1000))
        run.give_up("parked", GRACE_S)
        task = asyncio.get_running_loop().create_task(self._watch(run))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def parks(self, run: Run) -> None:
        """Note how many attempts the words of operators allow beside those that were signed; wait for the store.

        A store that refuses the question, for example because its key was spoilt, knows of no words.
        """
        while not run.stopping:
            try:
                run.parks, run.undecided = await self._words_of(run.job_id)
            except CallError as error:
                if error.error is not ErrorCode.UNAVAILABLE:
                    return
                await asyncio.sleep(_AGAIN_S)
            else:
                return

    async def stop(self) -> None:
        """End what is under way. Idempotent."""
        await end_all(self._watching)

    async def _words_of(self, job: str) -> tuple[int, bool]:
        """Return how many parked questions were answered, and whether one was not."""
        answered, open_ones = 0, 0
        reply = await self._calls.run("ask", self._keys(job), {"op": "words"})
        texts = [text_of(part) for part in reply]
        for question, told, text in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
            if not _requeues(told):
                continue
            word = self._words.read(text, ids.tenant_of(job)) if text else None
            # Each costs a signature: the loop belongs to others in between (attack 41).
            await asyncio.sleep(0)
            if word is not None and word.ask == question and word.selector.value == job:
                answered += 1
            else:
                open_ones += 1
        return answered, open_ones > 0

    async def _watch(self, run: Run) -> None:
        """A word that came before the job was put aside has found nothing to wake: do it once it is."""
        await asyncio.shield(run.acknowledged)
        try:
            await self._calls.run("ask", self._keys(run.job_id), {"op": "wake", "job": run.job_id})
        except CallError as error:
            log.debug("a parked job is not looked after", extra={"job": run.job_id, "error": str(error)})

    def _keys(self, job: str) -> tuple[str, str, str]:
        keys = self._calls.keys
        return keys.ask(job), keys.asks(ids.tenant_of(job)), keys.due()


def _requeues(told: str) -> bool:
    try:
        found = json.loads(told)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("how") == "requeue"
