"""How much a job may send, and how many requests it may have under way: 413 and 429 with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from broker.egress.errors import CrowdedError, TooLargeError
from broker.egress.gate import Gate
from broker.egress.rules import Destination
from runner.cli.egress import program
from runner.errors import UsageError
from tests.net.keyed import Keyed, Parts, in_keyed_door, parts
from tests.net.support import Egressed, in_door, served, web
from tests.support.wait import await_until

HOST = Destination("a.example.com", 443)


@pytest.fixture(scope="module")
def shared() -> Iterator[Parts]:
    """A broker, a server and an egress process."""
    with parts() as found:
        yield found


def test_a_gate_counts_what_is_under_way() -> None:
    """As many as it allows, again after one has ended, also by an error; a rule's bound is for its host alone."""
    gate = Gate(2, 10)
    with gate.passed():
        with gate.passed(), pytest.raises(CrowdedError), gate.passed():
            pass
        with pytest.raises(ValueError, match="x"), gate.passed():
            raise ValueError("x")
        with gate.passed():
            pass
    with gate.at(HOST), gate.at(HOST), gate.at(Destination("b.example.com", 443)):
        gate.bounded(HOST, None)
        gate.bounded(HOST, 2)
        with pytest.raises(CrowdedError, match=r"a\.example\.com"):
            gate.bounded(HOST, 1)
    gate.bounded(HOST, 0)
    gate.sized(10)
    gate.sized(10, 99)
    for size, most in ((11, None), (11, 99), (6, 5)):
        with pytest.raises(TooLargeError):
            gate.sized(size, most)


def test_a_body_that_is_too_large_is_told_so() -> None:
    """By its length before anything is sent; in chunks as soon as it is; a part is never taken for the whole."""
    with served(lambda _: b"") as server:

        async def scenario(e: Egressed) -> None:
            head = f"POST http://127.0.0.1:{server.port}/ HTTP/1.1\r\nHost: x\r\n".encode()
            answer = await e.client.ask(head + b"Content-Length: 1001\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"1000 bytes" in answer
            assert not server.seen
            chunks = b"Transfer-Encoding: chunked\r\n\r\n" + b"1f4\r\n%b\r\n" % (b"x" * 500) * 3
            answer = await e.client.ask(head + chunks)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert not any(one.endswith(b"0\r\n\r\n") for one in server.seen)

        local = [("127.0.0.1", server.port)]
        in_door(scenario, net=local, named=[f"127.0.0.1:{server.port}"], options=["--body-bytes", "1000"])


def test_attack_42_a_job_has_so_many_requests_under_way() -> None:
    """The third of two is answered at once; when one has ended, the next one goes."""
    with served(lambda _: b"") as silent, web() as port:

        async def scenario(e: Egressed) -> None:
            ends = [e.client.dial() for _ in range(2)]
            for end in ends:
                await e.client.send(end, f"GET http://127.0.0.1:{silent.port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await await_until(lambda: len([one for one in silent.seen if one]) == 2, "two requests")
            ask = f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            answer = await e.client.ask(ask)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"2 requests under way" in answer
            ends[0].close()  # its host says nothing still: the client's end alone ends the request
            answers = [b""]
            async with asyncio.timeout(10):
                while not answers[-1].startswith(b"HTTP/1.1 200 "):
                    answers.append(await e.client.ask(ask))

        local = [("127.0.0.1", silent.port), ("127.0.0.1", port)]
        named = [f"{host}:{number}" for host, number in local]
        in_door(scenario, net=local, named=named, options=["--requests", "2"])


def test_a_rule_bounds_its_secret_s_host(shared: Parts) -> None:
    """body_bytes and at_once of the vault's rule: 413 and 429, and what is within them goes on."""

    async def scenario(k: Keyed) -> None:
        assert (await k.get("/repeat", method="POST", body=b"x" * 1000))[0] == 200
        count = len(k.parts.web.asked)
        assert (await k.get("/repeat", method="POST", body=b"x" * 1001))[0] == 413
        head = f"POST http://{k.host}/repeat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        answer = await k.client.ask(head + b"1f4\r\n%b\r\n" % (b"x" * 500) * 3)
        assert answer.startswith(b"HTTP/1.1 413 ")
        streams = [await k.stream() for _ in range(2)]
        status, _, body = await k.get("/echo")
        assert (status, b"2 requests" in body) == (429, True)
        assert [asked.path for asked in k.parts.web.asked[count:] if asked.path == "/echo"] == []
        for end, tick in streams:
            end.close()
            tick.release(1000)

    in_keyed_door(shared, scenario, "FEW")


def test_the_command_s_own_bounds() -> None:
    """`--max-body` takes a size, and what it takes reaches the process."""
    from runner.cli.egress import _caps

    assert _caps(None, None) == ()
    assert _caps(4, "1M") == ("--requests", "4", "--body-bytes", str(1 << 20))
    assert program((3, 4), caps=_caps(4, None)).words[-2:] == ("--requests", "4")
    with pytest.raises(UsageError):
        _caps(None, "much")
