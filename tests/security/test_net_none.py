"""Everything that could talk to the world, tried by a job without a net grant (A-I04, attacks 16 and 17).

Stopped by a network namespace of its own with nothing in it but a loopback, by the seccomp rules on socket families,
and by Landlock's scope for abstract names. Listeners of the host stand by and must hear nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from node_agent.containment.plan import Mount
from tests.containment.rig import Rig, granted, in_rig
from tests.security.fs_tries import Wall, broken, outside, tried

REACH = r"""
tcp4, tcp6, far, udp4, udp6, abstract, path = sys.argv[1:8]
def address(text): return text.rpartition(":")[0], int(text.rpartition(":")[2])
socket.setdefaulttimeout(2)
def connect(family, kind, where, protocol=0, act=None):
    with socket.socket(family, kind, protocol) as one:
        one.connect(where); one.send(b"from the job")
def send(family, where, flags=0, kind=socket.SOCK_DGRAM):
    with socket.socket(family, kind) as one:
        one.settimeout(None); one.sendto(b"from the job", flags, where)
I4, I6, U, S, D, Q = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 1, 2, 5
port = address(tcp4)[1]
attempt("tcp", lambda: connect(I4, S, address(tcp4)))
attempt("tcp:any", lambda: connect(I4, S, ("0.0.0.0", port)))
attempt("tcp:net127", lambda: connect(I4, S, ("127.9.9.9", port)))
attempt("tcp:far", lambda: connect(I4, S, address(far)))
attempt("tcp6", lambda: connect(I6, S, address(tcp6)))
attempt("tcp6:mapped", lambda: connect(I6, S, ("::ffff:127.0.0.1", port)))
attempt("tfo", lambda: send(I4, address(tcp4), 0x20000000, S))
attempt("tfo:far", lambda: send(I4, address(far), 0x20000000, S))
attempt("mptcp", lambda: connect(I4, S, address(tcp4), 262))
attempt("mptcp:far", lambda: connect(I4, S, address(far), 262))
def errors(family, where):
    # A datagram is accepted on a loopback without a listener; the refusal comes with the next call.
    with socket.socket(family, D) as one:
        one.connect(where); one.send(b"from the job"); one.settimeout(0.2)
        try: one.recv(10)
        except TimeoutError: pass
attempt("udp", lambda: errors(I4, address(udp4)))
attempt("udp6", lambda: errors(I6, address(udp6)))
attempt("udp:far", lambda: send(I4, (address(far)[0], 53)))
attempt("udp:world", lambda: send(I4, ("192.0.2.1", 53)))
attempt("udp6:world", lambda: send(I6, ("2001:db8::1", 53)))
def broadcast():
    with socket.socket(I4, D) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1); one.sendto(b"from the job", ("255.255.255.255", 9))
attempt("broadcast", broadcast)
attempt("multicast", lambda: send(I4, ("224.0.0.251", 5353)))
attempt("metadata", lambda: connect(I4, S, ("169.254.169.254", 80)))
def ask():
    try: socket.getaddrinfo("example.com", 80)
    except socket.gaierror as error: raise OSError(errno.ENETUNREACH, str(error))
attempt("dns", ask)
attempt("dns:stub", lambda: errors(I4, ("127.0.0.53", 53)))
attempt("abstract:stream", lambda: connect(U, S, "\0" + abstract))
attempt("abstract:datagram", lambda: send(U, "\0" + abstract + "d"))
attempt("abstract:pair", lambda: socket.socketpair(U, D)[0].sendto(b"from the job", "\0" + abstract + "d"))
for name, kind in (("stream", S), ("datagram", D), ("packets", Q)):
    attempt("path:" + name, lambda: connect(U, kind, f"{path}/{name}"))
