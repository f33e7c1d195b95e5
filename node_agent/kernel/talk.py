"""What jobs say to each other, and what is said to them: mail, signals, watching, loops, around one bell.

Made by stand, once per boot. Must never open a second blocking read: all of them hear the node's one bell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from node_agent.doornews import Metered
from node_agent.kernel.bell import Bell
from node_agent.kernel.caller import Caller
from node_agent.kernel.loops import Loops
from node_agent.kernel.mail import Mail
from node_agent.kernel.mailstore import MailStore
from node_agent.kernel.seals import Peers, Seals
from node_agent.kernel.seams import Around, Part
from node_agent.kernel.signalpost import Sent
from node_agent.kernel.signalroad import Road
from node_agent.kernel.signals import Signals
from node_agent.kernel.storecalls import StoreCalls
from node_agent.kernel.watch import Watch
from node_agent.pausing import Pauser
from node_agent.run import Run, now_ms
from runner.wire import ids
from runner.wire.card import NodeCard
from runner.wire.signals import SignalName
from runner.wire.spec import JobSpec

__all__ = ["Talk"]


class Alone:
    """Without a fleet nobody's word counts: letters are put away, and no other job is known."""

    async def fleet_cards(self, *, fresh: bool) -> Sequence[NodeCard]:
        """Return no card."""
        return ()

    async def known(self, job: str, tenant: str) -> JobSpec | None:
        """Return nothing."""
        return None


class Talk:
    """The talking parts of one boot; they start and stop with what stands around them."""

    def __init__(self, around: Around, peers: Peers) -> None:
        rule, redis, keys, node = around.loop, around.redis, around.keys, around.node
        bell = Bell(redis, keys, node)
        seals = Seals(around.notary, peers)
        self._rule, self._node, self._runs = rule, node, around.runs
        self._tasks: set[asyncio.Future[None]] = set()
        self.mail = Mail(around, MailStore(StoreCalls(redis, keys), node), seals, bell)
        self.signals = Signals(around, Pauser(around.notary, around, around.told), Road(redis, keys, node, bell, seals))
        self.watch = Watch(around, seals)
        self.loops = Loops(rule, self._looped)
        around.starting.append(bell.start)
        around.stopping.append(bell.stop)
        around.repeating.append(self.loops.seen)
        around.metering.append(self._metered)
        around.stopping.append(self._stop)
        around.ending.append(self._ended)

    @classmethod
    def on(cls, around: Around) -> Talk:
        """Return what talks on this node."""
        return cls(around, around.ends or Alone())

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every part that has calls."""
        return (self.mail, self.signals, self.watch)

    async def _looped(self, run: Run, why: str) -> None:
        """Do with a job in a loop what this node's policy says."""
        if self._rule.action == "tell":
            self.signals.notify(run, SignalName.LOOP, why)
            return
        name = SignalName.LOOP
        if self._rule.action == "kill":
            self.signals.notify(run, SignalName.LOOP, why)
            name, why = SignalName.KILL, f"LOOP: {why}"
        await self.signals.carry_out(run, Sent(name, f"node {self._node}", now_ms(), why))

    def _metered(self, told: Metered) -> None:
        """The same request to a model again and again is a loop, too."""
        run = next((run for run in self._runs() if ids.attempt_name(run.job_id, run.attempt) == told.attempt), None)
        looped = self.loops.counted(run, "requests to a model", told.same) if run is not None else None
        if looped is not None:
            task = asyncio.ensure_future(looped)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, caller: Caller) -> None:
        self.loops.ended(caller.attempt)
