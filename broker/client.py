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
from typing import Final, Literal, NamedTuple

from broker.vault.peer import peer_uid
from broker.vault.sockets import CONTROL

__all__ = ["ANSWER_S", "CONTROL", "BrokerAway", "BrokerClient", "LeaseAsk", "LeaseRefused", "Opening", "SecretAsk"]

#: Longest wait for one answer.
ANSWER_S: Final = 2.0
RETRY_S: Final = 0.2
_FULL_S: Final = 0.01
#: What is left of ANSWER_S for a question that had to wait for others that were answered.
_LEAST_ANSWER_S: Final = 0.5
_MAX_REPLY_BYTES: Final = 64 * 1024


class BrokerAway(Exception):
    """No broker answers on this host."""


class LeaseRefused(Exception):
    """The broker does not give these secrets; the message is for the operator. ``foreign``: sealed for another job."""

    def __init__(self, message: str, *, foreign: bool = False) -> None:
        super().__init__(message)
        self.foreign = foreign


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
    #: The signed job's sealed values: place → ciphertext.
    sealed: Mapping[str, str] = field(default_factory=dict)
    #: The id of the key whose signature admitted the job; with none, no sealed value opens.
    signer: str = ""


class Opening(NamedTuple):
    """An open lease. ``pending``: the names that wait for a person. ``sdks``: for which library a rule says one is."""

    pending: tuple[str, ...]
    sdks: dict[str, str]


@dataclass(slots=True)
class _Held:
    """A live lease's records and our copies of its descriptors, which go with the first."""

    record: bytes
    fds: tuple[int, ...]
    more: tuple[bytes, ...] = ()
    #: Our copy of the broker's end of the egress process's line.
    proxy: int | None = None
    #: Our copy of the listener on the job's own loopback.
    service: int | None = None

    def close(self) -> None:
        for fd in (*self.fds, self.proxy, self.service):
            if fd is not None:
                with suppress(OSError):
                    os.close(fd)


