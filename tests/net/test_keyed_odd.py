"""Requests and answers that no honest program makes, through the door of a proxied secret: nothing gives it away."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from broker.egress.certs import Authority
from broker.egress.tls import server_context
from tests.net.keyed import VALUE, Keyed, Parts, in_keyed_door, parts
from tests.support.wait import await_until

K = VALUE.encode()
AT_ONCE = "at once/"
#: What the host answers to ``GET /N``; VALUE in it is the value that came with the request.
ANSWERS: dict[str, bytes] = {
    "switches": b"HTTP/1.1 101 Now\r\nUpgrade: x\r\nConnection: upgrade\r\nX: %b\r\n\r\n%b" % (K, K),
    "early": b"HTTP/1.1 103 Early\r\nLink: %b\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" % K,
    "reason": b"HTTP/1.1 200 %b\r\nContent-Length: 0\r\n\r\n" % K,
    "folded": b"HTTP/1.1 200 OK\r\nX: a\r\n %b\r\nContent-Length: 0\r\n\r\n" % K,
    "trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: %b\r\n\r\n" % K,
    "extension": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=%b\r\na\r\n0\r\n\r\n" % K,
    "two": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nX: %b\r\nContent-Length: 0\r\n\r\n" % K,
    "both lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(K), K),
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 60\r\n\r\n%b" % K,
    "old": b"HTTP/1.0 200 OK\r\n\r\n<%b>" % K,
    "no body": b"HTTP/1.1 204 No\r\n\r\n%b" % K,
    "not changed": b"HTTP/1.1 304 No\r\nContent-Length: 9\r\nETag: %b\r\n\r\n%b" % (K, K),
    "packed twice": b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Encoding: br\r\n\r\n" + K,
    "packed in a list": b"HTTP/1.1 200 OK\r\nContent-Encoding: identity, x\r\nContent-Length: 60\r\n\r\n" + K,
    "packed on the way": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(K), K),
    "sixteen bits": b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (2 * len(K), VALUE.encode("utf-16-le")),
    "no HTTP": b"%b\r\n\r\n%b" % (K, K),
    "no line ends": b"HTTP/1.1 200 OK\nX: %b\n\n%b" % (K, K),
    "plain": b"HTTP/1.1 200 OK\r\nX: %b\r\nContent-Length: %d\r\n\r\n<%b>" % (K, len(K) + 2, K),
    "unending": b"HTTP/1.1 200 OK\r\nX: " + K * 2000,
}


class OddWeb:
    """A TLS server that says what ANSWERS says, in pieces of five bytes, and keeps what it was sent, as it came.

    Below ``/at_once/`` in one piece, and then it waits for the next request.
    """

    def __init__(self, folder: Path) -> None:
        authority = Authority(os.urandom(32), int(time.time()))
        self.ca = folder / "odd-ca.pem"
        self.ca.write_text(authority.pem)
        self.heard: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._context = server_context(authority, "127.0.0.1")
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        """End it."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(end,), daemon=True).start()

    def _talk(self, raw: socket.socket) -> None:
        raw.settimeout(10)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError), self._context.wrap_socket(raw, server_side=True) as end:
            number = len(self.heard)
            self.heard.append(b"")
            at_once = True
            while at_once:
                asked = b""
                while not _whole(asked):
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    asked += data
                    self.heard[number] += data
                path = asked.split(b" ", 2)[1].decode().lstrip("/").replace("_", " ")
                at_once = path.startswith(AT_ONCE)
                answer = ANSWERS.get(path.removeprefix(AT_ONCE), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                size = len(answer) if at_once else 5 if len(answer) < 2000 else 1 << 14
                for at in range(0, len(answer), size):
                    end.sendall(answer[at : at + size])


def _whole(heard: bytes) -> bool:
    """Return whether a request has come to its end, as its framing says."""
    head, end, body = heard.partition(b"\r\n\r\n")
    return bool(end) and (b"chunked" not in head or body.endswith(b"0\r\n\r\n"))


@contextmanager
def odd_web(folder: Path) -> Iterator[OddWeb]:
    """Yield a running one."""
    web = OddWeb(folder)
    try:
        yield web
    finally:
        web.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Parts]:
    """A broker, an odd server and an egress process."""
    with parts(host=odd_web) as found:  # type: ignore[arg-type]  # it has of a TlsWeb what a door's tests use
        yield found


def heard(k: Keyed) -> list[bytes]:
    """Return what the host was sent so far, connection by connection."""
    return k.parts.web.heard  # type: ignore[attr-defined,no-any-return]  # it is an OddWeb


