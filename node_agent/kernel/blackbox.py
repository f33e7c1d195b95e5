"""The flight recorder, its witness, its numbers and its anchors, put together for one boot.

Called by node_agent/session.py. The record itself is open for as long as the agent's process: a store that comes and
goes begins no file after the other. Must never close it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from node_agent.ground import Ground
from node_agent.kernel.anchors import Anchors
from node_agent.kernel.caller import Caller
from node_agent.kernel.metrics import Metrics
from node_agent.kernel.recorder import Recorder
from node_agent.kernel.seams import Around
from node_agent.kernel.segments import FOLDER
from node_agent.kernel.witness import Witness

__all__ = ["BlackBox"]


class BlackBox:
    """Of one boot: ``join`` once the kernel stands, ``run`` while the boot lives, ``stop`` at its end."""

    def __init__(self, ground: Ground, boot: str) -> None:
        settings = ground.settings
        folder = settings.node_home / FOLDER
        if ground.recorder is None:
            ground.recorder = Recorder(folder, node=settings.name, signer=ground.signer, fleet=ground.fleet)
        self.recorder = ground.recorder
        self.recorder.note("node.boot", fields={"boot": boot, "policy": ground.policy.version})
        self.metrics = Metrics()
        self.witness = Witness(self.recorder, self.metrics)
        self._anchors: Anchors | None = None

    @property
    def fit(self) -> bool:
        """Whether the record can be written: without one nothing starts here."""
        return not self.recorder.failed

    def join(self, around: Around, gauges: Callable[[], Mapping[str, float | Mapping[str, float]]]) -> None:
        """Take note of every call, and anchor the record in the store. ``gauges``: see Metrics."""
        self._anchors = Anchors(self.recorder, around.redis, around.keys, around.notary, around.emit)
        around.noting.append(self._called)
        self.metrics.gauges.append(gauges)

    async def run(self) -> None:
        """Look after the record until cancelled."""
        if self._anchors is not None:
            await self._anchors.run()

    async def stop(self) -> None:
        """Put all on disk and anchor it once more."""
        if self._anchors is not None:
            await self._anchors.stop()

    def _called(self, caller: Caller, op: str, resource: str, outcome: str, ms: float) -> None:
        self.witness.called(caller.run, caller.spec, op, resource, outcome, ms)
