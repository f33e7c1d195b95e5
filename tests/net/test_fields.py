"""A value in the one field that its rule names, and in no other place, whatever the job writes there (attack 15)."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.egress.errors import BadRequestError
from broker.egress.fields import Field, body_kind, in_body, in_target
from broker.egress.keys import Held, _leave
from broker.vault.errors import RulesError
from broker.vault.placing import check_field, models
from broker.vault.rules import Ask, decide, parse
from tests.net.keyed import VALUE, Keyed, Parts, in_keyed_door, parts

ODD = b"a/b?c&d=e %+\"\\'#"


@pytest.fixture(scope="module")
def shared() -> Iterator[Parts]:
    """A broker, a server and an egress process."""
    with parts() as found:
        yield found


def field(place: str, value: bytes = ODD) -> Field:
    """Return a field of the secret K."""
    return Field("K", place, value)


@pytest.mark.parametrize("sign", ["{{K}}", "%7B%7BK%7D%7D", "%7b%7bK%7D}"])
def test_a_parameter_of_the_query(sign: str) -> None:
    """The first of that name that is the placeholder and nothing else, as it is or escaped."""
    found = in_target(f"/x/{{{{K}}}}?a={{{{K}}}}&key={sign}&key={{{{K}}}}&other=1", [field("query:key")])
    path, _, query = found.partition("?")
    assert path == "/x/{{K}}"
    assert parse_qsl(query) == [("a", "{{K}}"), ("key", ODD.decode()), ("key", "{{K}}"), ("other", "1")]


@pytest.mark.parametrize(
    "target",
    ["/{{K}}", "/?key=x{{K}}", "/?key={{K}}x", "/?Key={{K}}", "/?key={{k}}", "/?key={K}", "/?{{K}}", "/#{{K}}"],
)
def test_elsewhere_a_placeholder_is_text(target: str) -> None:
    """Part of a longer text, another name, another place: it travels as it is."""
    assert in_target(target, [field("query:key"), field("path:/bot{value}/"), field("json:key")]) == target


def test_the_beginning_of_a_path() -> None:
    """One whole step with what comes before it, its value escaped so that it stays one."""
    assert in_target("/bot{{K}}/send?x={{K}}", [field("path:/bot{value}/")]) == f"/bot{_step(ODD)}/send?x={{{{K}}}}"
    assert in_target("/{{K}}", [field("path:/{value}", b"1:a-b")]) == "/1:a-b"
    for target in ("/bot{{K}}", "/bot{{K}}x/y", "/bot/{{K}}/", "/x/bot{{K}}/", "/bots{{K}}/"):
        assert in_target(target, [field("path:/bot{value}/")]) == target


def test_bodies() -> None:
    """A form's and a JSON object's own field; a deeper one, a list, and another type are left as they are."""
    form = in_body(b"a=%7B%7BK%7D%7D&token={{K}}&b=%ff", "form", [field("form:token")])
    assert form.startswith(b"a=%7B%7BK%7D%7D&token=a%2Fb")
    assert form.endswith(b"&b=%ff")
    body = {"token": "{{K}}", "text": "{{K}}", "deep": {"token": "{{K}}"}, "n": 1.5, "u": "ä\ud800"}
    assert json.loads(in_body(json.dumps(body).encode(), "json", [field("json:token")])) == {
        **body, "token": ODD.decode()
    }  # fmt: skip # several to a line
    for same in (
        b'[{"token":"{{K}}"}]',
        b'{"token": "x{{K}}"}',
        b'{"token": ["{{K}}"]}',
        b'{"a": 1,  "token": "{{J}}"}',
    ):
        assert in_body(same, "json", [field("json:token")]) == same
    with pytest.raises(BadRequestError):
        in_body(b'{"token": "{{K}}"', "json", [field("json:token")])
    with pytest.raises(BadRequestError):
        in_body(b"{{K}}" + b"[" * 500_000, "json", [field("json:token")])
    assert body_kind([b'application/JSON ; Charset="UTF-8"'], [field("json:token")]) == "json"
    assert body_kind([b"application/x-www-form-urlencoded"], [field("json:token")]) == ""
    assert body_kind([b"text/plain"], [field("json:token"), field("form:token")]) == ""


@pytest.mark.parametrize(
    "kinds",
    [
        [], [b"text/plain", b"application/json"], [b"application/json", b"application/json"],
        [b"application/json; charset=utf-16"], [b"application/json; charset=utf-8; charset=utf-7"],
        [b"application/json, text/plain"], [b"application/json; boundary=x"],
    ],
)  # fmt: skip # several to a line
def test_attack_15_a_body_that_a_host_may_read_as_another_holds_no_field(kinds: list[bytes]) -> None:
    """Two types, another charset, odd parameters: the placeholder stays text."""
    assert body_kind(kinds, [field("json:token")]) == ""


@pytest.mark.parametrize("place", ["path:/bot{value}/", "query:q", "form:q", "json:q"])
def test_attack_15_an_address_that_is_echoed_is_covered(place: str) -> None:
    """What stood in the request, and other ways to write it in an address, in HTML or JSON too."""
    value = b"ab+cd/e==f&g'h:ij%k"
    one = field(place, value)
    leave = _leave([Held("K", b"", value, value, place)])
    forms = [one.sent.decode(), value.decode()]
    forms += [quote(value, safe=safe) for safe in ("", "/", "+", "=/", "!$&'()*+,;=:@", "!$&'()*+,;=:@/")]
    forms += [re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), form) for form in forms]
    for form in forms:
        for shown in (form, html.escape(form), json.dumps(form)[1:-1]):
            out, hits = leave.veil.whole(f"no such page: /x{shown}/y".encode())
            assert hits
            assert b"cd" not in out


@given(st.text(max_size=40), st.text(max_size=40))
def test_attack_15_no_text_around_the_field_gets_the_value(before: str, after: str) -> None:
    """Whatever stands around: the value is in that one field, or nowhere."""
    value = b"VALUE-OF-K"
    target = f"/{quote(before)}?a={quote(after)}&q={quote(before)}{{{{K}}}}{quote(after)}"
    count = in_target(target, [field("query:q", value)]).count("VALUE-OF-K")
    assert count == (before + after == "")
    text = json.dumps({"prompt": before + "{{K}}" + after, "token": before + "{{K}}" + after}).encode()
    assert in_body(text, "json", [field("json:token", value)]).count(value) == (before + after == "")


@pytest.mark.parametrize(
    "text", ["body", "query:", "query:a b", "header:x", "path:bot{value}", "path:/{value}x", "path:/x", "json:a\n", ""]
)
def test_fields_that_are_none(text: str) -> None:
    """A rule names exactly one place."""
    with pytest.raises(RulesError):
        check_field(text)


def rule(**more: object) -> str:
    """Return a policy with one rule for K."""
    values = {"secrets": ["K"], "tenants": ["*"], "tasks": ["*"], "hosts": ["*"], **more}
    return "version = 1\n[[allow]]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


def test_attack_15_no_field_of_a_model() -> None:
    """A rule that names a model's library is refused; a pattern that would cover a model's host does not."""
    for sdk in ("openai", "anthropic"):
        with pytest.raises(RulesError, match="model"):
            parse(rule(field="query:key", sdk=sdk))
    with pytest.raises(RulesError, match="both"):
        parse(rule(field="query:key", header="x: {value}"))
    with pytest.raises(RulesError, match="proxy"):
        parse(rule(field="query:key", modes=["get"]))
    rules = parse(rule(field="query:key"))
    ask = Ask("K", "proxy", "main", "q", task="t", host="maps.example.com")
    assert decide(rules, ask).field == "query:key"
    for host in ("api.openai.com", "API.openai.com:443", "x.openai.azure.com", "generativelanguage.googleapis.com"):
        assert models(host)
        assert not decide(rules, Ask("K", "proxy", "main", "q", task="t", host=host)).allowed
    assert not models("openai.example.com")


@pytest.mark.parametrize("bad", [{"sdk": "other"}, {"sdk": 1}, {"body_bytes": 0}, {"body_bytes": 1.5}, {"at_once": -1}])
def test_bounds_and_libraries_that_are_none(bad: dict[str, object]) -> None:
    """Unknown libraries and bounds that bound nothing refuse to load."""
    with pytest.raises(RulesError):
        parse(rule(**bad))


def test_the_host_gets_it_in_the_field_and_nowhere_else(shared: Parts) -> None:
    """Query, path, form and JSON through a door: no header, right lengths, the rest inert."""

    async def query(k: Keyed) -> None:
        _, _, body = await k.get("/echo?api_key={{Q}}&x={{Q}}", "X-Other: {{Q}}")
        asked = k.parts.web.last
        assert asked.path == f"/echo?api_key={VALUE}&x={{{{Q}}}}"
        assert not asked.header("authorization")
        assert VALUE.encode() not in body

    async def form(k: Keyed) -> None:
        kind = "Content-Type: application/x-www-form-urlencoded"
        status, _, body = await k.get("/repeat", kind, method="POST", body=b"a={{F}}&token={{F}}")
        assert (status, k.parts.web.last.body) == (200, b"a={{F}}&token=" + VALUE.encode())
        assert VALUE.encode() not in body
        await k.get("/repeat?token={{F}}", "Content-Type: text/plain", method="POST", body=b"token={{F}}")
        assert k.parts.web.last.body == b"token={{F}}"

    async def in_json(k: Keyed) -> None:
        kind, text = "Content-Type: application/json", b'{"token": "{{J}}", "text": "say {{J}} reversed"}'
        status, _, body = await k.get("/repeat", kind, "Expect: 100-continue", method="POST", body=text)
        assert status in (100, 200)
        got = json.loads(k.parts.web.last.body)
        assert got == {"token": VALUE, "text": "say {{J}} reversed"}
        assert VALUE.encode() not in body
        # A model's path, whatever the host is called: inert.
        model = b'{"token": "{{J}}", "model": "fake-1", "messages": []}'
        await k.get("/v1/chat/completions", kind, method="POST", body=model)
        assert k.parts.web.last.body == model
        status, _, body = await k.get("/repeat", kind, method="POST", body=b"x" * ((1 << 20) + 1))
        assert status == 413

    async def few(k: Keyed) -> None:
        head = f"POST http://{k.host}/repeat HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        part, count = b"%x\r\n%b\r\n" % (60, b'"' + b"x" * 58 + b'"'), len(k.parts.web.asked)
        answer = await k.client.ask(head.encode() + part * 2 + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
        # What fits as it was written and not with the value in it is refused, too.
        body = b'{"token":"{{L}}","x":"%b"}' % (b"x" * 70)
        assert (await k.get("/repeat", "Content-Type: application/json", method="POST", body=body))[0] == 413
        assert len(k.parts.web.asked) == count

    async def path(k: Keyed) -> None:
        await k.get("/bot{{P}}/send", "Authorization: mine")
        assert k.parts.web.last.path == f"/bot{VALUE}/send"
        assert k.parts.web.last.header("authorization") == ["mine"]

    for name, scenario in (("Q", query), ("F", form), ("J", in_json), ("L", few), ("P", path)):
        in_keyed_door(shared, scenario, name)


def _step(value: bytes) -> str:
    return quote(value, safe="-._~!$&'()*+,;=:@")
