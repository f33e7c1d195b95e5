"""A proxied secret at the door: who gets it, in which place, and who does not."""

from __future__ import annotations

import asyncio
import base64
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from broker.client import LeaseRefused
from broker.egress import keys
from broker.egress.certs import Authority
from broker.egress.errors import SecretRefusedError
from broker.egress.rules import Destination
from node_agent.errors import EgressRefusedError
from tests.net.keyed import RULES, VALUE, Keyed, Parts, in_keyed_door, parts
from tests.net.support import egress_process, web
from tests.support.wait import await_until


@pytest.fixture(scope="module")
def shared() -> Iterator[Parts]:
    """A broker, a server and an egress process."""
    with parts() as found:
        yield found


def test_the_host_gets_the_key_and_the_job_does_not(shared: Parts) -> None:
    """A plain request to the door arrives over TLS with the header; the answer does not show it; it is recorded."""

    async def scenario(k: Keyed) -> None:
        status, _, body = await k.get("/echo", "Authorization: Bearer mine", "X-Own: 1")
        assert status == 200
        assert k.parts.web.last.header("authorization") == [f"Bearer {VALUE}"]
        assert k.parts.web.last.header("x-own") == ["1"]
        assert VALUE.encode() not in body
        assert b"[secret:KEY]" in body
        released = k.told("secret.released")
        assert [(line["name"], line["mode"], line["host"]) for line in released] == [("KEY", "proxy", k.host)]
        await await_until(lambda: bool(k.told("secret.masked")), "the record of it")

    in_keyed_door(shared, scenario)


def test_attack_15_a_value_is_nowhere_but_in_its_header(shared: Parts) -> None:
    """A placeholder in body, path or header travels as it is; reversed echoes hold nothing to turn round."""

    async def scenario(k: Keyed) -> None:
        status, _, body = await k.get("/repeat", method="POST", body=b"repeat reversed: {{KEY}} ringfence-proxied")
        assert (status, body) == (200, b"repeat reversed: {{KEY}} ringfence-proxied"[::-1])
        asked = k.parts.web.last
        assert asked.body == b"repeat reversed: {{KEY}} ringfence-proxied"
        await k.get("/echo?k={{KEY}}", "X-Other: {{KEY}}", "Cookie: {{KEY}}")
        asked = k.parts.web.last
        assert VALUE not in asked.path
        assert [name for name, value in asked.headers if VALUE in value] == ["authorization"]
        assert asked.header("x-other") == asked.header("cookie") == ["{{KEY}}"]

    in_keyed_door(shared, scenario)


def test_attack_15_methods_and_headers_that_give_requests_back(shared: Parts) -> None:
    """TRACE carries no secret; the caller's own headers of that name, in any spelling, are gone."""

    async def scenario(k: Keyed) -> None:
        before = len(k.parts.web.asked)
        status, _, _ = await k.get("/", method="TRACE")
        assert (status, len(k.parts.web.asked)) == (400, before)
        await k.get(
            "/echo", "AUTHORIZATION: x", "authorization: y", "Connection: authorization", "Expect: 100-continue"
        )
        assert k.parts.web.last.header("authorization") == [f"Bearer {VALUE}"]
        await k.get("/echo", "X_API_KEY: mine", "x-api-key: mine")
        assert k.parts.web.last.header("x-api-key") == ["mine"]

    in_keyed_door(shared, scenario)

    async def other(k: Keyed) -> None:
        await k.get("/echo", "X_API_KEY: mine", "x-api-key: mine", "Authorization: Bearer mine")
        asked = k.parts.web.last
        assert asked.header("x-api-key") == [VALUE]
        assert asked.header("x_api_key") == []
        assert asked.header("authorization") == ["Bearer mine"]

    in_keyed_door(shared, other, "X_KEY")


@pytest.mark.parametrize("form", ["raw", "base64", "hex", "header", "pieces"])
def test_an_answer_that_holds_the_value_is_covered(shared: Parts, form: str) -> None:
    """In bodies in known forms, in headers, and over many small pieces; lengths stay."""

    async def scenario(k: Keyed) -> None:
        status, head, body = await k.get(f"/back?as={form}")
        assert status == 200
        everything = head + b"\r\n\r\n" + body
        for hidden in (VALUE.encode(), VALUE.encode().hex().encode(), VALUE.encode()[::-1]):
            assert hidden not in everything
        assert b"[secret:KEY]" in everything
        if form == "pieces":
            assert len(body) == len(VALUE)
        await await_until(lambda: bool(k.told("secret.masked")), "the record of it")

    in_keyed_door(shared, scenario)


