"""The egress process's side of its control socket: agents come, open doors, close them, and go.

Started by __main__ once the process is confined. Must never serve a peer of another user, keep a door whose agent is
gone, or let one job's connections keep another's out (attack 42).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from broker.egress.access import Access
from broker.egress.confine import State
from broker.egress.dial import Dial
from broker.egress.door import Caps, Door
from broker.egress.errors import EgressError
from broker.egress.orders import MAX_RECORD_BYTES, load_authority, load_rules
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import WireError

__all__ = ["Service"]

log = logging.getLogger(__name__)

_MAX_DOORS: Final = 4096
_DOOR_FDS: Final = 2
_MAX_FDS: Final = 3
#: Answers that wait for an agent that does not read just now.
_MOST_UNSENT: Final = 4096


class Service:
    """All agents of the host.

    ``most``: most connections of all doors together. ``trust``: what the hosts of proxied secrets are verified with.
    """

    def __init__(
        self,
        listener: socket.socket,
        dial: Dial,
        state: State,
        *,
        caps: Caps,
        most: int,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self.dial = dial
        self.state = state
        self.caps = caps
        self.trust = trust
        self._most = most
        self._agents: set[_Agent] = set()

    def start(self) -> None:
        """Accept agents from now on."""
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Close every door, and leave every agent. Idempotent."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for agent in tuple(self._agents):
            agent.leave()

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in self.state.agents:
            log.warning("a stranger was turned away", extra={"uid": uid})
            end.close()
            return
        self._agents.add(_Agent(self, end, uid))

    def held(self) -> dict[str, Json]:
        """Return how many doors and connections are open now."""
        doors = [door for agent in self._agents for door in agent.doors.values()]
        return {"doors": len(doors), "connections": sum(door.connections for door in doors)}

    def forget(self, agent: _Agent) -> None:
        """An agent is gone."""
        self._agents.discard(agent)

    def make_room(self) -> None:
        """End a connection of the job that has most, if there is no room for one more."""
        doors = [door for agent in self._agents for door in agent.doors.values()]
        if sum(door.connections for door in doors) >= self._most:
            max(doors, key=lambda door: door.connections).shed()


class _Agent:
    """One agent's connection and its doors."""

    def __init__(self, service: Service, end: socket.socket, uid: int) -> None:
        self.doors: dict[str, Door] = {}
        #: Closed because their moulds have ended; the agent has not asked yet what was used.
        self._ended: dict[str, Door] = {}
        self._service = service
        self._end = end
        self._uid = uid
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: deque[bytes] = deque()
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    def leave(self) -> None:
        """Close all doors and the connection. Idempotent."""
        if self._end.fileno() < 0:
            return
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
        for door in tuple(self.doors.values()):
            door.close()
        self._service.forget(self)

    def _read(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(self._end, MAX_RECORD_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds, flags = b"", [], 0
        if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            _close(fds)
            self.leave()
            return
        try:
            self._take(_record(data), fds)
        except (WireError, EgressError, KeyError, TypeError, OSError) as error:
            log.warning("an agent's record was not understood", extra={"error": type(error).__name__})
            self.leave()
        finally:
            _close(fds)

    def _take(self, record: dict[str, Json], fds: list[int]) -> None:
        match record["op"]:
            case "hello":
                self._answer({"op": "hello", **self._service_state()})
            case "check":
                self._answer({"id": record["id"], "refused": self._refused(record)})
            case "open":
                refused = self._open(str(record["attempt"]), record, fds)
                if refused:
                    log.warning("a door was not opened: %s", refused)
                self._answer({"id": record["id"], "refused": refused})
            case "close":
                attempt = str(record["attempt"])
                door = self.doors.get(attempt) or self._ended.get(attempt)
                task = self._loop.create_task(self._close(record["id"], attempt, door))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case _:
                raise KeyError("op")

    def _open(self, attempt: str, record: dict[str, Json], fds: list[int]) -> str:
        """Open a door; return why it can't be, "" if it is. One door too many must not cost the agent's others."""
        rules = load_rules(record)
        if len(fds) != (_MAX_FDS if rules.keyed else _DOOR_FDS):
            raise KeyError("descriptors")
        _check_listener(fds[0])
        trust = self._service.trust
        authority = load_authority(record) if rules.keyed else None
        if rules.keyed and trust is None:
            return "this egress process can't verify hosts"
        if attempt in self.doors:
            return "it has one already"
        if len(self.doors) + len(self._ended) >= _MAX_DOORS:
            return f"{_MAX_DOORS} are open"
        listener, pidfd = socket.socket(fileno=fds[0]), fds[1]
        line = socket.socket(fileno=fds[2]) if rules.keyed else None
        fds.clear()
        access = Access(line, authority) if line and authority else None
        self.doors[attempt] = Door(
            (listener, pidfd),
            rules,
            self._service.dial,
            self._service.caps,
            self._service.make_room,
            lambda host, port, why: self._denied(attempt, host, port, why),
            lambda model, counts: self._metered(attempt, model, counts),
            lambda: self._forget(attempt),
            trust,
            access,
        )
        return ""

    def _refused(self, record: dict[str, Json]) -> str:
        """Return why a grant can never be reached, as far as this host knows; "" if it may be."""
        rules = load_rules(record)
        for each in sorted(rules.granted | rules.keyed, key=str):
            why = self._service.dial.known_refusal(each, rules)
            if why:
                return f"{each}: {why}"
        return ""

    async def _close(self, number: Json, attempt: str, door: Door | None) -> None:
        usage = asdict(await door.gone()) if door is not None else {}
        self._ended.pop(attempt, None)
        self._answer({"id": number, "usage": usage})

    def _forget(self, attempt: str) -> None:
        door = self.doors.pop(attempt, None)
        if door is not None and self._end.fileno() >= 0:
            self._ended[attempt] = door

    def _denied(self, attempt: str, host: str, port: int, why: str) -> None:
        record: dict[str, Json] = {"op": "denied", "attempt": attempt, "host": host, "port": port, "why": why}
        self._answer(record)

    def _metered(self, attempt: str, model: str, counts: dict[str, int]) -> bool:
        """Report what an attempt used; False: the agent's line is full, and is tried again.

        The last words of a door that is closed wait like answers.
        """
        record: dict[str, Json] = {"op": "metered", "attempt": attempt, "model": model, **counts}
        if attempt not in self.doors:
            self._answer(record)
            return True
        return not self._unsent and self._sent(codec.dump(record))

    def _service_state(self) -> dict[str, Json]:
        state = self._service.state
        held = self._service.held()
        return {**held, "pid": os.getpid(), "uid": state.uid, "landlock": state.landlock, "weak": state.weak(self._uid)}

    def _answer(self, record: dict[str, Json]) -> None:
        """Answer the agent, when it reads again if its line is full: what jobs cause must not cost others their doors.

        One that can't be answered would wait for ever: it is left, and asks anew.
        """
        data = codec.dump(record)
        if self._end.fileno() < 0 or (not self._unsent and self._sent(data)):
            return
        self._unsent.append(data)
        if len(self._unsent) > _MOST_UNSENT:
            self.leave()
        elif len(self._unsent) == 1:
            self._loop.add_writer(self._end, self._send_rest)

    def _send_rest(self) -> None:
        while self._unsent and self._sent(self._unsent[0]):
            self._unsent.popleft()
        if not self._unsent and self._end.fileno() >= 0:
            self._loop.remove_writer(self._end)

    def _sent(self, data: bytes) -> bool:
        """Send one record; False: the line is full. Whoever is gone hears nothing."""
        try:
            self._end.send(data)
        except BlockingIOError:
            return False
        except OSError:
            self.leave()
        return True


def _record(data: bytes) -> dict[str, Json]:
    record = codec.load(data)
    if not isinstance(record, dict):
        raise TypeError("no record")
    return record


def _check_listener(fd: int) -> None:
    """Make sure that a descriptor listens for TCP; it stays the caller's."""
    end = socket.socket(fileno=fd)
    try:
        if end.family != socket.AF_INET or not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise TypeError("no listener")
    finally:
        end.detach()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
