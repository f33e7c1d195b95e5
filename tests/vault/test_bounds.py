"""Which requests a proxied value goes with: what a rule lists, as every host reads it, and never more by a reload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.vault import bounds
from broker.vault.errors import RulesError
from broker.vault.leases import Leases
from broker.vault.rules import Ask, Rules, decide, parse

LISTED = (("GET /v1/models", "POST /v1/chat/*", "* /any/?"),)
RULES = """
version = 1
[[allow]]
secrets = ["KEY"]
tenants = ["*"]
tasks = ["*"]
hosts = ["api.example.com"]
"""
ASK = Ask("KEY", "proxy", "acme", "agents", task="m:t", host="api.example.com")
lists = st.lists(st.sampled_from(["GET /a", "* /a/*", "POST /*", "GET /a/b"]), max_size=2).map(tuple)
requests = st.sampled_from(["GET /a", "GET /a/b", "POST /a/b", "POST /x", "GET /", ""])


def rules(listed: tuple[str, ...]) -> Rules:
    """Return rules with one list; an empty one stands for every request."""
    return parse(RULES + (f"requests = {list(listed)!r}\n" if listed else ""))


@pytest.mark.parametrize(
    ("request_", "fits"),
    [
        ("GET /v1/models", True),
        ("GET /v1/models?limit=2&x=/../", True),
        ("POST /v1/chat/completions", True),
        ("POST /v1/chat/a/b", True),
        ("PUT /any/x", True),
        ("POST /v1/models", False),
        ("get /v1/models", False),
        ("GET /v1/models/", False),
        ("GET /v1/chat/x", False),
        ("GET /any/xy", False),
        ("OPTIONS *", False),
        ("", False),
    ],
)
def test_only_what_is_listed(request_: str, fits: bool) -> None:
    """Method and path have to fit one entry; the query counts for nothing, and what names no path fits nothing."""
    assert bounds.fits(request_, LISTED) is fits
    assert bounds.fits(request_, ())


@pytest.mark.parametrize(
    "path",
    ["../../admin", "./x", "..", "a//b", "..;/admin", "%2e%2e/admin", "%2E./x", "a%2fb", "a\\..\\b", "%5c..", "a#b",
     "%252e", "x%00", "a" * 5000],
)  # fmt: skip # several to a line
def test_attack_15_a_path_that_hosts_read_differently(path: str) -> None:
    """Steps up, hidden separators and the like fit no list, also where a pattern would take them."""
    assert not bounds.fits(f"POST /v1/chat/{path}", LISTED)
    assert not bounds.fits(f"POST /v1/chat/{path}", (("* /*",),))


@pytest.mark.parametrize("entry", ["GET", "/v1", "get /v1", "GET v1", "GET /a b", "GET  /a", "G\u00c9T /a", "* *"])
def test_what_is_no_entry(entry: str) -> None:
    """The file is refused, so the old rules stay."""
    with pytest.raises(RulesError, match="METHOD /PATH"):
        rules((entry,))


@pytest.mark.parametrize("text", ["requests = []", 'requests = ["GET /"]\nmodes = ["get"]', 'requests = "GET /"'])
def test_a_list_that_says_nothing(text: str) -> None:
    """An empty list, one without proxy, and a text in place of a list are faults, not every request."""
    with pytest.raises(RulesError):
        parse(RULES + text + "\n")


def test_explained() -> None:
    """The decision carries the list."""
    assert decide(rules(LISTED[0]), ASK).requests == LISTED[0]


@given(lists, st.lists(lists, max_size=3), requests)
def test_a_reload_never_widens_it(first: tuple[str, ...], later: list[tuple[str, ...]], request_: str) -> None:
    """Whatever comes after, a live lease goes with no request that one of the rules since its start does not list."""
    leases = Leases(rules(first))
    lease = leases.open("main-1.1", "main-1", [ASK], {"KEY"}, 1.0).lease
    assert lease is not None
    for listed in later:
        leases.reload(rules(listed))
    found, code = lease.take_for("api.example.com", 2.0, request_)
    allowed = all(bounds.fits(request_, (listed,) if listed else ()) for listed in (first, *later))
    assert (bool(found), code) == (allowed, "" if allowed else "not-this-request")
    assert lease.grants["KEY"].spent == int(allowed)
