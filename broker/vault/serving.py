"""The services of live leases: a listener on each job's own loopback, for tools that lost the job's channel.

Called by the desk through its loop. Must never hand out a value, answer anything before the preface that no client of
another protocol can send (attack 52), or serve a listener longer than its lease.

The listener is the identity: it was made in the job's own net namespace, so nobody else can reach it.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from broker.vault.errors import VaultUsageError
from broker.vault.leases import MAX_BAD, Lease
from runner.wire import codec, service
from runner.wire.codec import Json
from runner.wire.errors import CodecError, WireError

__all__ = ["MAX_LINES", "Services"]

#: Connections that one job may hold open.
MAX_LINES: Final = 8
_READ_BYTES: Final = 8192


@dataclass(slots=True, eq=False)
class _Door:
    lease: Lease
    listener: socket.socket
    lines: dict[socket.socket, _Line] = field(default_factory=dict)
    bad: int = 0


@dataclass(slots=True, eq=False)
class _Line:
    data: bytearray = field(default_factory=bytearray)
    #: Whether the preface has come.
    known: bool = False


class Services:
    """The listeners of one broker."""

    def __init__(self, note: Callable[..., None], clock: Callable[[], float]) -> None:
        """``note``: writes to the record, without raising."""
        self._note, self._clock = note, clock
        self._selector = selectors.EpollSelector()
        self._doors: dict[str, _Door] = {}

    def fileno(self) -> int:
        """Return what is readable when there is something to serve."""
        return self._selector.fileno()

    def serve(self) -> None:
        """Serve what is ready, without waiting."""
        for key, _ in self._selector.select(0):
            # One of the same round may have closed it.
            if isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:
                key.data()

    def open(self, lease: Lease, fd: int) -> None:
        """Serve a lease on a listener, of which this makes its own copy. Raises VaultUsageError: it is none."""
        listener = socket.socket(fileno=os.dup(fd))
        listening = listener.type == socket.SOCK_STREAM and listener.family == socket.AF_INET
        if not listening or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            listener.close()
            raise VaultUsageError("a service is a listening TCP socket")
        if lease.attempt in self._doors:
            # Said twice by an agent that lost its first answer.
            listener.close()
            return
        listener.setblocking(False)
        door = self._doors[lease.attempt] = _Door(lease, listener)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(door))

    def end(self, attempt: str) -> None:
        """Close a lease's service for every holder of a copy of its listener. Idempotent."""
        door = self._doors.pop(attempt, None)
        if door is not None:
            with suppress(OSError):
                door.listener.shutdown(socket.SHUT_RDWR)
            self._let_go(door)

    def close(self) -> None:
        """Let go of all services, for the next start to serve. Idempotent."""
        for door in self._doors.values():
            self._let_go(door)
        self._doors.clear()
        self._selector.close()

    def _let_go(self, door: _Door) -> None:
        for end in (door.listener, *door.lines):
            with suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()
        door.lines.clear()

    def _accept(self, door: _Door) -> None:
        try:
            line, _ = door.listener.accept()
        except OSError:
            return
        if len(door.lines) >= MAX_LINES:
            line.close()
            return
        line.setblocking(False)
        door.lines[line] = _Line()
        self._selector.register(line, selectors.EVENT_READ, lambda: self._read(door, line))

    def _read(self, door: _Door, line: socket.socket) -> None:
        state = door.lines[line]
        try:
            data = line.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        state.data += data
        try:
            while data and (body := service.take(state.data)) is not None:
                self._hear(door, line, state, body)
        except WireError as error:
            self._wrong(door, type(error).__name__)
            data = b""
        except OSError:
            # It does not read, or is gone: sending never waits.
            data = b""
        if not data and line in door.lines:
            del door.lines[line]
            self._selector.unregister(line)
            line.close()

    def _hear(self, door: _Door, line: socket.socket, state: _Line, body: bytes) -> None:
        if state.known:
            line.send(service.pack(self._answer(door, codec.load(body))), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return
        if body != service.PREFACE:
            raise CodecError("another preface")
        state.known = True

    def _answer(self, door: _Door, order: Json) -> dict[str, object]:
        now_s = self._clock()
        if not door.lease.admit(now_s):
            return {"ok": False, "err": "slow-down"}
        match order.get("op") if isinstance(order, dict) else None:
            case "ping":
                return {"ok": True}
            case "list":
                return {"ok": True, "names": sorted(door.lease.grants)}
            case "status":
                states = [{"name": name, "state": state} for name, state in sorted(door.lease.states(now_s).items())]
                return {"ok": True, "secrets": states}
        self._wrong(door, "denied")
        return {"ok": False, "err": "denied"}

    def _wrong(self, door: _Door, what: str) -> None:
        """Count a wrong request; after too many of them the job has no service any more, but keeps its lease."""
        door.bad += 1
        if door.bad <= MAX_BAD:
            self._note("service.refused", attempt=door.lease.attempt, code=what)
        elif door.bad == MAX_BAD + 1:
            self._note("service.ended", attempt=door.lease.attempt, why="too many wrong requests")
            self.end(door.lease.attempt)
