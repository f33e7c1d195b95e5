"""The parts of a proxied secret's way, each alone: the mask of answers, the place in a request, hosts and counts."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.egress.certs import Authority
from broker.egress.errors import BadRequestError, SecretRefusedError
from broker.egress.keyed import dressed
from broker.egress.keys import Keys
from broker.egress.mask import Mask, Veil
from broker.egress.routes import path_of
from broker.egress.rules import Destination, Rules
from broker.vault import placing
from broker.vault.errors import RulesError, VaultUsageError
from broker.vault.leases import Leases
from broker.vault.orders import host_of
from broker.vault.redact import forms
from broker.vault.rules import Ask, decide, parse
from runner import Secret
from runner.errors import UsageError
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.grants import Grants, NetGrant, SecretGrant
from tests.support.wait import await_until

VALUE = b"sk-canary-Zm9v+/bar_1234567890"
TEXTS = st.lists(
    st.one_of(st.sampled_from(sorted(forms(VALUE))), st.binary(max_size=40), st.just(VALUE[:9]), st.just(VALUE[3:])),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_no_form_passes_whatever_the_pieces(parts: list[bytes], sizes: list[int]) -> None:
    """Over every chunking no form of the value comes out, the length stays, and other text is not touched."""
    data, mask, out, at = b"".join(parts), Mask(Veil({"KEY": VALUE})), b"", 0
    while at < len(data):
        size = sizes[at % len(sizes)]
        out += mask.feed(data[at : at + size])
        at += size
    out += mask.finish()
    assert len(out) == len(data)
    assert not any(form in out for form in forms(VALUE))
    if not any(form in data for form in forms(VALUE)):
        assert (out, mask.hits) == (data, 0)
    else:
        assert mask.hits


def test_nothing_is_held_that_begins_no_value() -> None:
    """An event of a stream goes on whole, at once; the start of a value waits for what follows."""
    mask = Mask(Veil({"KEY": VALUE}))
    assert mask.feed(b"data: {}\n\n") == b"data: {}\n\n"
    assert mask.feed(b"x" + VALUE[:4]) == b"x"
    assert mask.feed(b"!") == VALUE[:4] + b"!"
    assert "canary" not in repr(Veil({"KEY": VALUE}))


def test_where_a_value_is_put() -> None:
    """The default, a header of its own, Basic with a user's name; white space around a value is none of it."""
    assert placing.name_of(placing.DEFAULT) == "authorization"
    assert placing.render(placing.DEFAULT, b" k\n") == b"Bearer k"
    assert placing.render("x-api-key: {value}", b"k k") == b"k k"
    assert placing.render("Authorization: Basic {basic:me}", b"k") == b"Basic " + base64.b64encode(b"me:k")


@pytest.mark.parametrize(
    "text",
    ["", "X", "X: y", "X: {value}{value}", "X: {other}", "Host: {value}", "x-a:{value}", "X: a\r\nY: {value}",
     "{value}: X", "Content-Length: {value}", "X: {basic:}", "X: {basic:a:b}", "Transfer-Encoding: {value}",
     "Accept-Encoding: {value}"],
)  # fmt: skip # several to a line
def test_headers_that_no_rule_may_name(text: str) -> None:
    """What frames or routes a request, ends a header early, or has no place or two for the value."""
    with pytest.raises(RulesError):
        placing.check(text)


@pytest.mark.parametrize("value", [b"", b" \n", b"a\nb", b"a\r\nX: y", b"a\0b", "ä".encode(), b"a" * 8001])
def test_values_that_no_header_holds(value: bytes) -> None:
    """They are refused before a job starts."""
    with pytest.raises(VaultUsageError, match="header"):
        placing.render(placing.DEFAULT, value)


def test_hosts_have_one_form() -> None:
    """Rules, leases and requests compare the same text."""
    assert host_of("API.Example.com.") == host_of("api.example.com:443") == "api.example.com"
    assert host_of("api.example.com:8443") == "api.example.com:8443"
    assert host_of("[::1]:8443") == "[::1]:8443"
    for text in ("", ":443", "https://a", "a:b", "a:0", "a:99999", "a/b", "0x7f.1"):
        with pytest.raises(VaultUsageError, match="host"):
            host_of(text)


def test_a_grant_of_a_secret_names_where_it_goes() -> None:
    """It counts as a destination for policy, once; what names no host is an error at the client."""
    secrets = (
        SecretGrant("A", "proxy", "a.example"),
        SecretGrant("B", "proxy", "A.example:443"),
        SecretGrant("C", "get"),
    )
    grants = Grants(net=(NetGrant("b.example", 1),), secrets=secrets)
    assert grants.keyed == (NetGrant("a.example", 443),)
    assert grants.reach == (NetGrant("b.example", 1), NetGrant("a.example", 443))
    for text in ("https://a.example", "a.example/v1", "a:b", "", "a b"):
        with pytest.raises(UsageError):
            Secret("A", proxy=text).to_wire()


