"""Events that a job can cause at will: a stream of its own, capped and rated, away from ends and kills (attack 32).

Called by the kernel's parts and for what the egress process denies. Must never wait, and never let one job's events
take the room of another's: what is over the rate is dropped and counted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from node_agent.kernel.bucket import Bucket
from node_agent.records import Notary, Signed
from runner.wire.event import EventType

__all__ = ["BURST", "PER_S", "JobEvents"]

#: Events of one job: at once, and in the long run.
BURST: Final = 50.0
PER_S: Final = 5.0
#: How many jobs' rates are remembered; the oldest is forgotten, and may begin anew.
_MOST_JOBS: Final = 4096


class JobEvents:
    """One boot's. ``post`` stores a signed event of a job soon; False if there is no room for it."""

    def __init__(
        self, notary: Notary, post: Callable[[str, Signed], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._notary = notary
        self._post = post
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self.dropped = 0

    def tell(self, job: str, attempt: int, kind: EventType, detail: dict[str, str | int | float | bool]) -> bool:
        """Store one event of ``job``; return whether there was room for it."""
        bucket = self._buckets.get(job)
        if bucket is None:
            bucket = self._buckets[job] = Bucket(PER_S, BURST, self._clock)
            if len(self._buckets) > _MOST_JOBS:
                self._buckets.popitem(last=False)
        if bucket.take() and self._post(job, self._notary.event(kind, job=job, attempt=attempt, detail=detail)):
            return True
        self.dropped += 1
        return False