def test_basic_and_its_base64_are_covered(shared: Parts) -> None:
    """A header with a user's name arrives right, and its base64 text is found in an answer."""

    async def scenario(k: Keyed) -> None:
        _, _, body = await k.get("/echo")
        (sent,) = k.parts.web.last.header("authorization")
        assert base64.b64decode(sent.removeprefix("Basic ")) == f"x-access-token:{VALUE}".encode()
        assert sent.encode() not in body
        assert sent.partition(" ")[2].encode() not in body

    in_keyed_door(shared, scenario, "BASIC")


def test_redirects_are_told_and_not_followed(shared: Parts) -> None:
    """The job gets the redirect, its Location without the value; nothing else was asked."""

    async def scenario(k: Keyed) -> None:
        before = len(k.parts.web.asked)
        status, head, _ = await k.get("/go")
        assert (status, len(k.parts.web.asked)) == (302, before + 1)
        assert VALUE.encode() not in head
        assert b"elsewhere.example" in head

    in_keyed_door(shared, scenario)


def test_a_compressed_answer_is_refused(shared: Parts) -> None:
    """The host was told to send it as it is; what can't be looked through does not pass."""

    async def scenario(k: Keyed) -> None:
        status, _, body = await k.get("/packed", "Accept-Encoding: gzip")
        assert k.parts.web.last.header("accept-encoding") == ["identity"]
        assert status == 502
        assert b"compressed" in body

    in_keyed_door(shared, scenario)