def test_the_rule_gives_header_and_hosts() -> None:
    """The first allow rule that covers all decides; a deny beats it; header without proxy is not understood."""
    text = 'version = 1\n[[allow]]\nsecrets = ["K"]\ntenants = ["*"]\ntasks = ["*"]\nhosts = ["*.example"]\n'
    rules = parse(text + 'header = "x-api-key: {value}"\n')
    ask = Ask("K", "proxy", "main", "agents", task="a:b", host="a.example")
    assert decide(rules, ask).header == "x-api-key: {value}"
    for other in (replace(ask, host="a.example.org"), replace(ask, host="a.example:8443"), replace(ask, mode="get")):
        assert not decide(rules, other).allowed
    denied = parse(text + '[[deny]]\nsecrets = ["K"]\ntenants = ["*"]\ntasks = ["*"]\n')
    assert not decide(denied, ask).allowed
    with pytest.raises(RulesError, match="header is for the mode proxy"):
        parse(text + 'modes = ["get"]\nheader = "x-api-key: {value}"\n')


def test_all_of_a_host_s_secrets_or_none_is_spent() -> None:
    """A request that may carry one of two carries neither, and costs nothing."""
    text = "version = 1\n"
    for name, more in (("A", "uses = 2\n"), ("B", 'uses = 1\nheader = "x-b: {value}"\n')):
        text += f'[[allow]]\nsecrets = ["{name}"]\ntenants = ["*"]\ntasks = ["*"]\nhosts = ["*"]\n{more}'
    asks = [Ask(name, "proxy", "main", "agents", task="a:b", host="a.example") for name in ("A", "B")]
    lease = Leases(parse(text)).open("main-1.1", "main-1", asks, ("A", "B"), 0.0).lease
    assert lease is not None
    assert [name for name, _ in lease.take_for("a.example", 1.0)[0]] == ["A", "B"]
    assert lease.take_for("a.example", 1.0) == ([], "used-up")
    assert lease.grants["A"].uses_left == 1
    assert lease.take_for("b.example", 1.0) == ([], "denied")
    assert lease.take("A", 1.0) == (None, "denied")


def test_plain_requests_find_their_host() -> None:
    """http://HOST/ is the request for a secret's host, unless that very port was granted; other ports are not."""
    host = Destination("a.example", 443)
    rules = Rules(frozenset(), keyed=frozenset({host}))
    assert rules.keyed_at(Destination("a.example", 80)) == rules.keyed_at(host) == host
    assert rules.keyed_at(Destination("a.example", 8080)) is None
    assert rules.keyed_at(Destination("b.example", 80)) is None
    plain = Rules(frozenset({Destination("a.example", 80)}), keyed=frozenset({host}))
    assert plain.keyed_at(Destination("a.example", 80)) is None
    assert path_of("/x?y", host) == path_of("https://a.example/x?y", host) == "/x?y"
    for target in ("http://a.example/", "https://b.example/", "https://a.example:1/", "x"):
        with pytest.raises(BadRequestError):
            path_of(target, host)


def test_the_job_s_own_headers_make_room() -> None:
    """Only the header that a secret takes is replaced; the host is the granted one, compression is off."""
    own = [
        (b"Host", b"b.example"),
        (b"Authorization", b"x"),
        (b"X_Api_Key", b"y"),
        (b"X.Api~Key", b"y"),
        (b"X.HTTP_Method-Override", b"DELETE"),
        (b"X-Forwarded-Uri", b"/other"),
        (b"Accept-Encoding", b"gzip"),
        (b"A", b"1"),
    ]
    found = dressed(own, Destination("a.example", 443), [b"x-api-key"])
    assert found == [
        (b"host", b"a.example"), (b"Authorization", b"x"), (b"A", b"1"), (b"accept-encoding", b"identity"),
    ]  # fmt: skip # several to a line


def test_one_seed_one_authority() -> None:
    """The same seed gives the same authority, another seed another; a chain proves its host alone."""
    now = int(time.time())
    first, again, other = (Authority(bytes((number,)) * 32, now) for number in (1, 1, 2))
    assert first.pem == again.pem != other.pem
    assert first.chain("a.example") == again.chain("a.example") != first.chain("b.example")
    ssl.create_default_context(cadata=first.pem)


def test_a_secret_that_is_used_up_costs_another_host_nothing() -> None:
    """A door that has forgotten its values says so, so that the broker gives the other host's once more."""
    full: dict[str, Json] = {"name": "B", "version": 1, "header": "x-b", "text": "azE=", "value": "azE="}

    async def main() -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        far.setblocking(False)
        keys = Keys(near, lambda: None)

        async def asked(host: str, answer: dict[str, Json]) -> bool:
            use = asyncio.ensure_future(keys.use(Destination(host, 443)))
            order = codec.load(await asyncio.get_running_loop().sock_recv(far, 1 << 16))
            assert isinstance(order, dict)
            far.send(codec.dump({"id": order["id"], **answer}))
            try:
                await use
            finally:
                empty.append(order["empty"] is True)
            return empty[-1]

        empty: list[bool] = []
        with far:
            assert await asked("b.example", {"ok": True, "keys": [full]})
            assert not await asked("b.example", {"ok": True, "keys": [{"name": "B", "version": 1}]})
            with pytest.raises(SecretRefusedError):
                await asked("a.example", {"ok": False, "err": "used-up"})
            assert await asked("b.example", {"ok": True, "keys": [full], "for_s": 600})
            assert not await asked("c.example", {"ok": True, "keys": [full | {"name": "C"}], "for_s": 0})
            await await_until(lambda: repr(keys) == "Keys(0 held)", "the shorter time to end what is held")
            keys.close()

    asyncio.run(main())
