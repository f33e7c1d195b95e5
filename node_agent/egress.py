"""Port: broker.egress. The agent's side of the egress process: asks it to check grants, opens and closes doors.

Called by the stage. Must never let a job with net grants start without an answer of the egress process, nor keep a
door after the attempt's proof. An egress process that restarts gets the live attempts' doors again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from broker.egress.orders import MAX_RECORD_BYTES, dump_authority, dump_rules
from broker.egress.rules import Route, Rules
from node_agent.cancelling import end_all
from node_agent.doornews import Denied, Metered, denied_of, metered_of
from node_agent.errors import EgressAwayError, EgressMissingError, EgressRefusedError, NodeError
from node_agent.keyline import KeyLine
from node_agent.reach import rules_of
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import WireError
from runner.wire.grants import NetGrant

__all__ = ["SOCKET_NAME", "Denied", "Door", "Egress", "Metered", "rules_of"]

log = logging.getLogger(__name__)

#: In HOME/s; no node can be named so.
SOCKET_NAME: Final = "egress.sock"
#: Longest wait for an egress process that is restarted just now.
WAIT_S: Final = 2.0
_PAUSE_S: Final = 0.05
_STEP: Final = "start it: `ringfence egress` on this node, with the agent's --home"


@dataclass(slots=True, eq=False)
class Door:
    """What this agent holds of an open door: its own copies of the listener and of the mould's pidfd."""

    attempt: str
    rules: Rules
    ends: tuple[int, int] | None
    _egress: Egress
    keys: KeyLine | None = None

    def close(self) -> None:
        """Close the door at once. Idempotent."""
        if self.ends is not None:
            for fd in self.ends:
                os.close(fd)
            self.ends = None
            if self.keys is not None:
                self.keys.close()
            self._egress.closed(self)


