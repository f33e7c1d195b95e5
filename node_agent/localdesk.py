"""What the node's own socket answers: kill a job here without the store, and what runs here.

Called by LocalSocket. Must never wait for the store: the proof is the kernel's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from node_agent.records import Notary
from node_agent.run import KillOrder, now_ms
from node_agent.supervisor import Supervisor
from runner.wire import codec, record

__all__ = ["LocalDesk"]

_MAX_WAIT_S = 3600.0


class LocalDesk:
    """Serves ``{"op": "kill", "job", "grace_s", "force", "reason", "wait_s"}``, ``{"op": "runs"}``, ``"metrics"``."""

    def __init__(
        self, supervisor: Supervisor, notary: Notary, metrics: Callable[[], dict[str, codec.Json]] = dict
    ) -> None:
        self._supervisor = supervisor
        self._notary = notary
        self._metrics = metrics

    async def handle(self, request: dict[str, codec.Json]) -> dict[str, object]:
        """Return the answer to one request; an unknown op is an error."""
        if request.get("op") == "kill":
            return await self._kill(request)
        if request.get("op") == "runs":
            return {"runs": [{"job": run.job_id, "attempt": run.attempt} for run in self._supervisor.runs()]}
        if request.get("op") == "metrics":
            return {"node": self._notary.node, "metrics": self._metrics()}
        return {"error": "unknown op"}

    async def _kill(self, request: dict[str, codec.Json]) -> dict[str, object]:
        job = str(request.get("job", ""))
        order = KillOrder(
            command="",
            requested_at_ms=now_ms(),
            grace_s=_number(request.get("grace_s"), 0.0),
            force=request.get("force") is True,
            reason=str(request.get("reason", ""))[:1024],
            by=f"local:uid {os.getuid()}",
        )
        await self._supervisor.end_idle()
        run = self._supervisor.find(job)
        if run is None:
            return {"receipt": record.encode(self._notary.answer(job, order, "unknown", ""))}
        run.kill(order)
        try:
            async with asyncio.timeout(order.grace_s + _number(request.get("wait_s"), 15.0)):
                proof = run.proof if run.proof is not None else await asyncio.shield(run.proved)
        except TimeoutError:
            return {"receipt": record.encode(self._notary.answer(job, order, "unconfirmed", "killing", run.attempt))}
        return {"receipt": record.encode(self._notary.receipt(run, order, proof))}


def _number(value: codec.Json, default: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return min(max(0.0, float(value)), _MAX_WAIT_S)
