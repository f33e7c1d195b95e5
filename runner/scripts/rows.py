"""A signed job as enqueue.lua takes it: where it goes, and what of it the store's readers may see.

Called by the client (enqueues jobs) and the scheduler (enqueues occurrences). Standard library only. Everything here is
a hint: whatever decides is recomputed from the signed job on the node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from runner.wire import codec
from runner.wire import spec as specs
from runner.wire.spec import JobSpec

__all__ = ["is_plain", "row"]

#: RQ's own limit of a job lies this much above ours, in seconds.
RQ_TIMEOUT_MARGIN_S: Final = 60
DEFAULT_TIMEOUT_S: Final = 3600.0
#: What only jobs have that wait, are limited or repeat another one (rules.lua).
_RULES: Final = frozenset({"after", "due", "flow", "again"})


def row(job: JobSpec, now_ms: int) -> dict[str, object]:
    """Return one entry of ``jobs``; ``now_ms`` (Unix time): a job that may start later carries its due time."""
    limit_s = job.limits.timeout_s or DEFAULT_TIMEOUT_S
    found: dict[str, object] = {
        "id": job.id,
        "lane": specs.lane_of(job),
        "tenant": job.tenant,
        "task": job.name,
        "description": job.name,
        "timeout": math.ceil(limit_s) + RQ_TIMEOUT_MARGIN_S,
        "sel": "\n".join(specs.selectors_of(job)),
        "tags": codec.dump(job.tags).decode("utf-8") if job.tags else "{}",
        "not_after": job.not_after_ms,
        "retries": job.retry.count,
        "once": int(job.at_most_once),
        **({"after": list(job.after.jobs), "failed": job.after.failed} if job.after is not None else {}),
    }
    if flow := specs.flow_of(job):
        found["flow"] = flow
    if job.not_before_ms > now_ms:
        found["due"] = job.not_before_ms
    return found


def is_plain(row: Mapping[str, object]) -> bool:
    """Return whether `enqueue_plain` can take the row."""
    return _RULES.isdisjoint(row)
