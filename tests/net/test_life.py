"""A door lives as long as its attempt: not longer, and not shorter than the egress process's restart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from redis.asyncio import Redis

from broker.egress.rules import Destination, Rules
from node_agent.egress import Egress, Metered
from node_agent.errors import EgressAwayError, EgressMissingError, EgressRefusedError
from node_agent.storecheck import store_addresses
from runner.wire.grants import NetGrant
from tests.net.support import Egressed, in_door, own_descriptors, served
from tests.support import scratch
from tests.support.wait import await_until

ATTEMPTS = 200


def test_a_closed_door_takes_its_connections_with_it() -> None:
    """At the agent's word listener and tunnels are closed at once, on both sides, and nothing stays open."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            tunnel, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            await e.client.send(tunnel, b"x")
            assert await e.client.exactly(tunnel, 1) == b"x"
            e.door.close()
            assert await e.client.read(tunnel) == b""
            await e.egress.settled()
            with socket.socket() as end:
                assert end.connect_ex(("127.0.0.1", e.client.port)) != 0
            e.door.close()

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])


def test_the_mould_s_end_closes_the_door() -> None:
    """Without any word of the agent: a mould that is gone is enough. What was used is told when the agent asks."""
    with served(lambda _: b"") as server:

        async def scenario(e: Egressed) -> None:
            used: list[dict[str, int]] = []
            metered: list[Metered] = []
            e.egress._on_used = lambda _, counts: used.append(counts)
            e.egress.on_metered = metered.append
            asked = e.client.dial()
            head = f"POST http://127.0.0.1:{server.port}/v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            await e.client.send(asked, head.encode() + b"a question"[:9])
            await await_until(lambda: any(b"a questio" in one for one in server.seen), "the question")
            tunnel, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            e.mould.kill()
            assert await e.client.read(tunnel) == b""
            # The agent holds a copy of the listener until it gives its word; nobody accepts on it.
            late = e.client.dial()
            await e.client.send(late, b"GET http://x/ HTTP/1.1\r\n\r\n")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await e.client.read(late)
            e.door.close()
            await e.gone()
            await e.egress.settled()
            assert [(one["requests"], one["unknown"]) for one in used] == [(2, 1)]
            assert (sum(one.requests for one in metered), sum(one.unknown_sent_bytes for one in metered)) == (2, 9)

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])


def test_the_agent_s_end_closes_its_doors() -> None:
    """A line that breaks takes its doors with it, another agent's doors stay."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            other = Egress(e.process.path, (), e.denied.append)
            listener = socket.create_server(("127.0.0.1", 0))
            there = listener.getsockname()[1]
            rules = await other.check([NetGrant("127.0.0.1", server.port)], [f"127.0.0.1:{server.port}"])
            await other.open("main-other.1", rules, listener.detach(), os.pidfd_open(e.mould.pid))
            mine, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            before, e.client.port = e.client.port, there
            theirs, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            e.client.port = before
            await other.stop()
            assert await e.client.read(theirs) == b""
            await e.client.send(mine, b"x")
            assert await e.client.exactly(mine, 1) == b"x"

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])


def test_nothing_is_left_after_200_attempts() -> None:
    """200 doors, each with a tunnel, a denial and a silent client, ended in four ways: no descriptor stays."""
    with served() as server:

        async def scenario(e: Egressed) -> tuple[int, int]:
            async def attempt(number: int) -> None:
                read, write = os.pipe()
                listener = socket.create_server(("127.0.0.1", 0))
                e.client.port = listener.getsockname()[1]
                mould = await asyncio.create_subprocess_exec("cat", stdin=read, stdout=asyncio.subprocess.DEVNULL)
                os.close(read)
                rules = await e.egress.check([NetGrant("127.0.0.1", server.port)], [f"127.0.0.1:{server.port}"])
                pidfd = os.pidfd_open(mould.pid)
                door = await e.egress.open(f"main-job{number}.1", rules, listener.detach(), pidfd)
                tunnel, head = await e.client.connect(f"127.0.0.1:{server.port}")
                assert b" 200 " in head
                silent = e.client.dial()
                assert b" 403 " in (await e.client.connect("evil.example:80"))[1]
                if number % 4 == 0:
                    tunnel.close()
                if number % 4 == 1:
                    os.close(write)
                    await mould.wait()
                door.close()
                if number % 4 != 1:
                    os.close(write)
                    await mould.wait()
                for end in (tunnel, silent):
                    end.close()

            # Lazily made things first.
            await attempt(0)
            await e.egress.settled()
            before = e.process.held()
            own = own_descriptors()
            for number in range(1, ATTEMPTS + 1):
                await attempt(number)
                for end in e.client.ends:
                    end.close()
                e.client.ends.clear()
            await e.egress.settled()
            await await_until(lambda: e.process.held() <= before, "the egress process to give all back")
            return e.process.held() - before, own_descriptors() - own

        left, mine = in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])
        assert left <= 0
        assert mine <= 4  # the echo server's ends that are about to be closed


def test_a_restarted_egress_process_gets_its_doors_again() -> None:
    """SIGKILL ends every connection; after the restart the same job's door serves again, with the same rules."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            tunnel, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            e.process.stop(signal.SIGKILL)
            assert await e.client.read(tunnel) == b""
            e.process.start()
            again, head = await e.client.connect(f"127.0.0.1:{server.port}")
            assert b" 200 " in head
            await e.client.send(again, b"x")
            assert await e.client.exactly(again, 1) == b"x"
            assert b" 403 " in (await e.client.connect("evil.example:80"))[1]

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])


