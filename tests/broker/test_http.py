"""Targets and headers of requests through the proxy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.egress.errors import BadRequestError, EgressError
from broker.egress.http import outgoing
from broker.egress.routes import target_of
from broker.egress.rules import Destination, canonical


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://api.example.com", ("api.example.com", 80, "/")),
        ("HTTP://api.example.com:8080/a/b?c=d", ("api.example.com", 8080, "/a/b?c=d")),
        ("http://api.example.com?x=http://evil.io/", ("api.example.com", 80, "/?x=http://evil.io/")),
        ("http://[2606:4700::1]/x", ("[2606:4700::1]", 80, "/x")),
        ("http://[2606:4700::1]:81/x#part", ("[2606:4700::1]", 81, "/x")),
    ],
)
def test_absolute_targets(target: str, expected: tuple[str, int, str]) -> None:
    """Host, port and path of what a client asks for."""
    assert target_of(target) == expected


@pytest.mark.parametrize(
    "target",
    [
        "/path",
        "*",
        "https://api.example.com/",
        "ftp://api.example.com/",
        "http://user@api.example.com/",
        "http://api.example.com:80@evil.io/",
        "http://api.example.com:/",
        "http://api.example.com:http/",
        "http://api.example.com:٨٠/",
    ],
)
def test_other_targets_are_refused(target: str) -> None:
    """Other schemes, users, odd ports: nothing that two parsers could read apart."""
    with pytest.raises(BadRequestError):
        target_of(target)


@given(st.text(max_size=60))
def test_no_target_breaks_the_parser(text: str) -> None:
    """Whatever stands behind the scheme, the host that is asked for is one name or address, or nothing."""
    try:
        host, port, path = target_of(f"http://{text}")
        wanted = canonical(host, port)
    except EgressError:
        return
    assert "@" not in wanted.host
    assert "/" not in wanted.host
    assert path.startswith("/")


def test_headers_for_the_proxy_alone_are_left_out() -> None:
    """Hop-by-hop headers and those that Connection lists go; framing stays, and Host is what was checked."""
    sent = [
        (b"Host", b"evil.io"),
        (b"Connection", b"X-Mine, Content-Length, close"),
        (b"X-Mine", b"1"),
        (b"Content-Length", b"3"),
        (b"Proxy-Authorization", b"Basic eA=="),
        (b"Upgrade", b"h2c"),
        (b"TE", b"trailers"),
        (b"Accept", b"*/*"),
    ]
    assert outgoing(sent, Destination("api.example.com", 8080)) == [
        (b"host", b"api.example.com:8080"),
        (b"Content-Length", b"3"),
        (b"Accept", b"*/*"),
        (b"connection", b"close"),
    ]
    assert outgoing([], Destination("::1", 80))[0] == (b"host", b"[::1]")
