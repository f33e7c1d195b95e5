"""Base URLs: plain HTTP to a path of the job's own proxy that stands for a granted host."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.egress.errors import BadRequestError, EgressError, RefusedError
from broker.egress.orders import dump_rules, load_rules
from broker.egress.routes import Goal, goal_of
from broker.egress.rules import Destination, Route, Rules
from node_agent.errors import EgressRefusedError
from node_agent.routes import base_urls, library_urls, routes_of
from node_agent.sandbox import payload_of
from runner.wire import codec
from runner.wire.grants import Grants, NetGrant, SecretGrant
from tests.agent.build import job
from tests.net.keyed import VALUE, Keyed, Parts, in_keyed_door, parts
from tests.net.support import Egressed, in_door, web
from tests.support.wait import await_until

KEY = Destination("api.example.com", 443)
PLAIN = Destination("10.0.0.5", 8080)
OWN = Destination("127.0.0.1", 3128)
RULES = Rules(
    frozenset({PLAIN}),
    keyed=frozenset({KEY}),
    routes=(Route("KEY", KEY, secure=True), Route("10.0.0.5:8080", PLAIN, secure=False)),
)


@pytest.fixture(scope="module")
def shared() -> Iterator[Parts]:
    """A broker, a server and an egress process."""
    with parts() as found:
        yield found


@pytest.mark.parametrize(
    ("target", "goal"),
    [
        ("/r/KEY/v1/x?a=b#c", Goal(KEY, "/v1/x?a=b", secure=True)),
        ("/r/KEY", Goal(KEY, "/", secure=True)),
        ("/r/KEY?a", Goal(KEY, "/?a", secure=True)),
        ("/r/KEY//x", Goal(KEY, "//x", secure=True)),
        ("/r/10.0.0.5:8080/x", Goal(PLAIN, "/x", secure=False)),
        ("http://127.0.0.1:3128/r/KEY/x", Goal(KEY, "/x", secure=True)),
        ("http://api.example.com/r/KEY/x", Goal(KEY, "/r/KEY/x", secure=True)),
        ("http://10.0.0.5:8080/r/KEY/x", Goal(PLAIN, "/r/KEY/x", secure=False)),
    ],
)
def test_goals(target: str, goal: Goal) -> None:
    """A route stands for its host and leaves the rest of the path alone; elsewhere such a path is a path."""
    assert goal_of(target, RULES, OWN) == goal


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("/", BadRequestError), ("/r", BadRequestError), ("/R/KEY/", BadRequestError), ("/x/../r/KEY", BadRequestError),
        ("/r/", RefusedError), ("/r/key/x", RefusedError), ("/r/KEY%2f/x", RefusedError), ("/r/../KEY", RefusedError),
        ("/r/api.example.com/", RefusedError), ("http://127.0.0.1:3128/x", BadRequestError), ("*", BadRequestError),
    ],
)  # fmt: skip # several to a line
def test_what_is_no_route_goes_nowhere(target: str, error: type[EgressError]) -> None:
    """Names are exact; a host that has no route of its name is none."""
    with pytest.raises(error):
        goal_of(target, RULES, OWN)


@given(st.text(max_size=60), st.sampled_from(["/", "/r/", "/r/KEY", "/r/10.0.0.5:8080", "http://127.0.0.1:3128/r/"]))
def test_attack_12_no_path_leads_beyond_the_grants(text: str, begin: str) -> None:
    """Whatever a job writes below its own proxy's address: one of its hosts as granted, or nothing."""
    try:
        goal = goal_of(begin + text, RULES, OWN)
    except EgressError:
        return
    assert (goal.to, goal.secure) in {(KEY, True), (PLAIN, False)}
    assert goal.path.startswith("/")


def test_a_route_to_what_is_not_granted_is_none() -> None:
    """The rules decide, not the route."""
    stray = Rules(frozenset(), routes=(Route("KEY", KEY, secure=True),))
    with pytest.raises(RefusedError):
        goal_of("/r/KEY/", stray, OWN)
    # Who was granted that very address reaches it, and no route.
    assert goal_of("http://127.0.0.1:3128/r/KEY/", Rules(frozenset({OWN})), OWN).to == OWN


