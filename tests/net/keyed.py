"""A door with proxied secrets for one test: a broker, an egress process, a lease, and a client's side of the door.

Called by the tests of proxied secrets. Must never reach beyond loopback.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from broker.client import BrokerClient, SecretAsk
from node_agent.egress import Door, Egress, Metered
from node_agent.keyline import KeyLine
from node_agent.routes import routes_of
from runner.cli.egress import EGRESS_UID
from runner.cli.store import daemon_uid
from runner.wire.grants import Grants, NetGrant, SecretGrant
from tests.net.support import Client, Process, egress_process
from tests.net.tlsweb import TlsWeb, tls_web
from tests.support import scratch
from tests.support.wait import await_until
from tests.vault.stand import Job, Stand

__all__ = ["RULES", "VALUE", "Keyed", "Parts", "in_keyed_door", "parts"]

T = TypeVar("T")
VALUE = "sk-canary-" + secrets.token_urlsafe(24)
RULES = """
version = 1
[[allow]]
secrets = ["KEY", "OTHER"]
tenants = ["*"]
tasks = ["*"]
commands = ["*"]
modes = ["proxy"]
hosts = ["127.0.0.1:*"]
[[allow]]
secrets = ["X_KEY"]
tenants = ["*"]
tasks = ["*"]
modes = ["proxy"]
hosts = ["127.0.0.1:*"]
header = "x-api-key: {value}"
uses = 2
[[allow]]
secrets = ["BASIC"]
tenants = ["*"]
tasks = ["*"]
modes = ["proxy"]
hosts = ["127.0.0.1:*"]
header = "Authorization: Basic {basic:x-access-token}"
[[allow]]
secrets = ["ASK"]
tenants = ["*"]
tasks = ["*"]
modes = ["proxy"]
hosts = ["127.0.0.1:*"]
approve = true
[[allow]]
secrets = ["SHORT"]
tenants = ["*"]
tasks = ["*"]
modes = ["proxy"]
hosts = ["127.0.0.1:*"]
ttl_s = 0.3
[[allow]]
secrets = ["READ"]
tenants = ["*"]
tasks = ["*"]
modes = ["proxy"]
hosts = ["127.0.0.1:*"]
requests = ["GET /bytes/*", "GET /echo"]
"""
FIELDS = """
[[allow]]
secrets = ["Q"]
tenants = ["*"]
tasks = ["*"]
hosts = ["127.0.0.1:*"]
field = "query:api_key"
[[allow]]
secrets = ["J"]
tenants = ["*"]
tasks = ["*"]
hosts = ["127.0.0.1:*"]
field = "json:token"
[[allow]]
secrets = ["F"]
tenants = ["*"]
tasks = ["*"]
hosts = ["127.0.0.1:*"]
field = "form:token"
[[allow]]
secrets = ["P"]
tenants = ["*"]
tasks = ["*"]
hosts = ["127.0.0.1:*"]
field = "path:/bot{value}/"
[[allow]]
secrets = ["L"]
tenants = ["*"]
tasks = ["*"]
hosts = ["127.0.0.1:*"]
field = "json:token"
body_bytes = 110
[[allow]]
secrets = ["FEW"]
tenants = ["*"]
tasks = ["*"]
hosts = ["127.0.0.1:*"]
body_bytes = 1000
at_once = 2
"""
SECRETS = {
    name: VALUE.encode()
    for name in ("Q", "J", "F", "L", "P", "FEW", "KEY", "OTHER", "X_KEY", "BASIC", "ASK", "SHORT", "READ")
}


@dataclass(slots=True)
class Parts:
    """What a module's tests share."""

    stand: Stand
    process: Process
    web: TlsWeb
    folder: Path
    count: int = 0


@contextmanager
def parts(
    rules: str = RULES + FIELDS, host: Callable[[Path], AbstractContextManager[TlsWeb]] = tls_web
) -> Iterator[Parts]:
    """Yield a broker, a server, and an egress process that trusts it."""
    with scratch.folder(mode=0o711) as folder:
        (folder / "v").mkdir()
        stand = Stand(folder / "v", SECRETS, rules)
        uid = daemon_uid(EGRESS_UID)
        stand.options = () if uid is None else ("--egress-uid", str(uid))
        stand.start()
        try:
            with host(folder) as web, egress_process(folder / "h", "--ca", str(web.ca)) as process:
                try:
                    yield Parts(stand, process, web, folder)
                finally:
                    sys.stderr.write(process.log.read_text())
        finally:
            stand.stop()


