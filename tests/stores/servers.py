"""Stores in other forms: behind TLS that wants a client's certificate, behind Sentinel with a replica, in a cluster.

Called by test_reached.py. Must never outlive its block; ports are the kernel's choice, on loopback.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from runner.wire.cluster import slot_of
from tests.support import valkey
from tests.support.wait import wait_until

__all__ = ["Certificates", "Clustered", "Guarded", "certificates", "clustered", "guarded", "tls_front"]

#: The hash tag of the fleet in a cluster.
TAG = "fleet-1"


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of one authority, of a server at 127.0.0.1 and of a client."""

    ca: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]


def certificates(folder: Path) -> Certificates:
    """Make them with the host's openssl."""
    program = shutil.which("openssl")
    assert program is not None

    def run(*words: str) -> None:
        subprocess.run([program or "", *words], check=True, capture_output=True, cwd=folder)

    new = ("req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "2")
    run(*new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key")
    alt = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE")
    run(*new, *signed, *alt, "-keyout", "server.key", "-out", "server.pem", "-subj", "/CN=server")
    run(*new, *signed, "-keyout", "client.key", "-out", "client.pem", "-subj", "/CN=client")
    pairs = [(folder / f"{name}.pem", folder / f"{name}.key") for name in ("server", "client")]
    return Certificates(folder / "ca.pem", pairs[0], pairs[1])


@contextmanager
def tls_front(store: Path, made: Certificates) -> Iterator[int]:
    """Yield a port that speaks TLS 1.2 or later, wants a client's certificate, and passes on to the store's socket."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*made.server)
    context.load_verify_locations(made.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []

    def start(target: object, *words: object) -> None:
        thread = threading.Thread(target=target, args=words, daemon=True)  # type: ignore[arg-type]  # a callable
        threads.append(thread)
        thread.start()

    def accept() -> None:
        with suppress(OSError):
            while True:
                start(serve, listener.accept()[0])

    def serve(raw: socket.socket) -> None:
        try:
            near = context.wrap_socket(raw, server_side=True)
        except OSError:
            raw.close()
            return
        far = socket.socket(socket.AF_UNIX)
        far.connect(str(store))
        ends.extend((near, far))
        relay(near, far)
        near.close()
        far.close()

    start(accept)
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)


def relay(near: ssl.SSLSocket, far: socket.socket) -> None:
    """Pass on what comes from either side, until one ends."""
    with suppress(OSError):
        while True:
            ready = [near] if near.pending() else select.select([near, far], [], [])[0]
            for end, other in ((near, far), (far, near)):
                if end in ready:
                    data = end.recv(65536)
                    if not data:
                        return
                    other.sendall(data)


@dataclass(frozen=True, slots=True)
class Guarded:
    """A store with a replica behind one sentinel."""

    url: str
    sentinel: int
    places: tuple[int, int]

    def primary(self) -> int:
        """Return the port of what the sentinel calls the store now."""
        with redis.Redis(port=self.sentinel, decode_responses=True) as client:
            return int(client.sentinel_get_master_addr_by_name("main")[1])

    def fail_over(self) -> None:
        """Have the sentinel make the replica the store, and wait until it is."""
        old = self.primary()
        with redis.Redis(port=self.sentinel) as client:
            client.execute_command("SENTINEL FAILOVER main")
        wait_until(lambda: self.primary() != old, "the sentinel to name the other one", 20)


@contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    """Yield a store, its replica and a sentinel on free ports of loopback."""
    first, second, third = (_free_port() for _ in range(3))
    tcp = ("--bind", "127.0.0.1", "--port")
    with ExitStack() as stack:
        for port, more in ((first, ()), (second, ("--replicaof", f"127.0.0.1 {first}"))):
            options = (*tcp, str(port), "--repl-diskless-sync-delay", "0", *more)
            stack.enter_context(valkey.running(options))
        settings = folder / "sentinel.conf"
        rules = ("down-after-milliseconds main 1000", "failover-timeout main 3000")
        lines = [f"port {third}", "bind 127.0.0.1", f"dir {folder}", f"sentinel monitor main 127.0.0.1 {first} 1"]
        settings.write_text("\n".join([*lines, *(f"sentinel {rule}" for rule in rules)]) + "\n")
        words = [sys.executable, "-I", "-S", "-c", valkey.LAUNCHER, str(os.getpid()), str(valkey.binary())]
        process = subprocess.Popen([*words, str(settings), "--sentinel"], stdout=subprocess.DEVNULL)
        try:
            found = Guarded(f"redis+sentinel://127.0.0.1:{third}/main", third, (first, second))
            wait_until(lambda: _knows_replica(third), "the sentinel to know the replica", 20)
            yield found
        finally:
            process.kill()
            process.wait(5)


@dataclass(frozen=True, slots=True)
class Clustered:
    """Three nodes of a cluster, and a replica of the one that owns ``slot``, the slot of the fleet's tag."""

    url: str
    ports: tuple[int, ...]
    slot: int
    replica: int = 0

    @property
    def everywhere(self) -> tuple[int, ...]:
        """Every port."""
        return tuple(port for port in (*self.ports, self.replica) if port)

    def node(self, port: int) -> redis.Redis:
        """Return a client of one node."""
        return redis.Redis(port=port)

    def owner(self) -> int:
        """Return the port of the node that owns the slot."""
        for port in self.everywhere:
            with self.node(port) as client, suppress(redis.ResponseError):
                client.execute_command("CLUSTER", "COUNTKEYSINSLOT", self.slot)
                client.get(f"{{{TAG}}}")
                return port
        raise AssertionError("nobody owns the slot")

    def fail_over(self) -> None:
        """Have the replica take the slot over, and wait until it did."""
        self._word(self.replica, "FAILOVER")
        wait_until(lambda: self.owner() == self.replica, "the replica to own the slot", 20)

    def move(self, target: int) -> None:
        """Give the slot with all its keys to another node."""
        source = self.owner()
        ids = {port: self._word(port, "MYID") for port in self.everywhere}
        self._word(target, "SETSLOT", self.slot, "IMPORTING", ids[source])
        self._word(source, "SETSLOT", self.slot, "MIGRATING", ids[target])
        with self.node(source) as client:
            # Agents write to the slot meanwhile: until nothing is left of it.
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 100):
                client.execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
        for port in (target, source, *self.ports):
            # A replica takes no such word; it hears of it.
            with suppress(redis.ResponseError):
                self._word(port, "SETSLOT", self.slot, "NODE", ids[target])

    def _word(self, port: int, *words: str | int) -> str:
        with self.node(port) as client:
            return str(client.execute_command("CLUSTER", *words).decode())


@contextmanager
def clustered(folder: Path) -> Iterator[Clustered]:
    """Yield a cluster; its URL names a node that does not own the tag's slot."""
    *ports, replica = (_free_port() for _ in range(4))
    with ExitStack() as stack:
        for port in (*ports, replica):
            own = ("--bind", "127.0.0.1", "--port", str(port), "--cluster-enabled", "yes")
            more = ("--cluster-port", str(_free_port()), "--cluster-config-file", str(folder / f"{port}.conf"))
            stack.enter_context(valkey.running((*own, *more, "--repl-diskless-sync-delay", "0")))
        found = Clustered("", tuple(ports), slot_of(TAG))
        for index, port in enumerate(ports):
            found._word(port, "ADDSLOTSRANGE", index * 16384 // 3, (index + 1) * 16384 // 3 - 1)
            found._word(port, "SET-CONFIG-EPOCH", index + 1)
        for port in (*ports[1:], replica):
            with found.node(port) as client:
                bus = int(client.config_get("cluster-port")["cluster-port"])
            found._word(ports[0], "MEET", "127.0.0.1", port, bus)
        wait_until(lambda: all("known_nodes:4" in found._word(port, "INFO") for port in (*ports, replica)), "four", 20)
        wait_until(lambda: all("cluster_state:ok" in found._word(port, "INFO") for port in ports), "the cluster", 20)
        owner = found.owner()
        found._word(replica, "REPLICATE", found._word(owner, "MYID"))
        with found.node(replica) as client:
            wait_until(lambda: client.info("replication").get("master_link_status") == "up", "the replica", 20)
        other = next(port for port in ports if port != owner)
        yield Clustered(f"redis+cluster://127.0.0.1:{other}/{TAG}", tuple(ports), found.slot, replica)


def _knows_replica(port: int) -> bool:
    with redis.Redis(port=port, decode_responses=True) as client, suppress(redis.RedisError):
        found = client.sentinel_slaves("main")
        return bool(found) and found[0]["master-link-status"] == "ok"
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