def test_rules_keep_their_routes_in_a_record() -> None:
    """What is sent is what is read; anything else is refused."""
    record = codec.load(codec.dump(dump_rules(RULES)))
    assert isinstance(record, dict)
    assert load_rules(record) == RULES
    for bad in (None, [["KEY", "a", 1]], [["a/b", "a", 1, True]], [["", "a", 1, True]], [["K", "a", 1, 1]], [1]):
        with pytest.raises(BadRequestError):
            load_rules({**record, "routes": bad})  # type: ignore[dict-item] # wrong on purpose


def test_the_job_is_told_its_base_urls() -> None:
    """For each route, and what the libraries read, with a stand-in for the key; the job's own --env wins."""
    grants = Grants(
        net=(NetGrant("db.internal", 5432), NetGrant("plain.example.com", 80), NetGrant("[::1]", 443)),
        secrets=(
            SecretGrant("MY_KEY", "proxy", "api.openai.com"),
            SecretGrant("ANTHROPIC_API_KEY", "proxy", "gateway.example.com:8443"),
            SecretGrant("tool.key", "proxy", "tools.example.com"),
            SecretGrant("OPENAI_OTHER", "proxy", "other.example.com"),
            SecretGrant("OPENAI_FILE", "file"),
        ),
    )
    door = "http://127.0.0.1:3128/r/"
    assert base_urls(grants) == {
        "RINGFENCE_URL_MY_KEY": door + "MY_KEY",
        "RINGFENCE_URL_ANTHROPIC_API_KEY": door + "ANTHROPIC_API_KEY",
        "RINGFENCE_URL_TOOL_KEY": door + "tool.key",
        "RINGFENCE_URL_OPENAI_OTHER": door + "OPENAI_OTHER",
        "RINGFENCE_URL_DB_INTERNAL_5432": door + "db.internal:5432",
        "RINGFENCE_URL_PLAIN_EXAMPLE_COM": door + "plain.example.com",
        "RINGFENCE_URL_1_443": door + "[::1]:443",
    }
    assert library_urls(grants) == {
        "OPENAI_BASE_URL": door + "MY_KEY/v1",
        "OPENAI_API_BASE": door + "MY_KEY/v1",
        "OPENAI_API_KEY": "ringfence-proxied",
        "ANTHROPIC_BASE_URL": door + "ANTHROPIC_API_KEY",
        "ANTHROPIC_API_KEY": "ringfence-proxied",
    }
    told = {route.name: (str(route.to), route.secure) for route in routes_of(grants)}
    assert told["MY_KEY"] == ("api.openai.com:443", True)
    assert told["db.internal:5432"] == ("db.internal:5432", False)
    assert told["[::1]:443"] == ("[::1]:443", True)
    assert library_urls(grants, {"MY_KEY": "generic"})["OPENAI_BASE_URL"] == door + "OPENAI_OTHER/v1"
    payload = codec.load(payload_of(job(grants=grants, env={"OPENAI_BASE_URL": "http://mine"}), 1))
    assert isinstance(payload, dict)
    env = payload["env"]
    assert isinstance(env, dict)
    assert (env["OPENAI_BASE_URL"], env["MY_KEY"]) == ("http://mine", "ringfence-proxied")
    assert payload["urls"] == base_urls(grants)
    assert base_urls(Grants()) == library_urls(Grants()) == {}


def test_a_net_grant_of_a_secret_s_host_is_no_way_around_it() -> None:
    """Both routes lead over TLS to the host of the secret, and one that is no destination refuses the job."""
    grants = Grants(net=(NetGrant("a.example.com", 8000),), secrets=(SecretGrant("K", "proxy", "a.example.com:8000"),))
    assert {(route.name, route.secure) for route in routes_of(grants)} == {("K", True), ("a.example.com:8000", True)}
    with pytest.raises(EgressRefusedError):
        routes_of(Grants(net=(NetGrant("1.2", 80),)))
    assert base_urls(Grants(net=(NetGrant("1.2", 80),))) == {}


