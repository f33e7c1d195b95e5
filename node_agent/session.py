"""Port: redis. One boot of an agent: its parts, put together, started in order and stopped in order.

Called by the agent. Must never claim before the lease stands and the lifelines carry it, and never leave a process, a
group or a socket behind when it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import ClassVar, Final

from redis.asyncio import Redis

from node_agent.cancelling import end_all
from node_agent.containment import probe
from node_agent.control import Control, judge
from node_agent.deciding import Decider
from node_agent.dependencies import Dependencies
from node_agent.diskwatch import DiskWatch
from node_agent.dispatch import Dispatcher, wake_loop
from node_agent.egress import SOCKET_NAME, Denied, Egress
from node_agent.errors import LeaseLostError, NameTakenError
from node_agent.ground import Ground
from node_agent.heartbeat import Heartbeat
from node_agent.kernel.blackbox import BlackBox
from node_agent.kernel.stand import Bench, stand
from node_agent.lanes import Lanes
from node_agent.lease import Lease
from node_agent.ledger import Ledger
from node_agent.local import LocalSocket
from node_agent.localdesk import LocalDesk
from node_agent.mail import Mail
from node_agent.nodestate import NodeFacts, NodeState, state_of
from node_agent.operating import Operator
from node_agent.pausing import Pauser
from node_agent.records import Notary
from node_agent.rq_store import Store
from node_agent.rqstop import RqStop
from node_agent.run import now_ms
from node_agent.scheduler import Scheduler
from node_agent.scheduler_store import TimeStore
from node_agent.selfview import described
from node_agent.sequences import Sequences
from node_agent.slotset import SlotSet
from node_agent.stage import Stage
from node_agent.storecheck import faults, store_places
from node_agent.supervisor import Supervisor, Tools
from node_agent.vaultdesk import desk_of
from node_agent.vaultnews import VaultNews
from node_agent.wakeups import Wakeups
from runner.wire import ids
from runner.wire.event import EventType
from runner.wire.keys import Keys

__all__ = ["Session"]

log = logging.getLogger(__name__)

_STOP_S: Final = 10.0
#: How long a store that hangs may hold up the last word: without it the lease lapses by itself.
_GOODBYE_S: Final = 2.0
#: How often lapsed leases of others are looked for, in heartbeats.
_RECOVERY_BEATS: Final = 0.1


class Session:
    """One boot. ``start`` registers, ``run`` serves, ``stop`` ends everything and is idempotent."""

    #: Turn, lease, recovery, control and sweeps, wake-ups, mail, time, calls of jobs: each on a connection of its own.
    CONNECTIONS: ClassVar[int] = 8

    def __init__(self, ground: Ground, clients: Sequence[Redis], keys: Keys, *, host: str, hostname: str) -> None:
        settings = ground.settings
        self._ground = ground
        self._settings = settings
        self._clients = clients
        self._host = host
        self._hostname = hostname
        self.boot = ids.new_boot()
        self._keys = keys
        self._store = Store(
            clients[0], node=settings.name, boot=self.boot, keys=self._keys, ttl_s=settings.result_ttl_s
        )
        self._registered = False
        self._stopped = False
        self._state = "starting"
        self._slots = SlotSet(ground)
        self._tasks: list[asyncio.Task[None]] = []
        #: Ends what else each part has under way, in this order.
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._lost = asyncio.Event()

    async def start(self) -> None:
        """Probe, make the slots, register, take the first lease, inherit older boots' jobs.

        Raises:
            NameTakenError: a live agent on another host has this name. StoreAwayError.
        """
        ground, settings = self._ground, self._settings
        if ground.report is None:
            ground.report = await probe.probe(settings.home, groups=ground.groups, max_level=settings.max_level)
        lanes = await self._store.lanes()
        self._report = ground.report
        await self._slots.make(self._report.level)
        self._box = BlackBox(ground, self.boot)
        self._notary = Notary(ground.signer, settings.name, self.boot, self._report.level, self._box.witness)
        self._placing = ground.placing(self._report)
        self._lanes = Lanes(settings.name, settings.queues, settings.labels, self._report.level)
        self._mail = Mail(self._clients[5], self._keys, self._store.on(self._clients[5]), self._notary)
        self._ledger = Ledger(settings.node_home / "ledger", now_ms())
        self._sequences = Sequences(settings.node_home / "sequences", now_ms())
        place = ground.home.sockets / SOCKET_NAME
        self._egress = Egress(place, await store_places(self._clients[0]), self._tell_denied, self._tell_used)
        self._make_stage()
        self._make_kernel()
        self._lease = Lease(self._slots.every, settings.lease_s, settings.margin_s)
        self._dispatcher = Dispatcher(
            self._store, settings.slots, self._lanes.order, self._lost.set, self._fit, self._lanes.refresh
        )
        self._watch = DiskWatch(
            settings.node_home,
            lambda: self._supervisor.runs(),
            Pauser(self._notary, self._mail),
            self._notary,
            self._mail.emit,
        )
        self._dispatcher.sparing = lambda: self._placing.sparing
        self._dispatcher.found, self._dispatcher.unseen = self._lanes.found, lambda: self._lanes.unseen
        self._supervisor = Supervisor(self._tools(), self._dispatcher)
        self._dispatcher.serve(self._supervisor)
        self._closers.insert(0, self._supervisor.close)
        self._operator = self._make_operator()
        self._heartbeat = self._make_heartbeat()
        desk = LocalDesk(self._supervisor, self._notary, self._box.metrics.snapshot)
        self._local = LocalSocket(ground.home.sockets / settings.name, desk.handle)
        self._lanes.refresh(lanes)
        clock = TimeStore(self._clients[6], f"{settings.name}/{self.boot}", self._keys, settings.result_ttl_s)
        self._scheduler = Scheduler(clock)
        self._closers.append(self._scheduler.stop)
        self._egress.start()
        await self._register()
        await self._local.start()

    def _make_stage(self) -> None:
        self._news = VaultNews(self._notary, self._mail.emit, self._lanes, lambda: self._dispatcher.wake())
        self._vault = desk_of(self._ground.home.sockets, self._report.level, self._news)
        self._stage = Stage(
            self._ground.protected,
            self._slots.uids,
            self._slots.idmaps,
            egress=self._egress,
            vault=self._vault,
            view=self._report.level in ("A", "B"),
        )
        self._closers += [self._mail.close, self._close_ledger, self._stage.close, self._egress.stop]
        if self._vault is not None:
            self._vault.start()
            self._closers.append(self._vault.stop)

    def _make_kernel(self) -> None:
        """What running jobs may ask for; jobs end before it does."""
        bench, runs = Bench(self._ground, self._slots, self._stage), lambda: self._supervisor.runs()
        self._kernel = stand(bench, self._clients[7], self._keys, self._notary, self._mail, self._box.recorder, runs)
        self._box.join(self._kernel.around, self._gauges)
        self._egress.on_metered = self._kernel.metered
        self._kernel.start()
        self._closers.insert(0, self._kernel.stop)

    def _make_operator(self) -> Operator:
        rules = self._ground.rules(self._report)
        operator = Operator(
            self._clients[3],
            self._keys,
            self._settings.node_home / "drained",
            self._lanes,
            self._dispatcher,
            self._supervisor,
            self._notary,
            self._mail,
            self._sequences,
            lambda command, payload, signature: judge(command, payload, signature, rules, now_ms(), expires=False),
        )
        self._closers.insert(0, operator.close)
        return operator

    def _make_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self._store.on(self._clients[1]),
            self._store.on(self._clients[2]),
            self._lease,
            self._supervisor,
            heartbeat_s=self._settings.heartbeat_s,
            describe=self._describe,
            lanes=lambda: self._lanes.known,
        )

    def _fit(self) -> bool:
        """Whether jobs may be claimed now: the node's state says so, and there is room."""
        return self._node_state().claims and not self._placing.blocked

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``. Raises LeaseLostError when a new boot is needed."""
        zygote, operator, rules = self._slots.zygote, self._operator, self._ground.rules(self._report)
        await operator.learn()
        control = Control(
            self._clients[3],
            self._keys,
            self._store.on(self._clients[3]),
            self._lanes,
            self._supervisor,
            self._mail,
            self._notary,
            rules,
            self._sequences,
            Decider(self._notary, self._mail, self._sequences, self._vault, self._news),
            operator,
        )
        control.signalled = self._kernel.signals.ordered
        self._closers.insert(0, control.close)
        loops = [
            self._task(self._dispatcher.run()),
            self._task(self._heartbeat.run()),
            self._task(self._heartbeat.run_recovery(_RECOVERY_BEATS * self._settings.heartbeat_s)),
            self._task(control.run()),
            self._task(self._mail.run()),
            self._task(self._watch.run()),
            self._task(self._box.run()),
            self._task(self._scheduler.run()),
            self._task(wake_loop(self._wakeups().wait, self._dispatcher)),
            self._task(self._until_lost()),
        ]
        if rules.policy.rq_stop:
            name, find = self._settings.name, self._supervisor.find
            loops.append(self._task(RqStop(self._clients[2], self._keys, name, find).run()))
        stopping = asyncio.get_running_loop().create_task(stop.wait())
        watched: list[asyncio.Future[None] | asyncio.Task[bool]] = [*loops, stopping]
        if zygote is not None:
            watched.append(zygote.died)
        self._state = "ready"
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        try:
            for task in loops:
                if task.done():
                    task.result()
        except LeaseLostError:
            self._lost.set()
            raise
        if zygote is not None and zygote.died.done() and not stop.is_set():
            self._supervisor.stop_all("lease")
            raise LeaseLostError("the zygote ended, and every sandbox with it")

    async def stop(self) -> None:
        """End every attempt, send what is to be said, leave the store, take everything down. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._state = "stopping"
        try:
            if self._registered:
                await self._leave()
        finally:
            await end_all(self._tasks)
            for close in self._closers:
                await close()
            await self._slots.close()

    async def _leave(self) -> None:
        self._dispatcher.stop_claiming()
        self._supervisor.stop_all("lease" if self._lost.is_set() else "shutdown")
        await self._supervisor.drain(_STOP_S)
        if not self._lost.is_set():
            await self._dispatcher.flush(_STOP_S)
            self._mail.emit(None, self._notary.event(EventType.NODE_DOWN, detail={"name": self._settings.name}))
            await self._box.stop()
            await self._mail.flush(1.0)
        await self._local.stop()
        if not self._lost.is_set():
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_GOODBYE_S):
                    await self._store.on(self._clients[4]).unregister()

    def _tell_denied(self, denied: Denied) -> None:
        """A job asked for a destination that it was not given. The egress process tells few of these an attempt."""
        job, attempt = ids.split_attempt(denied.attempt)
        detail: dict[str, str | int | float | bool] = {"host": denied.host, "port": denied.port, "why": denied.why}
        self._kernel.around.told(job, attempt, EventType.NET_DENIED, detail)

    def _tell_used(self, name: str, counts: dict[str, int]) -> None:
        """An attempt's door has closed: what went through it, in numbers alone."""
        job, attempt = ids.split_attempt(name)
        event = self._notary.event(EventType.NET_USED, job=job, attempt=attempt, detail={**counts})
        self._mail.emit(ids.tenant_of(job), event)

    async def _close_ledger(self) -> None:
        self._ledger.close()
        self._sequences.close()

    async def _register(self) -> None:
        settings, ground = self._settings, self._ground
        await self._store.publish_card(ground.card)
        sent_ns = self._lease.now()
        answer = await self._store.register(
            host_id=self._host,
            record=self._describe(),
            slots=settings.slots,
            lanes=self._lanes.known,
            lease_ms=int(settings.lease_s * 1000),
            margin_ms=int(settings.margin_s * 1000),
            hostname=self._hostname,
            pid=os.getpid(),
        )
        if answer.refused_by is not None:
            raise NameTakenError(
                f"a live agent on host {answer.refused_by} is named {settings.name}: stop it, or choose another --name"
            )
        self._registered = True
        self._lease.extend(sent_ns)
        await self._heartbeat.inherit(answer.older)
        detail: dict[str, str | int | float | bool] = {"level": self._report.level, "slots": settings.slots}
        self._mail.emit(None, self._notary.event(EventType.NODE_UP, detail=detail))
        for line in ground.swept:
            self._mail.emit(None, self._notary.event(EventType.NODE_SWEPT, detail={"what": line}))
        for fault in await faults(self._clients[4]):
            log.warning("the store is not fit for jobs: %s", fault)
            self._mail.emit(None, self._notary.event(EventType.NODE_DEGRADED, detail={"what": fault}))
        for line in ground.notes:
            self._mail.emit(None, self._notary.event(EventType.NODE_DEGRADED, detail={"what": line}))
        ground.swept = ground.notes = ()

    def _tools(self) -> Tools:
        ground = self._ground
        return Tools(
            rules=self._ground.rules(self._report),
            defaults=self._ground.defaults(self._report),
            notary=self._notary,
            ledger=self._ledger,
            stage=self._stage,
            desk=self._mail,
            slots=self._slots.slots,
            journal=self._ground.journal,
            era=self._lease.era,
            cutoff=self._store.cutoff_for,
            serves=self._lanes.serves,
            settle=Dependencies(self._clients[5], self._keys, ground.trust.by_id(), ground.fleet).settle,
            placing=self._placing,
            no_room=self._watch.no_room,
            kernel=self._kernel,
            witness=self._box.witness,
        )

    def _task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task

    async def _until_lost(self) -> None:
        await self._lost.wait()
        raise LeaseLostError("the store knows no lease of this agent start")

    def _wakeups(self) -> Wakeups:
        clock = asyncio.get_running_loop().time
        return Wakeups(self._store.on(self._clients[4]), self._lanes, self._dispatcher, self._fit, clock)

    def _describe(self) -> bytes:
        return described(
            self._ground,
            self._report,
            hostname=self._hostname,
            boot=self.boot,
            state=self._node_state().name,
            busy=self._dispatcher.busy,
            away=self._heartbeat.degraded,
            free=self._placing.free,
            egress=self._egress.state,
        )

    def _node_state(self) -> NodeState:
        facts = NodeFacts(
            self._state,
            self._operator.state,
            lease=not self._lease.lapsed(),
            unproved=not self._supervisor.healthy,
            record=self._box.fit,
            disk=not self._watch.full,
            store=not self._heartbeat.degraded,
            broker=not self._lanes.broker_away,
        )
        return state_of(facts)

    def _gauges(self) -> dict[str, float | dict[str, float]]:
        slots, busy, state = self._settings.slots, self._dispatcher.busy, self._node_state().name
        return {"ringfence_slots": slots, "ringfence_slots_busy": busy, "ringfence_node_state": {state: 1}}