class Egress:
    """One agent's line to its host's egress process. Connects when it is first needed."""

    def __init__(
        self,
        path: Path,
        never: Sequence[tuple[str, int]],
        on_denied: Callable[[Denied], None],
        on_used: Callable[[str, dict[str, int]], None] = lambda _attempt, _counts: None,
        on_metered: Callable[[Metered], None] = lambda _: None,
    ) -> None:
        """``never``: hosts and ports that no policy opens, the store's above all.

        ``on_used``: told what an attempt did through its door, once that is closed. ``on_metered``: told while it does.
        """
        self._path = path
        self._never = tuple(never)
        self._on_denied, self._on_used, self.on_metered = on_denied, on_used, on_metered
        self._link: _Link | None = None
        self._lock = asyncio.Lock()
        self._doors: dict[str, Door] = {}
        self._greeting: asyncio.Task[None] | None = None
        self._restoring: asyncio.Task[None] | None = None
        self._stopped = False
        self._closing: dict[asyncio.Future[dict[str, Json]], str] = {}
        #: What `nodes` shows of it: none, ok, weak or away.
        self.state = "none"

    def start(self) -> None:
        """Begin to look whether an egress process serves this home, for ``state``; nobody waits for it."""
        self._greeting = asyncio.get_running_loop().create_task(self._greet())

    async def check(
        self,
        net: Sequence[NetGrant],
        named: Iterable[str],
        keyed: Sequence[NetGrant] = (),
        routes: Sequence[Route] = (),
    ) -> Rules:
        """Return the rules of an attempt, once the egress process has found nothing against them.

        ``named``, ``keyed``, ``routes``: as for ``rules_of``.

        Raises:
            EgressMissingError: none serves this home. EgressAwayError: it does not answer now. EgressRefusedError.
        """
        rules = rules_of(net, named, self._never, keyed, routes)
        answer = await self._asked(lambda link: link.ask({"op": "check", **dump_rules(rules)}))
        refused = answer.get("refused")
        if refused:
            raise EgressRefusedError(f"the net grant {refused}")
        return rules

    async def open(self, attempt: str, rules: Rules, listener: int, pidfd: int, keys: KeyLine | None = None) -> Door:
        """Open an attempt's door; ``listener`` and ``pidfd`` are the door's from here on.

        ``keys``: the line for its proxied secrets; it begins with each opening of the door.

        Raises:
            EgressAwayError: the egress process does not answer now. EgressMissingError, EgressRefusedError.
            SecretsError: the broker does not take the line.
        """
        door = Door(attempt, rules, (listener, pidfd), self, keys)
        if self._doors.setdefault(attempt, door) is not door:
            door.close()
            raise EgressRefusedError("this attempt has a door already")
        try:
            await self._open(door)
        except BaseException:
            door.close()
            raise
        return door

    def closed(self, door: Door) -> None:
        """A door was closed here: have it closed there. An egress process that is away has closed it already."""
        if self._doors.get(door.attempt) is not door:
            return
        del self._doors[door.attempt]
        answer = None
        if self._link is not None:
            with suppress(EgressAwayError):
                answer = self._link.drop(door)
        if answer is not None:
            self._closing[answer] = door.attempt
            answer.add_done_callback(partial(self._used, door.attempt))

    async def settled(self) -> None:
        """Wait until the egress process has given back every door that was closed."""
        while self._closing:
            await asyncio.wait(self._closing)

    async def stop(self) -> None:
        """Close every door and the line; whoever still asks gets EgressAwayError. Idempotent."""
        self._stopped = True
        await end_all(task for task in (self._greeting, self._restoring) if task is not None)
        for door in tuple(self._doors.values()):
            door.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _greet(self) -> None:
        with suppress(EgressAwayError, EgressMissingError, TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._linked()

    def _used(self, attempt: str, answer: asyncio.Future[dict[str, Json]]) -> None:
        self._closing.pop(answer, None)
        usage = None if answer.cancelled() or answer.exception() is not None else answer.result().get("usage")
        counts = {name: count for name, count in usage.items() if type(count) is int} if isinstance(usage, dict) else {}
        if any(counts.values()):
            self._on_used(attempt, counts)

    async def _open(self, door: Door) -> None:
        answer = await self._asked(lambda link: link.open(door))
        refused = answer.get("refused")
        if refused:
            raise EgressRefusedError(f"the egress process opens no door for this attempt: {refused}")
        if door.keys is not None:
            await door.keys.attach()

    async def _asked(self, ask: Callable[[_Link], asyncio.Future[dict[str, Json]]]) -> dict[str, Json]:
        """Return the answer to what ``ask`` asks on a line, and on the next one if that breaks."""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        # Who gives up must not take the answer from others that wait for the same door.
                        return await asyncio.shield(ask(await self._linked()))
                    except EgressAwayError:
                        if self._stopped:
                            raise
                        # It ended just now: whatever it had taken went with it, so asking again is safe.
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise EgressAwayError(f"the egress process does not answer within {WAIT_S:g} s; {_STEP}") from None

    async def _linked(self) -> _Link:
        """Return the line, made anew if it broke."""
        async with self._lock:
            while self._link is None:
                if self._stopped:
                    raise EgressAwayError("this agent is stopping; submit the job again")
                try:
                    link = _Link(self._path, self._take, self._lost)
                except FileNotFoundError:
                    raise EgressMissingError(
                        f"no egress process serves this node, and without one no job gets HOST:PORT; {_STEP}"
                    ) from None
                except OSError as error:
                    log.debug("the egress process can't be reached", extra={"error": str(error)})
                    await asyncio.sleep(_PAUSE_S)
                    continue
                try:
                    told = await link.hello
                except EgressAwayError:
                    await asyncio.sleep(_PAUSE_S)
                except BaseException:
                    link.close()
                    raise
                else:
                    self._adopt(link, told)
            return self._link

    def _adopt(self, link: _Link, told: dict[str, Json]) -> None:
        if self._stopped:
            link.close()
        elif not link.closed:
            self._link = link
            self.state = "weak" if told.get("weak") else "ok"

    def _take(self, record: dict[str, Json]) -> None:
        if (denied := denied_of(record)) is not None and denied.attempt in self._doors:
            self._on_denied(denied)
        metered = metered_of(record)
        if metered is not None and (metered.attempt in self._doors or metered.attempt in self._closing.values()):
            self.on_metered(metered)

    def _lost(self, link: _Link) -> None:
        if self._link is link:
            self._link = None
            self.state = "away"
            if self._doors and not self._stopped and (self._restoring is None or self._restoring.done()):
                log.warning("the egress process is away; its jobs' connections are gone")
                self._restoring = asyncio.get_running_loop().create_task(self._restore())

    async def _restore(self) -> None:
        """Give a restarted egress process the doors of the attempts that still run, until one process has them all.

        A door is looked up anew each time and asked for once a line: a second crash, or an attempt that opens its door
        meanwhile, must not open one twice.
        """
        while (door := self._unserved()) is not None:
            try:
                await self._open(door)
            except NodeError as error:
                log.debug("a door is not open again", extra={"attempt": door.attempt, "error": str(error)})
                await asyncio.sleep(_PAUSE_S)

    def _unserved(self) -> Door | None:
        """Return a door that the present line's other end has not answered for."""
        link = self._link
        return next((door for door in self._doors.values() if link is None or not link.answered(door)), None)


class _Link:
    """One connection. Everything that waits on it fails when it breaks."""

    def __init__(
        self, path: Path, on_record: Callable[[dict[str, Json]], None], on_lost: Callable[[_Link], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_record = on_record
        self._on_lost = on_lost
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Json]]] = {}
        #: The doors that this line was asked for, and their answers. They end with it.
        self._doors: dict[Door, asyncio.Future[dict[str, Json]]] = {}
        self.hello: asyncio.Future[dict[str, Json]] = self._loop.create_future()
        self._end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._end.setblocking(False)
            self._end.connect(str(path))
            _check_server(self._end)
            self._end.send(codec.dump({"op": "hello"}))
        except BaseException:
            self._end.close()
            raise
        self._loop.add_reader(self._end, self._read)

    @property
    def closed(self) -> bool:
        """Whether it is broken off."""
        return self._end.fileno() < 0

    def open(self, door: Door) -> asyncio.Future[dict[str, Json]]:
        """Ask for a door, the first time; the future is the answer to that. A closed door is not asked for."""
        answer = self._doors.get(door)
        if answer is None and door.ends is not None:
            record: dict[str, Json] = {"op": "open", "attempt": door.attempt, **dump_rules(door.rules)}
            answer = self._doors[door] = self._opened(door, record, door.ends)
        if answer is None:
            answer = self._loop.create_future()
            answer.set_result({})
        return answer

    def _opened(self, door: Door, record: dict[str, Json], ends: tuple[int, int]) -> asyncio.Future[dict[str, Json]]:
        if door.keys is None:
            return self.ask(record, ends)
        line = door.keys.fresh()
        try:
            return self.ask({**record, **dump_authority(door.keys.authority)}, (*ends, line))
        finally:
            os.close(line)

    def answered(self, door: Door) -> bool:
        """Return whether the other end has said what became of a door."""
        answer = self._doors.get(door)
        return answer is not None and answer.done()

    def drop(self, door: Door) -> asyncio.Future[dict[str, Json]] | None:
        """Have a door closed; None if this line was never asked for it."""
        if self._doors.pop(door, None) is None:
            return None
        return self.ask({"op": "close", "attempt": door.attempt})

    def ask(self, record: dict[str, Json], fds: Sequence[int] = ()) -> asyncio.Future[dict[str, Json]]:
        """Send a request; the future is its answer, or EgressAwayError."""
        self._next += 1
        number = self._next
        answer: asyncio.Future[dict[str, Json]] = self._loop.create_future()
        try:
            socket.send_fds(self._end, [codec.dump({**record, "id": number})], list(fds))
        except OSError as error:
            self.close()
            raise EgressAwayError(f"the egress process can't be asked ({error.strerror}); {_STEP}") from error
        self._waiting[number] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(number, None))
        return answer

    def close(self) -> None:
        """Break it off. Idempotent."""
        if self.closed:
            return
        self._loop.remove_reader(self._end)
        self._end.close()
        for answer in (self.hello, *self._waiting.values()):
            if not answer.done():
                answer.set_exception(EgressAwayError(f"the egress process ended; {_STEP}"))
                answer.exception()  # the waiter may be gone already
        self._on_lost(self)

    def _read(self) -> None:
        try:
            data = self._end.recv(MAX_RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            record = codec.load(data) if data else None
        except WireError:
            record = None
        if not isinstance(record, dict):
            self.close()
            return
        number = record.get("id")
        answer = self._waiting.get(number) if isinstance(number, int) else None
        if record.get("op") == "hello" and not self.hello.done():
            self.hello.set_result(record)
        elif answer is not None and not answer.done():
            answer.set_result(record)
        elif number is None:
            self._on_record(record)


def _check_server(end: socket.socket) -> None:
    """Make sure that nobody else serves the socket. Raises OSError."""
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "another user serves this socket")
