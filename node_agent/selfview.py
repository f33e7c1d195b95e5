"""The record of itself that a node publishes with each heartbeat.

Called by the session. Must never say more of the host than `nodes` shows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from node_agent.containment.host import HostReport
from node_agent.ground import Ground, enforcement
from node_agent.run import now_ms
from runner.wire import record
from runner.wire.times import iso
from runner.wire.view import NodeView

__all__ = ["described"]


def described(
    ground: Ground,
    report: HostReport,
    *,
    hostname: str,
    boot: str,
    state: str,
    busy: int,
    away: bool,
    free: Mapping[str, float],
    egress: str,
) -> bytes:
    """Return it as canonical JSON. ``away``: the store did not answer the last time."""
    settings = ground.settings
    return record.dumps(
        NodeView(
            name=settings.name,
            host=hostname,
            pid=os.getpid(),
            boot=boot,
            state=state,
            level=report.level,
            slots=settings.slots,
            busy=busy,
            queues=settings.queues,
            labels=settings.labels,
            heartbeat_at=iso(now_ms()),
            redis="away" if away else "ok",
            free=dict(free),
            policy=ground.policy.version,
            enforcement={**enforcement(report), "egress": egress},
        )
    )