attempt("path:pair", lambda: socket.socketpair(U, D)[0].sendto(b"from the job", path + "/datagram"))
attempt("path:docker", lambda: connect(U, S, "/var/run/docker.sock"))
attempt("path:bus", lambda: connect(U, S, "/run/dbus/system_bus_socket"))
"""
EMPTY = Wall.of("an own net namespace", "ECONNREFUSED ENETUNREACH EADDRNOTAVAIL EHOSTUNREACH EACCES")
#: Where socket(AF_UNIX) is allowed, the name is looked up in the job's own namespaces and view.
UNIX = Wall.of("view, net namespace, seccomp", "ENOENT ECONNREFUSED EPERM")
FILTER = Wall.of("seccomp", "EPERM")
REACHED = dict.fromkeys(
    (
        *("tcp", "tcp:any", "tcp:net127", "tcp:far", "tcp6", "tcp6:mapped", "tfo", "tfo:far", "udp", "udp6", "udp:far"),
        *("udp:world", "udp6:world", "broadcast", "multicast", "metadata", "dns", "dns:stub"),
    ),
    EMPTY,
)
REACHED |= dict.fromkeys(
    ("mptcp", "mptcp:far"), Wall.of("net namespace, seccomp", f"{' '.join(EMPTY.errors)} EPERM EPROTONOSUPPORT")
)
REACHED |= dict.fromkeys(
    (
        *("abstract:stream", "abstract:datagram", "path:stream", "path:datagram", "path:packets"),
        "path:docker",
        "path:bus",
    ),
    UNIX,
)
REACHED |= dict.fromkeys(("abstract:pair", "path:pair"), FILTER)
#: What the counter-check reaches on every host; IPv6, MPTCP and fast open depend on it.
WORKS = {"tcp", "tcp:any", "tcp:net127", "tcp:far", "udp", "abstract:stream", "abstract:datagram", "abstract:pair"}
WORKS |= {"path:stream", "path:datagram", "path:packets", "path:pair"}


@dataclass
class Ears:
    """Listeners of the host, on loopback alone but for one on the host's own address."""

    words: list[str] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    def listen(self, stack: ExitStack, family: int, kind: int, where: str | tuple[str, int]) -> str:
        """Add a listener; return where it is to be found."""
        one = stack.enter_context(socket.socket(family, kind))
        one.bind(where)
        if kind != socket.SOCK_DGRAM:
            one.listen(50)
        one.setblocking(False)
        self.sockets.append(one)
        name = one.getsockname()
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else str(where)

    def heard(self) -> list[str]:
        """Return what came in at any listener."""
        found = []
        for one in self.sockets:
            try:
                if one.type == socket.SOCK_DGRAM:
                    found.append(repr(one.recv(100)))
                else:
                    one.accept()[0].close()
                    found.append(f"a connection at {one.getsockname()}")
            except BlockingIOError:
                continue
        return found