@dataclass(slots=True)
class BrokerClient:
    """One connection, made when it is needed and made again when it is lost. ``start``, then ``stop``."""

    path: Path
    #: The last question got no answer.
    away: bool = False
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

    async def open(self, ask: LeaseAsk, fds: Sequence[int]) -> Opening:
        """Open a lease.

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
            "sealed": len(ask.sealed),
            "signer": ask.signer,
        }
        more = tuple(
            json.dumps({"op": "sealed", "attempt": ask.attempt, "place": place, "data": text}).encode()
            for place, text in ask.sealed.items()
        )
        held = _Held(json.dumps(order, separators=(",", ":")).encode(), tuple(os.dup(fd) for fd in fds), more)
        try:
            reply = _granted(await self._ask(held.record, held.fds))
        except BaseException:
            held.close()
            raise
        self._held[ask.attempt] = held
        try:
            for record in held.more:
                _granted(await self._ask(record, ()))
        except BaseException:
            await self.close(ask.attempt)
            raise
        pending, sdks = reply.get("pending"), reply.get("sdks")
        return Opening(
            tuple(str(name) for name in pending) if isinstance(pending, list) else (),
            {str(name): str(sdk) for name, sdk in sdks.items()} if isinstance(sdks, dict) else {},
        )

    async def streams(self, attempt: str, fds: Sequence[int]) -> None:
        """Have a job's output scrubbed: the job's two read ends, our two write ends, and the alarm's write end.

        The caller's stay its own.

        Raises:
            BrokerAway, LeaseRefused.
        """
        await self._order({"op": "streams", "attempt": attempt}, fds)

    async def proxy(self, attempt: str, end: int) -> None:
        """Give the broker its end of the egress process's line for an attempt, in place of an earlier one.

        ``end`` stays the caller's; a copy is held for the broker's next start. Raises BrokerAway, LeaseRefused.
        """
        held = self._held.get(attempt)
        if held is None:
            raise LeaseRefused(f"{attempt} has no lease")
        old, held.proxy = held.proxy, os.dup(end)
        if old is not None:
            os.close(old)
        await self._order(_proxy_order(attempt), (held.proxy,))

    async def service(self, attempt: str, listener: int) -> None:
        """Have the broker serve an attempt on a listener of the job's own loopback; the rest as for `proxy`."""
        held = self._held.get(attempt)
        if held is None:
            raise LeaseRefused(f"{attempt} has no lease")
        old, held.service = held.service, os.dup(listener)
        if old is not None:
            os.close(old)
        await self._order(_service_order(attempt), (held.service,))

    async def clean(self, attempt: str, source: int, target: int) -> dict[str, bool]:
        """Copy a file (a result) without the attempt's values; returns the secrets that it held (name: kill).

        Raises:
            BrokerAway, LeaseRefused.
        """
        leaked = (await self._order({"op": "file", "attempt": attempt}, (source, target))).get("leaked")
        return {str(name): kill is True for name, kill in leaked.items()} if isinstance(leaked, dict) else {}

    async def decide(self, attempt: str, name: str, *, approved: bool, by: str) -> None:
        """Hand a person's decision on a waiting secret over. Raises BrokerAway, LeaseRefused: nothing waits there."""
        op = "approve" if approved else "deny"
        await self._order({"op": op, "attempt": attempt, "name": name, "by": by}, ())

    async def _order(self, order: Mapping[str, object], fds: Sequence[int]) -> dict[str, object]:
        return _granted(await self._ask(json.dumps(order).encode(), fds))

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
            await self._ask(json.dumps({"op": "close", "attempt": attempt}).encode(), (), hopeful=False)

    async def _ask(self, record: bytes, fds: Sequence[int], *, hopeful: bool = True) -> dict[str, object]:
        """Return the answer. ``hopeful`` False: not worth a wait if the last question got none."""
        until_s = asyncio.get_running_loop().time() + ANSWER_S
        async with self._lock:
            try:
                # Who waited for somebody else's answer has waited for the broker.
                left_s = until_s - asyncio.get_running_loop().time()
                if self.away and (left_s <= 0 or not hopeful):
                    raise TimeoutError  # noqa: TRY301 - the same end as a wait of our own
                # Not wait_for: before Python 3.12 it can swallow the cancellation of whoever waits here.
                async with asyncio.timeout(max(left_s, _LEAST_ANSWER_S)):
                    reply = await self._exchange(record, fds)
            except (OSError, ValueError, TimeoutError) as error:
                self.away = True
                self._drop()
                raise BrokerAway(f"no broker answers on {self.path} ({type(error).__name__})") from None
            except BaseException:
                # The answer that is under way would be taken for the next question's.
                self._drop()
                raise
            self.away = False
            return reply

    async def _exchange(self, record: bytes, fds: Sequence[int]) -> dict[str, object]:
        if self._socket is None:
            self._socket = await self._connected()
            for attempt, held in list(self._held.items()):
                if self._held.get(attempt) is not held:
                    # Closed while we waited for an answer, and its descriptors with it.
                    continue
                await self._roundtrip(self._socket, held.record, held.fds)
                for more in held.more:
                    await self._roundtrip(self._socket, more, ())
                if held.proxy is not None:
                    await self._roundtrip(self._socket, json.dumps(_proxy_order(attempt)).encode(), (held.proxy,))
                if held.service is not None:
                    await self._roundtrip(self._socket, json.dumps(_service_order(attempt)).encode(), (held.service,))
        return await self._roundtrip(self._socket, record, fds)

    async def _roundtrip(self, line: socket.socket, record: bytes, fds: Sequence[int]) -> dict[str, object]:
        socket.send_fds(line, [record], list(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        data = await asyncio.get_running_loop().sock_recv(line, _MAX_REPLY_BYTES)
        reply = json.loads(data)
        if not isinstance(reply, dict):
            raise ValueError("no reply")  # noqa: TRY004 - the same fault as text that is no JSON
        return reply

    async def _connected(self) -> socket.socket:
        while True:
            try:
                return self._connect()
            except BlockingIOError:
                # So many wait at the door that it takes no more just now.
                await asyncio.sleep(_FULL_S)

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


def _proxy_order(attempt: str) -> dict[str, object]:
    return {"op": "proxy", "attempt": attempt}


def _service_order(attempt: str) -> dict[str, object]:
    return {"op": "service", "attempt": attempt}


def _granted(reply: dict[str, object]) -> dict[str, object]:
    """Return a reply that says yes. Raises LeaseRefused."""
    if not reply.get("ok"):
        raise LeaseRefused(str(reply.get("message") or reply.get("err")), foreign=reply.get("err") == "foreign")
    return reply


def _ended(line: socket.socket) -> bool:
    try:
        return line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
