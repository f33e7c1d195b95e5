"""The proxy speaks HTTP, CONNECT and SOCKS5 as ordinary programs do, and says no in one line."""

from __future__ import annotations

import os
import socket

from broker.egress.http import MAX_HEAD_BYTES
from tests.net.support import Egressed, in_door, served, web


def local(port: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the grant of a loopback port, and the policy that names it."""
    return [("127.0.0.1", port)], [f"127.0.0.1:{port}"]


def test_plain_requests_follow_each_other_on_one_connection() -> None:
    """Two requests on one connection: path and body arrive, headers for the proxy alone don't."""
    with web() as port:

        async def scenario(e: Egressed) -> None:
            end = e.client.dial()
            head = f"GET http://127.0.0.1:{port}/a?b=c HTTP/1.1\r\nHost: other.example\r\nX-Mine: 1\r\n"
            head += "Proxy-Authorization: Basic eA==\r\nConnection: x-hop\r\nX-Hop: 1\r\n\r\n"
            await e.client.send(end, head.encode())
            seen = await e.client.read(end, b"\n\n")
            assert seen.startswith(b"HTTP/1.1 200 OK\r\n"), seen
            assert b"/a?b=c\n" in seen
            assert f"host: 127.0.0.1:{port}\n".encode() in seen
            assert b"x-mine: 1" in seen.lower()
            assert b"x-hop" not in seen.lower()
            assert b"authorization" not in seen.lower()
            body = b"x" * 5000
            head = f"POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: q\r\nContent-Length: 5000\r\n\r\n"
            await e.client.send(end, head.encode() + body)
            seen = await e.client.read(end, b"\r\n0\r\n\r\n")
            assert seen.startswith(b"HTTP/1.1 200 OK\r\n")
            assert seen.count(b"x") >= 5000

        net, named = local(port)
        in_door(scenario, net=net, named=named)


def test_a_chunked_body_and_a_client_that_closes() -> None:
    """A body in chunks arrives whole; a client of HTTP/1.0 gets its answer up to the end of the connection."""
    with web() as port:

        async def scenario(e: Egressed) -> None:
            head = f"POST http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: q\r\nTransfer-Encoding: chunked\r\n\r\n"
            seen = await e.client.ask(head.encode() + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n", b"\r\n0\r\n\r\n")
            assert b"abcdefg" in seen
            seen = await e.client.ask(f"GET http://127.0.0.1:{port}/old HTTP/1.0\r\n\r\n".encode())
            assert b"/old" in seen

        net, named = local(port)
        in_door(scenario, net=net, named=named)


def test_a_tunnel_carries_both_ways_and_half_closes() -> None:
    """16 MiB go through a tunnel and come back unchanged; the end of the client's side reaches the server."""
    size = 16 << 20
    block = os.urandom(1 << 16)
    with served() as server:

        async def scenario(e: Egressed) -> int:
            end, head = await e.client.connect(f"127.0.0.1:{server.port}")
            assert head.startswith(b"HTTP/1.1 200 ")
            got = 0
            for _ in range(size // len(block)):
                await e.client.send(end, block)
                assert await e.client.exactly(end, len(block)) == block
                got += len(block)
            end.shutdown(socket.SHUT_WR)
            assert await e.client.read(end) == b""
            return got

        net, named = local(server.port)
        assert in_door(scenario, net=net, named=named) == size
        assert len(server.seen[0]) == size


def test_a_server_that_does_not_read_stops_the_client() -> None:
    """What nobody takes is not kept in the egress process: the client's writes come to a halt."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        deaf.listen()
        port = deaf.getsockname()[1]

        async def scenario(e: Egressed) -> int:
            end, head = await e.client.connect(f"127.0.0.1:{port}")
            assert head.startswith(b"HTTP/1.1 200 ")
            sent = 0
            try:
                while sent < 256 << 20:
                    await e.client.send(end, b"\0" * (1 << 20), within_s=3)
                    sent += 1 << 20
            except TimeoutError:
                pass
            return sent

        net, named = local(port)
        assert in_door(scenario, net=net, named=named) < 64 << 20


def test_socks5_by_name_and_by_address() -> None:
    """SOCKS5 with an address and with a name; BIND, passwords and what is not granted get their codes."""
    with served() as server:
        number = server.port.to_bytes(2, "big")

        async def scenario(e: Egressed) -> None:
            for asked in (b"\x01\x7f\x00\x00\x01", b"\x03\x09LOCALHOST"):
                end = e.client.dial()
                await e.client.send(end, b"\x05\x02\x02\x00")
                assert await e.client.read(end, b"\x05\x00") == b"\x05\x00"
                await e.client.send(end, b"\x05\x01\x00" + asked + number)
                assert (await e.client.read(end, b"\x05\x00\x00\x01" + bytes(6)))[:2] == b"\x05\x00"
                await e.client.send(end, b"ping")
                assert await e.client.read(end, b"ping") == b"ping"
            head = b"\x05\x01\x00"
            assert await e.client.ask(b"\x05\x01\x02") == b"\x05\xff"
            assert await e.client.ask(head + b"\x05\x01\x00\x03\x07evil.io\x01\xbb") == b"\x05\x00\x05\x02" + _tail()
            assert (
                await e.client.ask(head + b"\x05\x02\x00\x01\x7f\x00\x00\x01" + number) == b"\x05\x00\x05\x07" + _tail()
            )
            assert (
                await e.client.ask(head + b"\x05\x03\x00\x01\x7f\x00\x00\x01" + number) == b"\x05\x00\x05\x07" + _tail()
            )

        net, named = [("127.0.0.1", server.port), ("localhost", server.port)], []
        named = [f"127.0.0.1:{server.port}", f"localhost:{server.port}"]
        in_door(scenario, net=net, named=named)


def _tail() -> bytes:
    return b"\x00\x01" + bytes(6)


def test_refusals_are_one_line_and_told_once() -> None:
    """What is not granted is answered with 403 and a reason; the node hears of eight destinations, once each."""
    with web() as port:

        async def scenario(e: Egressed) -> list[tuple[str, int]]:
            for _ in range(2):
                seen = await e.client.ask(b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n")
                head, _, body = seen.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 403 ")
                assert body == b"ringfence: evil.example:80 is not granted to this job\n"
            # The granted host at another port, and the granted port at another host.
            for other in (f"127.0.0.1:{port + 1}", f"127.0.0.2:{port}", f"localhost:{port}", f"[::1]:{port}"):
                assert b" 403 " in (await e.client.connect(other))[1], other
            for number in range(10):
                assert b" 403 " in (await e.client.connect(f"host-{number}.example:443"))[1]
            return [(each.host, each.port) for each in e.denied]

        net, named = local(port)
        told = in_door(scenario, net=net, named=named)
        assert told[0] == ("evil.example", 80)
        assert len(told) == len(set(told)) == 8


def test_what_is_no_request_is_refused() -> None:
    """Origin form, users in addresses, https without CONNECT, two framings, huge heads: 4xx, and nothing goes out."""
    with served() as server:
        there = f"http://127.0.0.1:{server.port}/"
        bad = [
            "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            f"GET http://user@127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: x\r\n\r\n",
            f"GET https://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: x\r\n\r\n",
            f"POST {there} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
            f"GET {there} HTTP/1.1\r\nHost: x\r\nA: b\r\n" + "X: y\r\n" * (MAX_HEAD_BYTES // 4),
            f"GET {there}\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            f"GET {there} HTTP/1.1\r\nHost : x\r\n\r\n",
            "CONNECT 127.0.0.1 HTTP/1.1\r\nHost: x\r\n\r\n",
            f"CONNECT http://127.0.0.1:{server.port} HTTP/1.1\r\nHost: x\r\n\r\n",
            "CONNECT 0x7f.1:80 HTTP/1.1\r\nHost: x\r\n\r\n",
            "CONNECT 2130706433:80 HTTP/1.1\r\nHost: x\r\n\r\n",
            "\x16\x03\x01\x00\x05hello\r\n\r\n",
        ]

        async def scenario(e: Egressed) -> None:
            for text in bad:
                seen = await e.client.ask(text.encode("latin-1"))
                assert seen.startswith(b"HTTP/1.1 4"), (text[:80], seen)

        net, named = local(server.port)
        in_door(scenario, net=net, named=named)
        assert server.seen == []


def test_a_smuggled_second_request_stays_with_its_own_check() -> None:
    """Bytes behind a whole request are a next request: checked on its own, never sent to the first one's server."""
    with served(lambda data: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") as server:

        async def scenario(e: Egressed) -> bytes:
            first = f"GET http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: x\r\n\r\n"
            second = "GET http://evil.example/secret HTTP/1.1\r\nHost: evil.example\r\n\r\n"
            return await e.client.ask((first + second).encode())

        net, named = local(server.port)
        seen = in_door(scenario, net=net, named=named)
        assert seen.startswith(b"HTTP/1.1 200 OK")
        assert b"HTTP/1.1 403 " in seen
        assert b"secret" not in b"".join(server.seen)


def test_a_destination_that_is_away_is_told_apart() -> None:
    """A granted destination where nobody listens is a 502, and no denial."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def scenario(e: Egressed) -> None:
        _, head = await e.client.connect(f"127.0.0.1:{port}")
        assert head.startswith(b"HTTP/1.1 502 "), head
        assert e.denied == []

    net, named = local(port)
    in_door(scenario, net=net, named=named)


def test_a_server_that_breaks_off_is_told_apart() -> None:
    """An upstream that answers with garbage, or ends in the middle, never looks like a whole answer."""
    answers = {
        b"garbage": b"this is no HTTP\r\n\r\n",
        b"short": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"both": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    }

    def answer(data: bytes) -> bytes:
        return next(text for word, text in answers.items() if word in data)

    with served(answer) as server:

        async def scenario(e: Egressed) -> None:
            for word in answers:
                end = e.client.dial()
                text = f"GET http://127.0.0.1:{server.port}/{word.decode()} HTTP/1.1\r\nHost: x\r\n\r\n"
                await e.client.send(end, text.encode())
                if word == b"short":
                    await e.client.read(end, b"short")
                    server.ends[-1].shutdown(socket.SHUT_RDWR)
                seen = await e.client.read(end)
                if word == b"short":
                    assert seen == b""
                else:
                    assert seen.startswith(b"HTTP/1.1 502 "), (word, seen)

        net, named = local(server.port)
        in_door(scenario, net=net, named=named)