@pytest.fixture
def ears(home: Path) -> Iterator[Ears]:
    """Listeners for every kind of attempt, open to every user of this host."""
    with ExitStack() as stack:
        ears = Ears()
        local, six = socket.AF_INET, socket.AF_INET6
        tcp = ears.listen(stack, local, socket.SOCK_STREAM, ("0.0.0.0", 0))  # noqa: S104 - all loopback addresses too
        port = int(tcp.rpartition(":")[2])
        udp = ears.listen(stack, local, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        tcp6, udp6 = "::1:1", "::1:1"
        if socket.has_ipv6:
            try:
                tcp6 = ears.listen(stack, six, socket.SOCK_STREAM, ("::1", 0))
                udp6 = ears.listen(stack, six, socket.SOCK_DGRAM, ("::1", 0))
            except OSError:
                tcp6, udp6 = "::1:1", "::1:1"
        name = f"rf-ears-{port}"
        ears.listen(stack, socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}")
        ears.listen(stack, socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{name}d")
        for kind, part in (("STREAM", "stream"), ("DGRAM", "datagram"), ("SEQPACKET", "packets")):
            ears.listen(stack, socket.AF_UNIX, getattr(socket, f"SOCK_{kind}"), str(home / part))
            (home / part).chmod(0o777)
        ears.words = [f"127.0.0.1:{port}", tcp6, f"{_own_address()}:{port}", udp, udp6, name, str(home)]
        yield ears


def _own_address() -> str:
    """Return this host's address on its way out, or one of the loopback's where there is none; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(one.getsockname()[0])


@pytest.mark.parametrize("granted_path", [False, True], ids=["no grant", "a read grant of the sockets' folder"])
def test_attack_17_nothing_outside_hears_a_job(node_name: str, home: Path, ears: Ears, granted_path: bool) -> None:
    """TCP, UDP, fast open, MPTCP, DNS, IPv6, broadcast, abstract and pathname sockets reach no listener of the host."""

    async def scenario(rig: Rig) -> None:
        with ExitStack() as stack:
            mounts = []
            if granted_path:
                mounts = [(Mount(str(home), "read", "dir"), stack.enter_context(granted(home, "read")))]
            found = await tried(rig, REACH, *ears.words, mounts=mounts, allow_unix=not granted_path)
        walls = REACHED | (dict.fromkeys((name for name in REACHED if "path" in name), FILTER) if granted_path else {})
        assert broken(found, walls) == []

    in_rig(node_name, scenario)
    assert ears.heard() == []


def test_without_the_walls_everything_is_heard(ears: Ears) -> None:
    """Counter-check: the same attempts, made outside, reach the listeners."""
    found = outside(REACH, *ears.words)
    assert {name: found[name] for name in WORKS if found[name] != "DONE"} == {}
    assert len(ears.heard()) >= 7


FAMILIES = r"""
opened = set()
for family in range(0, 64):
    for kind in (1, 2, 3, 4, 5, 10):
        for protocol in (0, 1, 3, 6, 16, 17, 33, 41, 58, 132, 136, 255, 262, 768):
            for low in (family, family | 0x7_0000_0000):
                try: fd = raw(41, 198, low, kind, protocol)
                except OSError: continue
                opened.add((family, kind)); os.close(fd)
links = set()
for protocol in range(0, 33):
    for kind in (2, 3):
        try: os.close(raw(41, 198, 16, kind, protocol)); links.add(protocol)
        except OSError: pass
for family, kind in sorted(opened): print(f"{family}/{kind}", "OPEN")
print("netlink", "+".join(map(str, sorted(links))))
"""
#: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK; no raw, no packet, no seqpacket over IP.
LIKELY = {f"{family}/{kind}" for family in (2, 10) for kind in (1, 2)} | {"16/2", "16/3"} | {"1/1", "1/2", "1/5"}


@pytest.mark.parametrize("allow_unix", [True, False])
def test_only_ip_and_a_routes_netlink_can_be_opened(node_name: str, allow_unix: bool) -> None:
    """Of 64 families, each kind and 14 protocols, high bits too, a job opens TCP and UDP, and NETLINK_ROUTE alone."""

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, FAMILIES, allow_unix=allow_unix)
        assert found.pop("netlink") == "0", "seccomp"
        # AF_UNIX takes SOCK_RAW for a datagram socket.
        allowed = LIKELY | {"1/3"} if allow_unix else {name for name in LIKELY if not name.startswith("1/")}
        assert set(found) - allowed == set(), "seccomp"
        assert {"2/1", "2/2"} <= set(found), "programs need them for their own loopback"

    in_rig(node_name, scenario)
    counter = outside(FAMILIES)
    assert counter["netlink"] != "0"
    assert len(counter) > len(LIKELY)


INSIDE = r"""
import json
def lines(name):
    try: return open("/proc/net/" + name).read().splitlines()[1:]
    except OSError: return []
def link(kind, flags, body):
    with socket.socket(16, 3, 0) as one:
        one.send(struct.pack("IHHII", 16 + len(body), kind, flags | 1, 1, 0) + body)
        return one.recv(1 << 16)
def change(kind, body):
    answer = link(kind, 0x600 | 4, body)
    code = struct.unpack_from("i", answer, 16)[0]
    if code < 0: raise OSError(-code, "")
for name in ("tcp", "tcp6", "udp", "udp6", "raw", "packet", "route", "arp"):
    print("own:" + name, len(lines(name)))
print("own:unix", len([each for each in lines("unix") if "@" in each or "/" in each]))
print("interfaces", "+".join(sorted(name for _, name in socket.if_nameindex())))
dummy = struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH6sxx", 10, 3, b"rfdum\0")
attempt("new-link", lambda: change(16, dummy))
attempt("link-down", lambda: change(16, struct.pack("BxHiII", 0, 0, 1, 0, 1)))
address = struct.pack("BBBBI", 2, 8, 0, 0, 1) + struct.pack("HH4s", 8, 2, b"\x0a\0\0\x01")
attempt("new-address", lambda: change(20, address))
route = struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("HHi", 8, 4, 1)
attempt("new-route", lambda: change(24, route))
def flags():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 0))
attempt("ioctl", flags)
def option(level, name, value):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one: one.setsockopt(level, name, value)
attempt("mark", lambda: option(1, 36, 1))
attempt("transparent", lambda: option(0, 19, 1))
attempt("priority", lambda: option(1, 12, 7))
attempt("buffer:force", lambda: option(1, 32, 1 << 28))
for name in ("ipv4/ip_forward", "ipv4/ip_unprivileged_port_start", "core/somaxconn", "ipv4/ping_group_range"):
    attempt("sysctl:" + name, lambda: os.close(os.open("/proc/sys/net/" + name, os.O_WRONLY)))
"""


def test_the_own_net_namespace_is_empty_and_stays_as_it_is(node_name: str, ears: Ears) -> None:
    """No foreign socket is listed in it, it has one interface, and the job can change neither links nor addresses."""
    assert ears.sockets

    async def scenario(rig: Rig) -> None:
        found = await tried(rig, INSIDE)
        assert found.pop("interfaces") == "lo"
        own = {name: found.pop(name) for name in list(found) if name.startswith("own:")}
        assert set(own.values()) == {"0"}, "an own net namespace and /proc"
        assert found.pop("priority") in ("DONE", "EPERM")
        walls = dict.fromkeys(found, Wall.of("no capability over the net namespace", "EPERM EACCES ENOENT EROFS"))
        assert broken(found, walls) == []
        assert len(found) == 12

    in_rig(node_name, scenario)
