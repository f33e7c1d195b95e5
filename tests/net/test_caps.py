"""One job can't use up what all share (attack 42)."""

from __future__ import annotations

import asyncio
import os
import socket

from broker.egress.door import Caps
from runner.wire.grants import NetGrant
from tests.net.support import Client, Egressed, in_door, served
from tests.support.wait import await_until

CAPS = Caps()


def test_attack_42_a_job_has_64_connections_and_no_more() -> None:
    """150 connections of a job: 64 are served, and one that ends lets the next in."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            before = e.process.held()
            ends = [e.client.dial() for _ in range(150)]
            text = f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            for end in ends:
                await e.client.send(end, text)
            await await_until(lambda: len(server.ends) >= CAPS.connections, "64 tunnels")
            # Another job's door is served at once while this one is full.
            other = await second_door(e, server.port)
            tunnel, head = await other.connect(f"127.0.0.1:{server.port}")
            assert b" 200 " in head
            tunnel.close()
            await await_until(lambda: len(server.ends) >= CAPS.connections + 1, "the tunnel's far end")
            assert len(server.ends) == CAPS.connections + 1
            assert e.process.held() - before <= 2 * (CAPS.connections + 1) + 8
            for end in ends[:10]:
                end.close()
            await await_until(lambda: len(server.ends) >= CAPS.connections + 11, "the next ten")
            assert len(server.ends) == CAPS.connections + 11

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])


def test_attack_42_silent_clients_keep_nobody_out_for_long() -> None:
    """Eight connections that say nothing are ended when the time for a head is over; then the next one is served."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            silent = [e.client.dial() for _ in range(CAPS.pending)]
            slow = e.client.dial()
            await e.client.send(silent[0], b"G")  # one byte of a head is no head
            await e.client.send(slow, f"CONNECT 127.0.0.1:{server.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            loop = asyncio.get_running_loop()
            start = loop.time()
            assert b" 200 " in await e.client.read(slow, b"\r\n\r\n")
            assert 0.5 < loop.time() - start < 10

        local, words = [("127.0.0.1", server.port)], ["--head-s", "1"]
        in_door(scenario, net=local, named=[f"127.0.0.1:{server.port}"], options=words)


def test_attack_42_a_silent_tunnel_is_ended() -> None:
    """A tunnel without a byte for the idle limit is closed on both sides; one that moves is not."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            quiet, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            busy, _ = await e.client.connect(f"127.0.0.1:{server.port}")
            loop = asyncio.get_running_loop()
            ended = asyncio.ensure_future(e.client.read(quiet))
            start = loop.time()
            while not ended.done():
                await e.client.send(busy, b"x")
                assert await e.client.exactly(busy, 1) == b"x"
                await asyncio.wait([ended], timeout=0.2)
                assert loop.time() - start < 15
            assert loop.time() - start >= 1.5
            await e.client.send(busy, b"y")
            assert await e.client.exactly(busy, 1) == b"y"

        options = ("--idle-s", "2")
        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"], options=options)


def test_attack_42_the_job_with_most_connections_gives_one_up() -> None:
    """If all jobs together reach the limit, the one with most connections loses its most silent one."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            tunnels = [(await e.client.connect(f"127.0.0.1:{server.port}"))[0] for _ in range(3)]
            for end in tunnels[1:]:
                await e.client.send(end, b"x")
                assert await e.client.exactly(end, 1) == b"x"
            other = await second_door(e, server.port)
            _, head = await other.connect(f"127.0.0.1:{server.port}")
            assert b" 200 " in head
            assert await e.client.read(tunnels[0]) == b""
            for end in tunnels[1:]:
                await e.client.send(end, b"y")
                assert await e.client.exactly(end, 1) == b"y"

        options = ("--most", "3")
        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"], options=options)


def test_attack_42_who_opens_and_closes_without_end_is_slowed_down() -> None:
    """A client that connects and leaves as fast as it can gets about a hundred connections a second."""
    with served() as server:

        async def scenario(e: Egressed) -> None:
            loop = asyncio.get_running_loop()
            start = loop.time()
            for _ in range(328):
                await e.client.ask(b"\x05\x01\x02")
            assert loop.time() - start > 1.5

        in_door(scenario, net=[("127.0.0.1", server.port)], named=[f"127.0.0.1:{server.port}"])


async def second_door(e: Egressed, port: int) -> Client:
    """Open another job's door on the same line; it is closed with the line."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = Client(listener.getsockname()[1], e.client.ends)
    rules = await e.egress.check([NetGrant("127.0.0.1", port)], [f"127.0.0.1:{port}"])
    await e.egress.open("main-other.1", rules, listener.detach(), os.pidfd_open(e.mould.pid))
    return client