@dataclass(slots=True)
class Keyed:
    """One attempt with a proxied secret: its lease, its door, and a client's side of that."""

    parts: Parts
    attempt: str
    broker: BrokerClient
    egress: Egress
    door: Door
    client: Client
    keys: KeyLine
    job: Job
    denied: list[str] = field(default_factory=list)
    metered: list[Metered] = field(default_factory=list)

    @property
    def host(self) -> str:
        """The server, as the grant names it."""
        return f"127.0.0.1:{self.parts.web.port}"

    async def get(self, path: str, *headers: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes, bytes]:
        """Ask on a new connection; return status, head and body of the answer."""
        end = self.client.dial()
        answer = await self.on(end, path, *headers, method=method, body=body, close=True)
        end.close()
        return answer

    async def on(
        self, end: socket.socket, path: str, *headers: str, method: str = "GET", body: bytes = b"", close: bool = False
    ) -> tuple[int, bytes, bytes]:
        """Ask on a connection that stays, unless it is to be closed."""
        lines = [f"{method} http://{self.host}{path} HTTP/1.1", f"Host: {self.host}", *headers]
        lines += [f"Content-Length: {len(body)}"] if body or method == "POST" else []
        lines += ["Connection: close"] if close else []
        await self.client.send(end, "\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        if close:
            head, _, rest = (await self.client.read(end)).partition(b"\r\n\r\n")
            if b"transfer-encoding: chunked" in head.lower():
                rest = _joined(rest)
        else:
            head, _, rest = (await self.client.read(end, b"\r\n\r\n")).partition(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
            while len(rest) < size:
                rest += await self.client.exactly(end, size - len(rest))
        return int(head.split()[1]) if head else 0, head, rest

    async def stream(self) -> tuple[socket.socket, threading.Semaphore]:
        """Ask for events; return the connection, and what has the next one sent."""
        end, count = self.client.dial(), len(self.parts.web.ticks)
        await self.client.send(end, f"GET http://{self.host}/slow HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await await_until(lambda: len(self.parts.web.ticks) > count, "the stream to begin")
        return end, self.parts.web.ticks[-1]

    def told(self, event: str) -> list[dict[str, object]]:
        """Return the lines of one kind about this attempt."""
        return [line for line in self.record() if line["event"] == event]

    def record(self) -> list[dict[str, object]]:
        """Return what the vault's record says of this attempt."""
        lines = [json.loads(line.rpartition(" ")[0]) for line in self.parts.stand.record().splitlines()]
        return [line for line in lines if line.get("attempt") == self.attempt]


def in_keyed_door(
    shared: Parts,
    scenario: Callable[[Keyed], Awaitable[T]],
    *names: str,
    net: tuple[tuple[str, int], ...] = (),
    named: bool = True,
) -> T:
    """Run ``scenario`` with a door whose listener is on the test's own loopback; ``names``: its secrets (KEY)."""
    shared.count += 1
    attempt = f"main-keyed{shared.count}.1"
    grant = NetGrant("127.0.0.1", shared.web.port)

    async def main() -> T:
        denied: list[str] = []
        metered: list[Metered] = []
        job = Job(attempt, "A" if os.geteuid() == 0 else "B")
        broker = shared.stand.client()
        line = Egress(shared.process.path, (), lambda one: denied.append(one.why), on_metered=metered.append)
        mould = subprocess.Popen(["sleep", "60"])
        listener = socket.create_server(("127.0.0.1", 0))
        client = Client(listener.getsockname()[1])
        try:
            host = f"127.0.0.1:{shared.web.port}"
            asks = [SecretAsk(name, "proxy", host) for name in names or ("KEY",)]
            await broker.open(job.ask(*asks), job.fds)

            async def give(end: int) -> None:
                await broker.proxy(attempt, end)

            keys = KeyLine(give)
            allowed = [host, *(f"{name}:{port}" for name, port in net)] if named else ["*"]
            granted = Grants(
                net=tuple(NetGrant(name, port) for name, port in net),
                secrets=tuple(SecretGrant(name, "proxy", host) for name in names or ("KEY",)),
            )
            rules = await line.check(granted.net, allowed, [grant], routes_of(granted))
            door = await line.open(attempt, rules, listener.detach(), os.pidfd_open(mould.pid), keys)
            keyed = Keyed(shared, attempt, broker, line, door, client, keys, job, denied, metered)
            return await asyncio.wait_for(_awaited(scenario(keyed)), 40)
        finally:
            listener.close()
            await line.stop()
            await broker.close(attempt)
            await broker.stop()
            for end in client.ends:
                end.close()
            mould.kill()
            mould.wait()
            job.end()

    return asyncio.run(main())


async def _awaited(thing: Awaitable[T]) -> T:
    return await thing


def _joined(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            break
        out, data = out + data[:count], data[count + 2 :]
    return out
