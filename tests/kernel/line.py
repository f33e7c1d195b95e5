"""A channel without a worker: the job's end of descriptor 100 in this process, the agent's side on a running loop.

Called by the tests of channel, session and guest. `talk` runs what a job would do in a thread of its own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.channel import Channel, Exchange
from node_agent.kernel.desk import Desk
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry, table_of
from node_agent.pipes import Pipes
from runner.guest import calls
from runner.wire import frames
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.event import EventType
from runner.wire.frames import Op
from tests.kernel import rig

__all__ = ["Echo", "Line", "Nothing", "entries", "in_line"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Nothing:
    """No fields."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A text, and how often it comes back."""

    text: str
    times: int = 1


class FakeAttempt:
    """The part of an attempt that a channel needs; ready, and running."""

    def __init__(self) -> None:
        near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setblocking(False)
        self.channel = near
        self.on_open: Callable[[], object] | None = None
        self.itself = False
        self.heard = True
        self.far.send(frames.pack(Op.RUNNING))

    def hear(self) -> bool:
        """It is ready."""
        return self.heard

    def listens_itself(self) -> bool:
        """As the test says."""
        return self.itself

    @property
    def listening(self) -> bool:
        """Whether an OPEN would reach anybody."""
        return self.on_open is not None

    def open(self) -> None:
        """What an attempt that reads its channel itself does for each OPEN."""
        assert self.on_open is not None
        self.on_open()

    def close(self) -> None:
        """Close both ends."""
        self.channel.close()
        self.far.close()


@dataclass(slots=True)
class Line:
    """One attempt and its channel; ``told``: (type, detail) of its events."""

    around: Around
    exchange: Exchange
    attempt: FakeAttempt
    caller: Caller
    channel: Channel
    told: list[tuple[EventType, dict[str, str | int | float | bool]]] = field(default_factory=list)
    waits: dict[str, asyncio.Event] = field(default_factory=dict)

    @property
    def recorder(self) -> rig.FakeRecorder:
        """The fake recorder."""
        recorder = self.around.recorder
        assert isinstance(recorder, rig.FakeRecorder)
        return recorder

    @property
    def policy(self) -> rig.FakePolicy:
        """The fake policy."""
        policy = self.around.decider
        assert isinstance(policy, rig.FakePolicy)
        return policy


def entries(line_of: Callable[[], Line]) -> tuple[Entry, ...]:
    """Return calls of the tests' own: what the session does with them is what is tested."""

    async def wait(caller: Caller, ask: Echo) -> Json:
        event = line_of().waits.setdefault(ask.text, asyncio.Event())
        await event.wait()
        return ask.text

    def refuse(caller: Caller, ask: Echo) -> Json:
        raise CallError(ErrorCode.NOT_FOUND, ask.text)

    def fail(caller: Caller, ask: Nothing) -> Json:
        raise ZeroDivisionError("a part's own fault")

    def odd(caller: Caller, ask: Nothing) -> Json:
        return object()  # type: ignore[return-value] # a part's own fault

    def push(caller: Caller, ask: Echo) -> Json:
        return caller.push({"signal": {"name": ask.text}})

    return (
        Entry("test.nothing", Nothing, lambda _caller, _ask: None, "Does nothing.", "null"),
        Entry("test.echo", Echo, lambda _caller, ask: ask.text * ask.times, "Says it.", "text"),
        Entry("test.act", Echo, lambda _caller, ask: ask.text, "Acts.", "text", changes=True),
        Entry("test.tidy", Nothing, lambda _caller, _ask: True, "Tidies.", "true", late=True),
        Entry("test.wait", Echo, wait, "Waits.", "text", resource=lambda ask: str(ask.text)),
        Entry("test.refuse", Echo, refuse, "Refuses.", "nothing"),
        Entry("test.fail", Nothing, fail, "Fails.", "nothing"),
        Entry("test.odd", Nothing, odd, "Answers nonsense.", "nothing"),
        Entry("test.push", Echo, push, "Pushes.", "true"),
        Entry("test.who", Nothing, lambda caller, _ask: [caller.job, caller.number], "Who am I?", "[job, session]"),
    )


def in_line(
    scenario: Callable[[Line], Awaitable[T]], *, listen: bool = True, clock: Callable[[], float] | None = None
) -> T:
    """Run ``scenario`` with a channel that is listened to; everything is closed afterwards."""

    async def main() -> T:
        found: list[Line] = []
        told: list[tuple[EventType, dict[str, str | int | float | bool]]] = []
        # A client that never connects: no part's own call is made here.
        around = rig.around(Redis(), told=lambda _job, _attempt, kind, detail: told.append((kind, detail)))
        desk = Desk(around)
        desk.table = table_of(entries(lambda: found[0]))
        pipes, attempt, caller = Pipes(), FakeAttempt(), rig.caller()
        exchange = Exchange(desk, pipes) if clock is None else Exchange(desk, pipes, clock)
        line = Line(around, exchange, attempt, caller, exchange.channel(caller.run, caller.spec, attempt), told)
        found.append(line)
        if listen:
            line.channel.listen()
        try:
            return await asyncio.wait_for(scenario(line), 20)
        finally:
            line.channel.close()
            attempt.close()
            pipes.close()

    return asyncio.run(main())


async def talk(work: Callable[[], T]) -> T:
    """Do in a thread what a process of the job does, while the agent's loop runs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast("T", value))

    def run() -> None:
        try:
            try:
                value = work()
            finally:
                # A refusal that the work has kept holds the thread's session in a cycle.
                if isinstance(held := getattr(calls._own, "session", None), calls.Session):
                    held.close()
        except BaseException as error:  # noqa: BLE001 - carried to the test
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, value, None)

    threading.Thread(target=run, daemon=True).start()
    return await done