def test_no_odd_answer_gives_the_value_away(shared: Parts) -> None:
    """Whatever form of HTTP, or none, in pieces or at once: the job gets none of the value's known forms."""

    async def scenario(k: Keyed) -> None:
        # An answer that only the end of its connection ends would wait here for ever.
        ended = [name for name in ANSWERS if name not in ("old", "no line ends", "unending")]
        for name in (*ANSWERS, *(AT_ONCE + name for name in ended)):
            path = name.replace(" ", "_")
            before = len(heard(k))
            got = await k.client.ask(
                f"GET http://{k.host}/{path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            )
            assert K in heard(k)[before], "the host never had it"
            for form in (K, K[::-1], K.hex().encode(), VALUE.encode("utf-16-le")):
                assert form not in got, name
            assert got.count(b"HTTP/1.1 ") <= 2, name

    in_keyed_door(shared, scenario)


def test_an_answer_at_once_is_the_same_as_in_pieces(shared: Parts) -> None:
    """Covered alike, counted alike; two requests that came together are answered in turn, on one connection there."""

    async def scenario(k: Keyed) -> None:
        asked = [f"GET http://{k.host}/{path} HTTP/1.1\r\nHost: x\r\n\r\n" for path in ("plain", "at_once/plain")]
        pieces, whole = [await k.client.ask(text.encode(), b">") for text in asked]
        assert pieces == whole
        assert whole.startswith(b"HTTP/1.1 200 OK\r\nx: [secret:KEY]*")
        assert whole.endswith(b"*>")
        before = len(heard(k))
        end = k.client.dial()
        last = asked[1].replace("HTTP/1.1\r\n", "HTTP/1.1\r\nConnection: close\r\n")
        await k.client.send(end, (asked[1] * 2 + last).encode())
        assert (await k.client.read(end)).count(b"HTTP/1.1 200 OK") == 3
        assert [one.count(b"GET ") for one in heard(k)[before:]] == [3]
        assert len(k.told("secret.released")) == 5
        await await_until(
            lambda: [line["hits"] for line in k.told("secret.masked")] == [2] * 5, "the covers to be told"
        )

    in_keyed_door(shared, scenario)


#: What a job sends, and whether the host hears of it at all. HOST is the secret's host and port.
REQUESTS: dict[str, tuple[bytes, bool]] = {
    "length and chunks": (
        b"POST http://HOST/ HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nEND\r\n0\r\n\r\n",
        True,
    ),
    "two lengths": (
        b"POST http://HOST/ HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nENDx",
        False,
    ),
    "two codings": (
        b"POST http://HOST/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
        False,
    ),
    "an odd coding": (b"POST http://HOST/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", False),
    "a signed length": (b"POST http://HOST/ HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nEND", False),
    "a folded header": (b"GET http://HOST/ HTTP/1.1\r\nHost: x\r\nX: a\r\n Authorization: mine\r\n\r\n", True),
    "a blank before the colon": (b"GET http://HOST/ HTTP/1.1\r\nHost: x\r\nAuthorization : mine\r\n\r\n", False),
    "a lone line end": (b"GET http://HOST/ HTTP/1.1\r\nHost: x\r\nX: a\rAuthorization: mine\r\n\r\n", False),
    "an upgrade": (b"GET http://HOST/ HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", True),
    "a part": (b"GET http://HOST/ HTTP/1.1\r\nHost: x\r\nRange: bytes=0-3\r\nIf_Range: x\r\n\r\n", True),
    "another host inside": (b"GET http://HOST/http://other.example/ HTTP/1.1\r\nHost: other.example\r\n\r\n", True),
    "a user in the address": (b"GET http://HOST@other.example/ HTTP/1.1\r\nHost: x\r\n\r\n", False),
    "a host with a tail": (b"GET http://HOST.other.example/ HTTP/1.1\r\nHost: x\r\n\r\n", False),
    "a trailer": (
        b"POST http://HOST/ HTTP/1.1\r\nHost: x\r\nTrailer: X\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: END\r\n\r\n",
        True,
    ),
    "a head without end": (b"GET http://HOST/ HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 40_000, False),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_attack_15_odd_requests_carry_the_secret_in_one_place_or_nowhere(shared: Parts, name: str) -> None:
    """What the host gets begins and ends in one place for every reader, and holds the value in its header alone."""
    text, passes = REQUESTS[name]

    async def scenario(k: Keyed) -> None:
        before = len(heard(k))
        end = k.client.dial()
        await k.client.send(end, text.replace(b"HOST", k.host.encode()))
        answer = await k.client.read(end, b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200") == passes, answer
        assert len(heard(k)) == before + passes
        for asked in heard(k)[before:]:
            head = asked.partition(b"\r\n\r\n")[0].lower() + b"\r\n"
            assert asked.count(K) == 1
            assert head.count(b"\r\nauthorization: ") == 1
            assert head.count(b"\r\nhost: ") == 1
            assert f"\r\nhost: {k.host}\r\n".encode() in head
            assert (b"content-length:" in head) + (b"transfer-encoding:" in head) <= 1
            for gone in (b"\r\nupgrade:", b"\r\nrange:", b"\r\nif_range:", b"\r\ntrailer:", b"\r\nconnection:"):
                assert gone not in head

    in_keyed_door(shared, scenario)


def test_no_tunnel_begins_inside_the_host_s_session(shared: Parts) -> None:
    """CONNECT inside TLS that ends at the door would be a way to the host beside the broker's record."""

    async def scenario(k: Keyed) -> None:
        before = len(heard(k))
        context = ssl.create_default_context(cadata=k.keys.authority.pem)
        assert await asyncio.to_thread(_inside, k, context) == b"HTTP/1.1 400"
        assert len(heard(k)) == before
        assert k.told("secret.released") == []

    in_keyed_door(shared, scenario)


def _inside(k: Keyed, context: ssl.SSLContext) -> bytes:
    """Return the first words of the answer to a CONNECT that is sent inside a CONNECT's TLS session."""
    asked = f"CONNECT {k.host} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", k.client.port), timeout=10) as end:
        end.sendall(asked)
        assert end.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with context.wrap_socket(end, server_hostname="127.0.0.1") as safe:
            safe.sendall(asked)
            return safe.recv(12)