def test_other_hosts_and_other_ways_are_refused(shared: Parts) -> None:
    """The grant of a secret opens its host alone, and never as a tunnel that nobody looks into."""
    with web() as plain:

        async def scenario(k: Keyed) -> None:
            end = k.client.dial()
            await k.client.send(end, f"GET http://127.0.0.1:{plain}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await k.client.read(end)).startswith(b"HTTP/1.1 403")
            end, head = await k.client.connect(k.host)
            assert b" 200 " in head
            before = len(k.parts.web.asked)
            await k.client.send(end, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP/1.1 200" not in await k.client.read(end)
            assert len(k.parts.web.asked) == before

        in_keyed_door(shared, scenario)


def test_https_ends_at_the_door(shared: Parts) -> None:
    """A TLS client that trusts the attempt's authority, by CONNECT or SOCKS5, gets the host with the key in place."""

    async def scenario(k: Keyed) -> None:
        context = ssl.create_default_context(cadata=k.keys.authority.pem)
        for way in ("connect", "socks"):
            with await asyncio.to_thread(_tunnel, k, way) as end, _in_tls(context, end) as safe:
                for path in ("/echo", "/bytes/300000"):
                    answer = await asyncio.to_thread(_asked, safe, path)
                    assert answer.startswith(b"HTTP/1.1 200")
                    assert k.parts.web.last.header("authorization") == [f"Bearer {VALUE}"]
                    assert k.parts.web.last.header("host") == [k.host]
                    assert VALUE.encode() not in answer
                wrong = await asyncio.to_thread(_asked, safe, "https://elsewhere.example/")
                assert wrong.startswith(b"HTTP/1.1 400")
        with (
            await asyncio.to_thread(_tunnel, k, "connect") as end,
            pytest.raises(ssl.SSLError),
            _in_tls(ssl.create_default_context(), end),
        ):
            pass

    in_keyed_door(shared, scenario)


def test_the_host_must_prove_its_name(shared: Parts) -> None:
    """A certificate of an authority that is not trusted ends the request before anything is sent."""
    foreign = shared.folder / "foreign.pem"
    foreign.write_text(Authority(bytes(32), 1_700_000_000).pem)
    with egress_process(shared.folder / "h2", "--ca", str(foreign)) as process:

        async def scenario(k: Keyed) -> None:
            count = len(k.parts.web.asked)
            status, _, body = await k.get("/echo")
            assert status == 502
            assert b"certificate is not trusted" in body
            assert len(k.parts.web.asked) == count
            assert k.told("secret.released") == []

        other = replace(shared, process=process)
        in_keyed_door(other, scenario)
        shared.count = other.count


def test_uses_are_counted_and_ends(shared: Parts) -> None:
    """Each request spends one use; after the last one the host is asked nothing."""

    async def scenario(k: Keyed) -> None:
        assert [(await k.get("/echo"))[0] for _ in range(3)] == [200, 200, 403]
        assert len(k.told("secret.released")) == 2
        assert any("used as often" in why for why in k.denied)

    in_keyed_door(shared, scenario, "X_KEY")


def test_attack_15_only_requests_that_the_rule_lists(shared: Parts) -> None:
    """Another method or path, or one that a host could read as another, is sent nothing; the next good one goes on."""

    async def scenario(k: Keyed) -> None:
        assert (await k.get("/echo?a=1", "X-HTTP-Method-Override: DELETE", "X-Original-URL: /admin"))[0] == 200
        assert k.parts.web.last.header("x-http-method-override") == k.parts.web.last.header("x-original-url") == []
        count = len(k.parts.web.asked)
        for method, path in (("POST", "/echo"), ("GET", "/repeat"), ("GET", "/bytes/../repeat"), ("GET", "/bytes/%2e")):
            status, _, body = await k.get(path, method=method)
            assert status == 403
            assert b"does not list this method and path" in body
        assert len(k.parts.web.asked) == count
        assert (await k.get("/bytes/10"))[0] == 200
        assert len(k.told("secret.released")) == 2
        assert {line["code"] for line in k.told("request.refused")} == {"not-this-request"}

    in_keyed_door(shared, scenario, "READ")


def test_its_time_ends(shared: Parts) -> None:
    """After the rule's time nothing is sent any more."""

    async def scenario(k: Keyed) -> None:
        assert (await k.get("/echo"))[0] == 200
        async with asyncio.timeout(5):
            while (await k.get("/echo"))[0] == 200:
                pass
        assert (await k.get("/echo"))[0] == 403
        assert any(line.get("code") == "expired" for line in k.record())

    in_keyed_door(shared, scenario, "SHORT")


def test_a_person_has_to_say_yes(shared: Parts) -> None:
    """Until then the answer is 503 with nothing sent; after it the same request goes through."""

    async def scenario(k: Keyed) -> None:
        status, _, body = await k.get("/echo")
        assert status == 503
        assert b"approval" in body
        assert k.parts.stand.operator(op="approve", attempt=k.attempt, name="ASK")["ok"]
        assert (await k.get("/echo"))[0] == 200

    in_keyed_door(shared, scenario, "ASK")


def test_two_secrets_for_one_host(shared: Parts) -> None:
    """Both headers go along; two for one header are refused before the start."""

    async def scenario(k: Keyed) -> None:
        assert (await k.get("/echo"))[0] == 200
        assert k.parts.web.last.header("x-api-key") == [VALUE]
        assert k.parts.web.last.header("authorization") == [f"Bearer {VALUE}"]

    in_keyed_door(shared, scenario, "KEY", "X_KEY")
    with pytest.raises(LeaseRefused, match="one header"):
        in_keyed_door(shared, scenario, "KEY", "OTHER")


def test_a_stream_comes_as_it_is_sent(shared: Parts) -> None:
    """Each event is there before the next one is made: nothing is held back that is no start of a value."""

    async def scenario(k: Keyed) -> None:
        end, tick = await k.stream()
        for number in range(5):
            tick.release()
            await k.client.read(end, b"data: %d\n\n" % number)
        end.close()
        tick.release(1000)

    in_keyed_door(shared, scenario)


def test_the_end_of_the_lease_ends_it(shared: Parts) -> None:
    """With the lease ended at the broker alone: streams break, and the next request on a kept connection fails."""

    async def scenario(k: Keyed) -> None:
        kept = k.client.dial()
        assert (await k.on(kept, "/bytes/10"))[0] == 200
        stream, tick = await k.stream()
        tick.release()
        await k.client.read(stream, b"data: 0\n\n")
        k.job.process.kill()
        await k.client.read(stream)
        tick.release(1000)
        count = len(k.parts.web.asked)
        assert (await k.on(kept, "/bytes/10"))[0] in (0, 403)
        assert (await k.get("/bytes/10"))[0] == 403
        assert len(k.parts.web.asked) == count

    in_keyed_door(shared, scenario)


@pytest.mark.alone
@pytest.mark.parametrize("way", ["kill", "close"])
def test_within_50_ms_of_the_end_every_request_fails(shared: Parts, way: str) -> None:
    """Counted from the kill of the job, or from the agent's word, on one connection that is asked again and again."""

    async def scenario(k: Keyed) -> None:
        kept = k.client.dial()
        assert (await k.on(kept, "/bytes/10"))[0] == 200
        started = time.monotonic()
        if way == "kill":
            k.job.process.kill()
        else:
            k.door.close()
        status = 200
        while status == 200:
            try:
                status = (await k.on(kept, "/bytes/10"))[0]
            except (OSError, AssertionError):
                status = 0
        assert time.monotonic() - started < 0.05

    in_keyed_door(shared, scenario)


def test_restarts_are_invisible_and_uses_stay_spent() -> None:
    """The next broker answers, out of what is left; a new egress process gets a line and shows what clients trust.

    What a reload of the rules takes away is gone for the next request of a connection that stands.
    """

    async def brokers(k: Keyed) -> None:
        assert (await k.get("/echo"))[0] == 200
        k.broker.start()
        k.parts.stand.stop(signal.SIGKILL)
        asking = asyncio.ensure_future(k.get("/echo"))
        await asyncio.to_thread(k.parts.stand.start)
        assert (await asking)[0] == 200
        assert (await k.get("/echo"))[0] == 403

    async def egresses(k: Keyed) -> None:
        context = ssl.create_default_context(cadata=k.keys.authority.pem)
        assert (await k.get("/echo"))[0] == 200
        k.parts.process.stop(signal.SIGKILL)
        k.parts.process.start()
        async with asyncio.timeout(15):
            while (await _status(k)) != 200:
                pass
        with await asyncio.to_thread(_tunnel, k, "connect") as end, _in_tls(context, end) as safe:
            assert (await asyncio.to_thread(_asked, safe, "/echo")).startswith(b"HTTP/1.1 200")

    async def rules(k: Keyed) -> None:
        kept = k.client.dial()
        assert (await k.on(kept, "/bytes/10"))[0] == 200
        k.parts.stand.write_rules(RULES.replace('"KEY", ', ""))
        assert k.parts.stand.operator(op="reload")["revoked"] == 1
        count = len(k.parts.web.asked)
        assert (await k.on(kept, "/bytes/10"))[0] == 403
        assert len(k.parts.web.asked) == count

    with parts() as own:
        in_keyed_door(own, brokers, "X_KEY")
        in_keyed_door(own, egresses)
        in_keyed_door(own, rules)


def test_no_broker_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer in time gives no leave, and one that has ended ends the line."""
    monkeypatch.setattr(keys, "ANSWER_S", 0.05)

    async def main() -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lost = asyncio.Event()
        line = keys.Keys(near, lost.set)
        with pytest.raises(SecretRefusedError):
            await line.use(Destination("a.example", 443))
        far.close()
        await asyncio.wait_for(lost.wait(), 5)
        assert line.closed
        with pytest.raises(SecretRefusedError):
            await line.use(Destination("a.example", 443))
        line.close()

    asyncio.run(main())


def test_attack_12_a_secret_s_host_on_loopback_has_to_be_named(shared: Parts) -> None:
    """A secret's host on this machine is refused unless the node's policy spells it out, as any grant (attack 13)."""

    async def scenario(k: Keyed) -> None:
        raise AssertionError("the door was opened")

    with pytest.raises(EgressRefusedError, match="loopback"):
        in_keyed_door(shared, scenario, named=False)


def _tunnel(k: Keyed, way: str) -> socket.socket:
    """Return a connection through the door to the host, before TLS."""
    end = socket.create_connection(("127.0.0.1", k.client.port), timeout=10)
    port = k.parts.web.port
    if way == "connect":
        end.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        while b"\r\n\r\n" not in end.recv(4096):
            pass
    else:
        end.sendall(b"\x05\x01\x00")
        assert end.recv(2) == b"\x05\x00"
        end.sendall(b"\x05\x01\x00\x01\x7f\x00\x00\x01" + port.to_bytes(2, "big"))
        assert end.recv(10)[1] == 0
    return end


def _in_tls(context: ssl.SSLContext, end: socket.socket) -> ssl.SSLSocket:
    return context.wrap_socket(end, server_hostname="127.0.0.1")


def _asked(safe: ssl.SSLSocket, target: str) -> bytes:
    safe.sendall(f"GET {target} HTTP/1.1\r\nHost: elsewhere.example\r\nAuthorization: mine\r\n\r\n".encode())
    data = b""
    while b"\r\n\r\n" not in data:
        data += safe.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < size:
        body += safe.recv(1 << 16)
    return head + b"\r\n\r\n" + body


async def _status(k: Keyed) -> int:
    try:
        return (await k.get("/echo"))[0]
    except (OSError, AssertionError, TimeoutError):
        return 0