def test_a_door_that_closes_while_the_egress_process_is_away_stays_closed() -> None:
    """An attempt that ends between crash and restart gets no door back."""

    async def scenario(e: Egressed) -> None:
        e.process.stop(signal.SIGKILL)
        e.door.close()
        await e.gone()
        e.process.start()
        await e.egress.check([NetGrant("example.com", 80)], [])
        await e.gone()

    in_door(scenario, net=[("example.com", 80)])


def test_an_egress_process_that_does_not_answer_is_told_in_time() -> None:
    """Stopped or dead: two seconds, then an error that says what to do; a restart within them is waited for."""

    async def scenario(e: Egressed) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(e.process.pid, number)
            start = loop.time()
            with pytest.raises(EgressAwayError, match="ringfence egress"):
                await e.egress.check([NetGrant("example.com", 80)], [])
            assert loop.time() - start < 5
            if number == signal.SIGSTOP:
                os.kill(e.process.pid, signal.SIGCONT)
                await e.egress.check([NetGrant("example.com", 80)], [])
        e.process.stop()
        waiting = asyncio.ensure_future(e.egress.check([NetGrant("example.com", 80)], []))
        await asyncio.sleep(0)
        e.process.start()
        assert (await waiting).granted

    in_door(scenario, net=[("example.com", 80)])


def test_without_an_egress_process_there_is_an_exact_next_step() -> None:
    """A home that none ever served: told at once."""

    async def main(home: Path) -> None:
        line = Egress(home / "none", (), lambda _: None)
        with pytest.raises(EgressMissingError, match="start it: `ringfence egress`"):
            await line.check([NetGrant("example.com", 80)], [])
        await line.stop()

    with scratch.folder() as home:
        asyncio.run(main(home))


