"""Tool calls: a node-side tool runs in a sandbox of its own, for as long as the job waits for it and not longer.

Made by the desk, with the bench of the boot. Must never run a tool in the agent, on arguments that its schema does not
allow, with a grant that this host does not enforce, or for a job that was told to end; must never let one outlive the
attempt that called it (run.helpers), nor take a tool from the queue: no job can name one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from node_agent import sandbox
from node_agent.admission import asked_of
from node_agent.containment.attempts import Attempt
from node_agent.containment.errors import ContainmentError, SpawnError
from node_agent.containment.lower.slots import LowSlot
from node_agent.containment.plan import Profile, Verdict
from node_agent.containment.slots import Slot
from node_agent.kernel import toolforms
from node_agent.kernel.bench import Bench
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from node_agent.kernel.tools import Tool, problem
from node_agent.output import Capture, Chunk
from node_agent.pipes import Pipes
from node_agent.stage import Staged, StageError
from runner.wire import codec
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.spec import JobSpec

__all__ = ["ToolDesk"]

log = logging.getLogger(__name__)

#: Most calls that wait for a slot, of the node and of one attempt, and for how long one waits, in seconds.
MOST_WAITING: Final = 64
MOST_OF_ONE: Final = 4
QUEUE_S: Final = 30.0
#: A job that stands still gets its tool once it goes on; so often is looked whether it does, in seconds.
_FROZEN_S: Final = 0.1
#: Beyond what is passed on a tool may print this much; then it is ended.
_PRINTED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CallAsk:
    """Fields of tool.call."""

    name: str
    args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListAsk:
    """tool.list has no fields."""


class _Call:
    """One tool that runs: a Helper of the attempt that called it."""

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.output = bytearray()
        self.killed = self.timed_out = False

    def begun(self, attempt: Attempt) -> None:
        """The sandbox stands; a kill that came earlier acts now."""
        self.attempt = attempt
        if self.killed:
            attempt.kill()

    def kill(self) -> None:
        """Kill every process of the tool."""
        self.killed = True
        if self.attempt is not None:
            self.attempt.kill()

    def expire(self) -> None:
        """Its time is over."""
        self.timed_out = True
        self.kill()

    async def freeze(self, frozen: bool) -> None:
        """Let no process of the tool run, or let them go on."""
        if self.attempt is not None:
            # Where it can't be done the tool runs on to its own end; its job stands still all the same.
            with suppress(ContainmentError):
                await self.attempt.freeze(frozen)


class ToolDesk:
    """The calls tool.list and tool.call of one boot."""

    def __init__(self, around: Around) -> None:
        bench = around.bench
        self._around = around
        self._bench = bench
        self._tools: Mapping[str, Tool] = {} if bench is None else bench.ground.policy.tools
        self._free: list[Slot | LowSlot] = [] if bench is None else list(bench.slots.tools.values())
        #: Who waits for a slot; while somebody does, none is free.
        self._waiting: list[asyncio.Future[Slot | LowSlot]] = []
        self._under_way: dict[str, int] = {}
        self._moulds: dict[int, int] = {}
        self._pipes = Pipes()
        self._tasks: set[asyncio.Task[Json]] = set()
        around.stopping.append(self._stop)

    def entries(self) -> tuple[Entry, ...]:
        """Return the calls of this part."""
        grant = "--tool NAME"
        return (
            Entry(
                "tool.list",
                ListAsk,
                self._list,
                "Lists the node's tools that this job was granted, with the JSON schema of their arguments.",
                '{"tools": [{"name", "about", "schema", "timeout_s"}]}',
                grant=grant,
            ),
            Entry(
                "tool.call",
                CallAsk,
                self._call,
                "Runs one of the node's tools in a sandbox of its own and returns what it printed.",
                '{"exit_code", "signal", "timed_out", "output", "base64", "truncated", "ms"}',
                grant=grant,
                changes=True,
                errors=(ErrorCode.NOT_FOUND, ErrorCode.QUOTA, ErrorCode.TIMEOUT, ErrorCode.UNAVAILABLE),
                resource=_name_of,
            ),
        )

    def of(self, caller: Caller) -> dict[str, Json]:
        """Return the tools that a job was granted and that there are here, by name, as jobs see them."""
        granted = caller.spec.grants.tools
        return {name: toolforms.shown(self._tools[name]) for name in granted if name in self._tools}

    def _list(self, caller: Caller, _ask: ListAsk) -> Json:
        return {"tools": list(self.of(caller).values())}

    async def _call(self, caller: Caller, ask: CallAsk) -> Json:
        caller.needs(ask.name in caller.spec.grants.tools, f"the tool {ask.name}")
        tool = self._tools.get(ask.name)
        if tool is None or self._bench is None:
            why = f"node {self._around.node} has no tool {ask.name}: its policy file declares tools as [[tool]]"
            raise CallError(ErrorCode.NOT_FOUND, why)
        args = toolforms.plain(ask.args)
        if (wrong := problem(tool.schema, args)) is not None:
            raise CallError(ErrorCode.BAD_REQUEST, wrong)
        spec = toolforms.spec_of(caller, tool, args)
        self._enforced(self._bench, tool, spec)
        await self._counted(caller, tool, args)
        if self._under_way.get(caller.attempt, 0) >= MOST_OF_ONE:
            raise CallError(ErrorCode.QUOTA, f"a job calls at most {MOST_OF_ONE} tools at a time")
        self._under_way[caller.attempt] = self._under_way.get(caller.attempt, 0) + 1
        try:
            return await self._queued(caller, self._bench, tool, spec)
        finally:
            self._under_way[caller.attempt] -= 1
            if not self._under_way[caller.attempt]:
                del self._under_way[caller.attempt]

    async def _counted(self, caller: Caller, tool: Tool, args: Mapping[str, Json]) -> None:
        """Tell of the call who counts calls; return once the job may go on. Raises CallError(ENDED)."""
        if self._around.spending is not None:
            await self._around.spending.spend(caller, "calls")
        for seen in self._around.repeating:
            await seen(caller.run, f"tool {tool.name}", codec.dump(dict(args)))
        while caller.run.holders and not _over(caller):
            await asyncio.sleep(_FROZEN_S)
        if _over(caller):
            raise CallError(ErrorCode.ENDED, "this attempt is over")

    def _enforced(self, bench: Bench, tool: Tool, spec: JobSpec) -> None:
        """A grant of the policy file that this host does not enforce is refused like a job's. Raises CallError."""
        report = bench.ground.report
        lacks = {} if report is None else bench.ground.rules(report).enforcement.lacks
        for what in asked_of(spec):
            if what in lacks:
                why = f"this host can't enforce {what!r} for tool {tool.name}: {lacks[what]}"
                raise CallError(ErrorCode.DENIED, f"{why}; `ringfence doctor` on the node prints the fix")

    async def _queued(self, caller: Caller, bench: Bench, tool: Tool, spec: JobSpec) -> Json:
        """Wait for a slot, then run the tool; a call that nobody waits for any more is killed, and its slot proved."""
        slot = await self._slot()
        call = _Call()
        if _over(caller):
            self._give_back(slot)
            raise CallError(ErrorCode.ENDED, "this attempt is over")
        caller.run.helpers.add(call)
        task = asyncio.get_running_loop().create_task(self._run(caller, bench, tool, spec, slot, call))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ran(caller, slot, call, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.kill()
            raise

    def _ran(self, caller: Caller, slot: Slot | LowSlot, call: _Call, task: asyncio.Task[Json]) -> None:
        """The tool is proved gone: its slot is free, and its job may end."""
        self._tasks.discard(task)
        caller.run.helpers.discard(call)
        if not call.gone.done():
            call.gone.set_result(None)
        self._give_back(slot)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, CallError):
            log.error("a tool call failed in the agent", exc_info=error, extra={"job": caller.job})

    async def _slot(self) -> Slot | LowSlot:
        if self._free:
            return self._free.pop()
        if len(self._waiting) >= MOST_WAITING:
            raise CallError(ErrorCode.QUOTA, f"{MOST_WAITING} tool calls wait on this node: call again later")
        waiter: asyncio.Future[Slot | LowSlot] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(QUEUE_S):
                return await waiter
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter.done() and not waiter.cancelled():
                # It was handed over in the same moment.
                self._give_back(waiter.result())
            if isinstance(error, TimeoutError):
                raise CallError(ErrorCode.TIMEOUT, f"no place for the tool came free in {QUEUE_S:g} s") from None
            raise
        finally:
            self._waiting.remove(waiter)

    def _give_back(self, slot: Slot | LowSlot) -> None:
        """Hand the slot to whoever waits longest: one that only lay free could be taken by who asks just then."""
        waiter = next((one for one in self._waiting if not one.done()), None)
        if waiter is None:
            self._free.append(slot)
        else:
            waiter.set_result(slot)

    async def _run(
        self, caller: Caller, bench: Bench, tool: Tool, spec: JobSpec, slot: Slot | LowSlot, call: _Call
    ) -> Json:
        began_s = time.perf_counter()
        self._around.recorder.write("tool", caller.attempt, tool=tool.name, call=spec.id)
        try:
            staged = await bench.stage.open(spec, 1, tuple(f"{net.host}:{net.port}" for net in tool.grants.net))
        except StageError as error:
            raise CallError(ErrorCode.DENIED, f"tool {tool.name}: {error}") from None
        try:
            verdict = await self._confined(bench, tool, spec, slot, call, staged)
        except ContainmentError as error:
            raise CallError(ErrorCode.FAULT, f"tool {tool.name}: no sandbox could be made: {error}") from None
        finally:
            await staged.ended()
            staged.close()
        return toolforms.told(tool, call, verdict, (time.perf_counter() - began_s) * 1000)

    async def _confined(
        self, bench: Bench, tool: Tool, spec: JobSpec, slot: Slot | LowSlot, call: _Call, staged: Staged
    ) -> Verdict:
        attempt = await self._begin(bench, slot, spec, staged)
        call.begun(attempt)

        async def keep(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                call.output += chunk.data[: max(0, tool.output_bytes + 1 - len(call.output))]

        capture = Capture(
            (attempt.stdout, attempt.stderr), keep, limit_bytes=_PRINTED_BYTES, on_limit=call.kill, watch=self._pipes
        )
        timer = asyncio.get_running_loop().call_later(tool.timeout_s, call.expire)
        try:
            await attempt.release(sandbox.payload_of(spec, 1))
            verdict = await asyncio.shield(attempt.verdict)
            if not verdict.proved:
                log.error("the kill of a tool is not proved, its job and slot wait for it", extra={"tool": tool.name})
        finally:
            timer.cancel()
            if not attempt.proved.done():
                attempt.kill()
                await asyncio.shield(attempt.proved)
            capture.drain()
            attempt.close()
        await attempt.freed()
        await capture.finish()
        return verdict

    async def _begin(self, bench: Bench, slot: Slot | LowSlot, spec: JobSpec, staged: Staged) -> Attempt:
        """Have a restricted worker stand; a mould that ended since its last attempt is replaced once."""
        if bench.ground.report is None:
            raise SpawnError("the host was not probed")
        defaults = toolforms.defaults_of(bench.ground.defaults(bench.ground.report))
        plan = sandbox.plan_of(spec, 1, staged.mounts, staged.uid, staged.gid, defaults)
        # A mould serves one tool and tenant after the other, as it does tenants and signers of jobs.
        profile: Profile = sandbox.profile_of(spec, f"tool {spec.queue} {bench.ground.policy.version}")
        for left in (1, 0):
            try:
                await slot.prepare(profile)
                self._record_mould(bench, slot)
                attempt = await slot.begin(plan, staged.plan_fds)
            except SpawnError:
                if not left:
                    raise
            else:
                staged.sent()
                await staged.connected(attempt)
                return attempt
        raise SpawnError("unreachable")

    def _record_mould(self, bench: Bench, slot: Slot | LowSlot) -> None:
        """Note a mould before it gets its first tool: the next start of this node waits until it is gone."""
        pid, known = slot.mould_pid, self._moulds.get(slot.index)
        if pid is not None and pid != known:
            bench.ground.journal.add(pid, spare=isinstance(slot, LowSlot))
            self._moulds[slot.index] = pid
            if known is not None:
                bench.ground.journal.remove(known)

    async def _stop(self) -> None:
        """End every call; the slots prove it. Idempotent."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._pipes.close()


def _name_of(ask: CallAsk) -> str:
    return ask.name


def _over(caller: Caller) -> bool:
    return caller.run.stopping or caller.run.proved.done()
