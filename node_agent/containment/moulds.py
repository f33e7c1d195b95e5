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
from dataclasses import dataclass
from typing import Final

from node_agent.containment.errors import SpawnError
from node_agent.containment.plan import Profile
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import WireError

__all__ = ["End", "Mould", "pair"]

_MAX_RECORD_BYTES: Final = 8192


@dataclass(frozen=True, slots=True)
class End:
    """A mould's word on an attempt, given after kill(-1) and ECHILD. ``status`` is a raw wait status."""

    attempt: str
    status: int
    cpu_s: float
    max_rss_bytes: int
    processes: int


class Mould:
    """One mould, from its fork to the readable pidfd. ``profile`` is None until its first attempt."""

    def __init__(
        self, pid: int, pidfd: int, lifeline: socket.socket, control: socket.socket, paths: frozenset[str]
    ) -> None:
        """``paths``: the node's own paths that its views can show."""
        loop = asyncio.get_running_loop()
        self.pid = pid
        self.paths = paths
        self.born_s = loop.time()
        self.served = 0
        self.spoiled = False
        self.profile: Profile | None = None
        self.up: asyncio.Future[None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.on_end: Callable[[End], None] | None = None
        self.on_gone: Callable[[], None] | None = None
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
        try:
            socket.send_fds(self._control, [codec.dump({"op": "begin", "attempt": attempt})], [channel_fd])
        except OSError as error:
            raise SpawnError(f"the mould does not answer: {error}") from error

    def terminate(self, attempt: str) -> None:
        """Have SIGTERM sent to the worker, if this attempt still runs."""
        with suppress(OSError):
            self._control.send(codec.dump({"op": "term", "attempt": attempt}))

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
        for future in (self.up, self.gone):
            if not future.done():
                future.cancel()

    def _read(self) -> None:
        while True:
            try:
                data = self._control.recv(_MAX_RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._control)
                return
            try:
                self._take(codec.load(data))
            except (WireError, KeyError, TypeError, ValueError):
                self.kill()

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
            case "end":
                end = End(
                    attempt=str(record["attempt"]),
                    status=_number(record["status"]),
                    cpu_s=float(str(record["cpu_s"])),
                    max_rss_bytes=_number(record["max_rss_bytes"]),
                    processes=_number(record["processes"]),
                )
                if self.on_end is not None:
                    self.on_end(end)
            case _:
                raise ValueError("unknown op")

    def _ended(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
        self._read()
        self.spoiled = True
        if not self.up.done():
            self.up.set_exception(SpawnError("the mould ended before it was ready"))
            self.up.exception()  # the waiter may be gone already
        if not self.gone.done():
            self.gone.set_result(None)
        if self.on_gone is not None:
            self.on_gone()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a record-keeping socket; neither is inherited."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _number(value: Json) -> int:
    if type(value) is not int:
        raise TypeError("no number")
    return value