def test_attack_12_the_store_is_refused_under_every_name() -> None:
    """Whatever policy spells out: the store's port is not reached by name, by address, nor by other forms of either."""
    with served() as server:
        port = server.port
        own = socket.gethostbyname(socket.gethostname())
        hosts = ("127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "127.0.0.2", own)  # noqa: S104 - asked for, not bound

        async def scenario(e: Egressed) -> None:
            for store in ("127.0.0.1", "localhost", own):
                line = Egress(e.process.path, [(store, port)], e.denied.append)
                for host in hosts:
                    with pytest.raises(EgressRefusedError, match="Ringfence itself is served there"):
                        await line.check([NetGrant(host, port)], [f"{host}:{port}", "*"])
                # The same host at another port is another matter.
                await line.check([NetGrant("127.0.0.1", port + 1)], [f"127.0.0.1:{port + 1}"])
                await line.stop()
            # And a door that was opened all the same does not lead there.
            listener = socket.create_server(("127.0.0.1", 0))
            e.client.port = listener.getsockname()[1]
            granted = frozenset(Destination(host.strip("[]"), port) for host in ("127.0.0.1", "localhost"))
            rules = Rules(granted, granted, frozenset({Destination("127.0.0.1", port)}))
            await e.egress.open("main-other.1", rules, listener.detach(), os.pidfd_open(e.mould.pid))
            for host in ("127.0.0.1", "localhost"):
                assert b" 403 " in (await e.client.connect(f"{host}:{port}"))[1]

        in_door(scenario, net=[("example.com", 80)])
        assert server.seen == []


def test_attack_12_the_agent_knows_where_its_store_is() -> None:
    """Host and port of a store over TCP are passed on; a store on a Unix socket has none."""
    for url, expected in (
        ("redis://db.internal:6380/0", [("db.internal", 6380)]),
        ("rediss://:x@10.0.0.5", [("10.0.0.5", 6379)]),
        ("unix:///run/x.sock", []),
    ):
        assert store_addresses(Redis.from_url(url)) == expected


def test_doors_survive_two_crashes_in_a_row() -> None:
    """Five doors, five times two crashes a moment apart: all of them serve again, and new ones open meanwhile."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            grant, named = [NetGrant("127.0.0.1", server.port)], [f"127.0.0.1:{server.port}"]
            rules = await e.egress.check(grant, named)
            ports = [e.client.port]

            async def opened(attempt: str) -> None:
                listener = socket.create_server(("127.0.0.1", 0))
                ports.append(listener.getsockname()[1])
                await e.egress.open(attempt, rules, listener.detach(), os.pidfd_open(e.mould.pid))

            async def passed(port: int) -> None:
                e.client.port = port
                assert b" 200 " in (await e.client.connect(named[0]))[1]

            for number in range(4):
                await opened(f"main-job{number}.2")
            for crash in range(5):
                e.process.stop(signal.SIGKILL)
                e.process.start()
                # The first door serves again, the others may be asked for just now.
                await passed(ports[0])
                e.process.stop(signal.SIGKILL)
                e.process.start()
                late = asyncio.gather(e.egress.check(grant, named), opened(f"main-late{crash}.1"))
                for port in ports[:5]:
                    await passed(port)
                await late
                await passed(ports[-1])
            told = e.process.log.read_text()
            assert "not understood" not in told
            assert "not opened" not in told

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])


def test_a_broken_agent_harms_nobody_else() -> None:
    """Records that are no orders end their own line alone; what came with them is closed."""
    good = {"granted": [["a.example", 80]], "named": [], "never": []}
    broken: list[tuple[dict[str, object], int]] = [
        ({"op": "no such"}, 0),
        ({"op": "open", "id": 1, "attempt": "a.1", **good}, 0),
        ({"op": "open", "id": 1, "attempt": "a.1", **good}, 1),
        ({"op": "open", "id": 1, "attempt": "a.1", **good}, 2),
        ({"op": "open", "id": 1, "attempt": "a.1", **good, "never": "x"}, 2),
        ({"op": "check", "id": 1, **good, "granted": [["a b", 80]]}, 0),
        ({"op": "check", "id": 1}, 2),
    ]
    with served() as server:

        async def scenario(e: Egressed) -> None:
            before = e.process.held()
            tunnel, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            loop = asyncio.get_running_loop()
            for record, count in [*broken, ({}, 2)]:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
                    end.connect(str(e.process.path))
                    end.setblocking(False)
                    data = json.dumps(record).encode() if record else b"\xff\xff"
                    # A Unix socket is no listener that a mould made.
                    socket.send_fds(end, [data], [end.fileno()] * count)
                    assert await asyncio.wait_for(loop.sock_recv(end, 100), 10) == b"", record
            await e.client.send(tunnel, b"x")
            assert await e.client.exactly(tunnel, 1) == b"x"
            tunnel.close()
            await await_until(lambda: e.process.held() <= before, "all to be given back")

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])