def test_a_program_without_proxy_or_authority_uses_the_secret(shared: Parts) -> None:
    """Plain requests to a base URL arrive over TLS with the key, on one kept connection; answers are covered."""

    async def scenario(k: Keyed) -> None:
        def ask() -> list[tuple[int, bytes]]:
            link = http.client.HTTPConnection("127.0.0.1", k.client.port, timeout=10)
            answers = []
            for method, path, body in (
                ("GET", "/r/KEY/echo", None), ("POST", "/r/KEY/repeat", b"again"),
                ("POST", "/r/KEY/repeat", b"once more"), ("GET", "/r/NONE/echo", None),
            ):  # fmt: skip # several to a line
                link.request(method, path, body, {"Authorization": "Bearer mine"})
                answer = link.getresponse()
                answers.append((answer.status, answer.read()))
            link.close()
            return answers

        echo, again, more, none = await asyncio.to_thread(ask)
        assert (echo[0], again, more) == (200, (200, b"again"), (200, b"once more"))
        assert b"[secret:KEY]" in echo[1]
        assert VALUE.encode() not in echo[1]
        assert none[0] == 403
        assert b"RINGFENCE_URL_" in none[1]
        asked = k.parts.web.asked[-3:]
        assert {text for one in asked for text in one.header("authorization")} == {f"Bearer {VALUE}"}
        assert asked[0].path == "/echo"
        assert asked[0].header("host") == [k.host]
        await await_until(lambda: sum(one.requests for one in k.metered) == 3, "the counts")

    in_keyed_door(shared, scenario)


def test_tokens_over_a_route(shared: Parts) -> None:
    """The reverse route meters like the proxy."""

    async def scenario(k: Keyed) -> None:
        body = json.dumps({"model": "fake-1", "messages": []}).encode()
        head = f"POST /r/KEY/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        answer = await k.client.ask(head.encode() + b"Connection: close\r\n\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 200")
        await await_until(lambda: bool(k.metered), "the count")
        (told,) = k.metered
        assert (told.model, told.tokens_in, told.tokens_out) == ("fake-1", *k.parts.web.tokens[-1])

    in_keyed_door(shared, scenario)


def test_a_net_grant_has_a_route_too(shared: Parts) -> None:
    """Over TLS with the job's own credentials and no secret, and in plain text for another port."""
    host = f"127.0.0.1:{shared.web.port}"

    async def scenario(e: Egressed) -> None:
        head = b"GET /r/own/echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer mine\r\nConnection: close\r\n\r\n"
        assert (await e.client.ask(head)).startswith(b"HTTP/1.1 200")
        assert shared.web.last.header("authorization") == ["Bearer mine"]
        assert shared.web.last.header("accept-encoding") == ["identity"]

    in_door(
        scenario,
        net=[("127.0.0.1", shared.web.port)],
        named=[host],
        routes=[Route("own", Destination("127.0.0.1", shared.web.port), secure=True)],
        options=["--ca", str(shared.web.ca)],
    )
    with web() as port:

        async def plain(e: Egressed) -> None:
            own = f"127.0.0.1:{e.client.port}"
            for target in ("/r/own/x?y", f"http://{own}/r/own/x?y"):
                head = f"GET {target} HTTP/1.1\r\nHost: {own}\r\nConnection: close\r\n\r\n"
                answer = await e.client.ask(head.encode())
                assert answer.startswith(b"HTTP/1.1 200")
                assert f"\r\n\r\n/x?y\nhost: 127.0.0.1:{port}".encode() in answer.lower()

        there = Destination("127.0.0.1", port)
        in_door(plain, net=[("127.0.0.1", port)], named=[str(there)], routes=[Route("own", there, secure=False)])


def test_attack_42_a_head_in_one_piece_is_no_longer_than_one_in_many(shared: Parts) -> None:
    """Too long a head, path or method is answered at once; the broker is asked nothing that it can't read."""

    async def scenario(k: Keyed) -> None:
        async with asyncio.timeout(4):
            for target, status in (('"' * 40_000, 431), ('"' * 9000, 431), ("x" * 8000, 404)):
                answer = await k.client.ask(
                    f"GET /r/KEY/{target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
                )
                assert answer.startswith(b"HTTP/1.1 %d " % status)
            head = b"GET /r/KEY/echo HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 33_000 + b"\r\n\r\n"
            assert (await k.client.ask(head)).startswith(b"HTTP/1.1 431 ")
            assert (await k.client.ask(b"A" * 9000 + b" /r/KEY/ HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(
                b"HTTP/1.1 431 "
            )
            lower = await k.client.ask(b"trace /r/KEY/echo HTTP/1.1\r\nHost: x\r\n\r\n")
            assert lower.startswith(b"HTTP/1.1 400 ")
        assert [line["event"] for line in k.record() if line["event"] != "lease.opened"] == ["secret.released"]

    in_keyed_door(shared, scenario)
