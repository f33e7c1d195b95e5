"""The node agent's line to the broker of its host: open and close leases, and know whether there is a broker at all.

Called by the node agent. Must never wait longer than it says, hold a value of a secret, or talk to a socket that is
neither root's nor of its own user.

After a broker's restart every lease that is still live here is opened again with the same channel: a job notices
nothing but a late answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from broker.vault.peer import peer_uid

__all__ = ["ANSWER_S", "CONTROL", "BrokerAway", "BrokerClient", "LeaseAsk", "LeaseRefused", "SecretAsk"]

#: The agents' socket, below the home's folder of sockets.
CONTROL: Final = "broker"
#: Longest wait for one answer.
ANSWER_S: Final = 2.0
RETRY_S: Final = 0.2
_MAX_REPLY_BYTES: Final = 64 * 1024


class BrokerAway(Exception):
    """No broker answers on this host."""


class LeaseRefused(Exception):
    """The broker does not give these secrets; the message is for the operator."""


@dataclass(frozen=True, slots=True)
class SecretAsk:
    """One secret of a verified job."""

    name: str
    mode: Literal["proxy", "get", "file", "env"]
    host: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """What the node verified of an attempt. ``uid``: the job's own at level A, the agent's at B."""

    attempt: str
    job: str
    tenant: str
    queue: str
    level: Literal["A", "B"]
    uid: int
    task: str | None
    command: str | None
    tags: Mapping[str, str]
    secrets: Sequence[SecretAsk]


@dataclass(slots=True)
class _Held:
    """A live lease's record and our copies of its descriptors."""

    record: bytes
    fds: tuple[int, ...]

    def close(self) -> None:
        for fd in self.fds:
            with suppress(OSError):
                os.close(fd)


@dataclass(slots=True)
class BrokerClient:
    """One connection, made when it is needed and made again when it is lost. ``start``, then ``stop``."""

    path: Path
    _socket: socket.socket | None = None
    _held: dict[str, _Held] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keep the connection up while leases are live. Idempotent."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Let go of everything; the broker ends our leases after its grace. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        self._drop()
        for held in self._held.values():
            held.close()
        self._held.clear()

    async def ping(self) -> bool:
        """Return whether a broker answers."""
        try:
            return bool((await self._ask(b'{"op":"ping"}', ())).get("ok"))
        except BrokerAway:
            return False

    async def open(self, ask: LeaseAsk, fds: Sequence[int]) -> tuple[str, ...]:
        """Open a lease; returns the names that wait for a person.

        ``fds``: the broker's end of the channel, the pidfds of mould and worker, and at level B the pid namespace. The
        caller keeps its own; copies are held here until ``close``.

        Raises:
            BrokerAway: no answer within ANSWER_S. LeaseRefused.
        """
        secrets = [{"name": one.name, "mode": one.mode, "host": one.host} for one in ask.secrets]
        order = {
            "op": "open",
            "attempt": ask.attempt,
            "job": ask.job,
            "tenant": ask.tenant,
            "queue": ask.queue,
            "level": ask.level,
            "uid": ask.uid,
            "task": ask.task,
            "command": ask.command,
            "tags": dict(ask.tags),
            "asks": secrets,
        }
        held = _Held(json.dumps(order, separators=(",", ":")).encode(), tuple(os.dup(fd) for fd in fds))
        try:
            reply = await self._ask(held.record, held.fds)
        except BaseException:
            held.close()
            raise
        if not reply.get("ok"):
            held.close()
            raise LeaseRefused(str(reply.get("message") or reply.get("err")))
        self._held[ask.attempt] = held
        pending = reply.get("pending")
        return tuple(str(name) for name in pending) if isinstance(pending, list) else ()

    async def streams(self, attempt: str, fds: Sequence[int]) -> None:
        """Have a job's output scrubbed: the job's two read ends and our two write ends; the caller's stay its own.

        Raises:
            BrokerAway, LeaseRefused.
        """
        await self._order({"op": "streams", "attempt": attempt}, fds)

    async def clean(self, attempt: str, source: int, target: int) -> None:
        """Copy a file (a result) without the attempt's values. Raises BrokerAway, LeaseRefused."""
        await self._order({"op": "file", "attempt": attempt}, (source, target))

    async def _order(self, order: Mapping[str, object], fds: Sequence[int]) -> None:
        reply = await self._ask(json.dumps(order).encode(), fds)
        if not reply.get("ok"):
            raise LeaseRefused(str(reply.get("message") or reply.get("err")))

    async def close(self, attempt: str) -> None:
        """End a lease. Never raises: without a broker there is none."""
        held = self._held.pop(attempt, None)
        if held is None:
            return
        # Also without an answer: the channel is dead for every copy of this end.
        with suppress(OSError), socket.socket(fileno=os.dup(held.fds[0])) as channel:
            channel.shutdown(socket.SHUT_RDWR)
        held.close()
        with suppress(BrokerAway):
            await self._ask(json.dumps({"op": "close", "attempt": attempt}).encode(), ())

    async def _ask(self, record: bytes, fds: Sequence[int]) -> dict[str, object]:
        async with self._lock:
            try:
                return await asyncio.wait_for(self._exchange(record, fds), ANSWER_S)
            except (OSError, ValueError, TimeoutError) as error:
                self._drop()
                raise BrokerAway(f"no broker answers on {self.path} ({type(error).__name__})") from None

    async def _exchange(self, record: bytes, fds: Sequence[int]) -> dict[str, object]:
        if self._socket is None:
            self._socket = self._connect()
            for held in self._held.values():
                await self._roundtrip(self._socket, held.record, held.fds)
        return await self._roundtrip(self._socket, record, fds)

    async def _roundtrip(self, line: socket.socket, record: bytes, fds: Sequence[int]) -> dict[str, object]:
        socket.send_fds(line, [record], list(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        data = await asyncio.get_running_loop().sock_recv(line, _MAX_REPLY_BYTES)
        reply = json.loads(data)
        if not isinstance(reply, dict):
            raise ValueError("no reply")  # noqa: TRY004 - the same fault as text that is no JSON
        return reply

    def _connect(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.setblocking(False)
            # Older kernels name the sender of an early message only if this end asks for names as well.
            line.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            line.connect(str(self.path))
            uid = peer_uid(line)
        except BaseException:
            line.close()
            raise
        if uid not in {0, os.geteuid()}:
            line.close()
            raise PermissionError(f"the socket belongs to user {uid}")
        return line

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _keep(self) -> None:
        """Notice a restart while jobs may be waiting for it: leases are opened again at once, not with the next job."""
        while True:
            await asyncio.sleep(RETRY_S)
            if not self._held or self._lock.locked():
                continue
            if self._socket is None or _ended(self._socket):
                async with self._lock:
                    self._drop()
                await self.ping()


def _ended(line: socket.socket) -> bool:
    try:
        return line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
