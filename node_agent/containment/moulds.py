"""The agent's handle on one mould: its lifeline, its control socket and the pidfd that proves its end.

Called by the spawner (makes it) and the slot (uses it). Must never signal by pid, and never say that a mould is gone
before its pidfd is readable: that is the kernel's word that its pid namespace is empty.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from node_agent.containment.errors import SpawnError, unsent
from node_agent.containment.known import Taught
from node_agent.containment.orders import BEGIN, CONT, END_MARK, LETTERS, STOP, End, end_of, order_record
from node_agent.containment.plan import DoorName, Profile
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import WireError

__all__ = ["Mould", "pair"]

_MAX_RECORD_BYTES: Final = 8192
_DOOR_TIMEOUT_S: Final = 5.0


class Mould:
    """One mould, from its fork to the readable pidfd. ``profile`` is None until its first attempt."""

    def __init__(
        self, pid: int, pidfd: int, lifeline: socket.socket, control: socket.socket, paths: frozenset[str]
    ) -> None:
        """``paths``: the node's own paths that its views can show."""
        loop = asyncio.get_running_loop()
        self.pid = pid
        #: What a receipt says of how it is killed.
        self.method = "pidfd"
        self.paths = paths
        self.born_s = loop.time()
        self.served = 0
        self.spoiled = False
        self.taught = Taught()
        self.profile: Profile | None = None
        self.up: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.on_end: Callable[[End], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        self._held: asyncio.Future[tuple[int, int]] | None = None
        #: The listeners that the mould owes, in their order.
        self._doors: dict[DoorName, asyncio.Future[int]] = {}
        self._loop = loop
        self._pidfd: int | None = pidfd
        self._lifeline = lifeline
        self._control = control
        for end in (lifeline, control):
            end.setblocking(False)
        loop.add_reader(control, self._read)
        loop.add_reader(pidfd, self._ended)

    def renew(self, deadline_ns: int) -> None:
        """Write a deadline. Never blocks: unread records can only make the mould's deadline older, the safe side."""
        with suppress(OSError):
            self._lifeline.send(struct.pack("q", deadline_ns))

    def begin(self, attempt: str, channel_fd: int) -> None:
        """Have a worker forked that holds ``channel_fd``. Raises SpawnError."""
        self.served += 1
        doors = () if self.profile is None else self.profile.doors
        if doors:
            self._doors = {name: self._loop.create_future() for name in doors}
        order = order_record(BEGIN, attempt, doors, self.taught.lesson())
        try:
            socket.send_fds(self._control, [order], [channel_fd])
        except OSError as error:
            raise unsent("the mould does not answer", error) from error

    async def door(self, name: DoorName) -> tuple[int, int]:
        """Return a listener of the attempt in the job's net namespace, and a pidfd of this mould; both the caller's.

        Raises SpawnError.
        """
        door = self._doors.get(name)
        if door is None:
            raise SpawnError("the mould was not asked for a listener")
        told: set[asyncio.Future[int] | asyncio.Future[None]] = {door, self.gone}
        await asyncio.wait(told, timeout=_DOOR_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not door.done() or door.cancelled() or self._doors.get(name) is not door or self._pidfd is None:
            raise SpawnError("the mould made no listener")
        del self._doors[name]
        return door.result(), os.dup(self._pidfd)

    def pin(self) -> int:
        """Return a copy of this mould's pidfd. Raises SpawnError."""
        if self._pidfd is None:
            raise SpawnError("the mould is gone")
        return os.dup(self._pidfd)

    def tell(self, attempt: str, number: int) -> None:
        """Have a signal (one of LETTERS) sent to the worker, if this attempt still runs."""
        with suppress(OSError):
            self._control.send(order_record(LETTERS[number], attempt))

    def hold(self, attempt: str, *, still: bool) -> asyncio.Future[tuple[int, int]]:
        """Have everything in the namespace stopped, or let go on; resolves to (standing still, not yet)."""
        if self._held is None or self._held.done():
            self._held = self._loop.create_future()
            if self.gone.done():
                self._held.set_result((0, 0))
        with suppress(OSError):
            self._control.send(order_record(STOP if still else CONT, attempt))
        return self._held

    def kill(self) -> None:
        """SIGKILL; the kernel takes everything in its namespace with it."""
        self.spoiled = True
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Give the descriptors back; closing the lifeline ends a mould that still lives. Idempotent."""
        self.spoiled = True
        for end in (self._control, self._lifeline):
            if end.fileno() >= 0:
                self._loop.remove_reader(end)
                end.close()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        doors, self._doors = tuple(self._doors.values()), {}
        for door in doors:
            if door.done() and not door.cancelled():
                os.close(door.result())
        for future in (self.up, self.gone, self._held, *doors):
            if future is not None and not future.done():
                future.cancel()

    def _read(self) -> bool:
        """Take one record; return whether there was one. The loop calls again while there are more."""
        try:
            data = self._receive()
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._control)
            return False
        try:
            if data[:1] == END_MARK:
                self._take_end(end_of(data))
            else:
                self._take(codec.load(data))
        except (WireError, KeyError, TypeError, ValueError):
            self.kill()
        return True

    def _receive(self) -> bytes:
        """Return a record. One descriptor is taken from a mould that owes a listener; any other is never received."""
        owed = next((door for door in self._doors.values() if not door.done()), None)
        if owed is None:
            return self._control.recv(_MAX_RECORD_BYTES)
        data, fds, _, _ = socket.recv_fds(self._control, _MAX_RECORD_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if fds:
            owed.set_result(fds[0])
        return data

    def _take_end(self, end: End) -> None:
        if self.on_end is not None:
            self.on_end(end)

    def _take(self, record: Json) -> None:
        if not isinstance(record, dict):
            raise TypeError("no object")
        match record["op"]:
            case "up":
                self.up.set_result(None)
            case "failed" | "odd":
                self.spoiled = True
                if not self.up.done():
                    what = f"{record.get('step')}: {record.get('detail')}"
                    self.up.set_exception(SpawnError(f"no mould ({what})"))
            case "door":
                pass  # its descriptor was taken with it
            case "held":
                if self._held is not None and not self._held.done():
                    self._held.set_result((_number(record["still"]), _number(record["moving"])))
            case _:
                raise ValueError("unknown op")

    def _ended(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        while self._read():
            pass
        self.spoiled = True
        if not self.up.done():
            self.up.set_exception(SpawnError("the mould ended before it was ready"))
            self.up.exception()  # the waiter may be gone already
        if not self.gone.done():
            self.gone.set_result(None)
        if self._held is not None and not self._held.done():
            self._held.set_result((0, 0))
        if self.on_gone is not None:
            self.on_gone()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a record-keeping socket; neither is inherited."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _number(value: Json) -> int:
    if type(value) is not int:
        raise TypeError("no number")
    return value
