"""A store's URL means one thing, shows no password, and what this version can't serve is said so."""

from __future__ import annotations

import pytest

from node_agent import storelink as daemons
from node_agent.errors import SetupError
from runner import storelink
from runner.errors import ConfigError
from runner.wire.storeurl import sentinel_of, shown_url


def test_a_sentinel_url_is_taken_apart() -> None:
    """Hosts with and without port, IPv6, account, database, options of the sentinels and of TLS."""
    found = sentinel_of("redis+sentinel://me:p%40ss@a:1,b,[::1]:3/main/2?sentinel_username=s&sentinel_password=w")
    assert found is not None
    assert found.places == (("a", 1), ("b", 26379), ("::1", 3))
    assert (found.service, found.login) == ("main", {"db": 2, "username": "me", "password": "p@ss"})
    assert (found.sentinel_login, found.tls) == ({"username": "s", "password": "w"}, {})
    secure = sentinel_of("rediss+sentinel://a/main?ssl_ca_certs=/ca")
    assert secure is not None
    assert secure.tls == {"ssl": True, "ssl_check_hostname": True, "ssl_ca_certs": "/ca"}
    assert sentinel_of("redis://a") is None


@pytest.mark.parametrize(
    "url",
    [
        *("redis+sentinel://a", "redis+sentinel:///main", "redis+sentinel://a:x/main", "redis+sentinel://a,/main"),
        *("redis+sentinel://a:70000/main", "redis+sentinel://a/main/x", "redis+sentinel://a/main?ssl_cert_reqs=none"),
        *("redis+sentinel://a/main?ssl_ca_certs=/ca", "redis+cluster://a", "http://a", "rediss+cluster://u:secret@a"),
    ],
)
def test_what_is_no_store_is_refused_on_both_sides(url: str) -> None:
    """Client and daemon say the same, with the forms that there are, and without the password."""
    for opener, error in ((storelink.open_store, ConfigError), (daemons.connect, SetupError)):
        with pytest.raises(error, match=r"redis\+sentinel://") as caught:
            opener(url)
        assert "secret" not in str(caught.value)


def test_no_form_shows_its_passwords() -> None:
    """User, password and the sentinels' own are cut out; the rest stays."""
    shown = shown_url("rediss+sentinel://me:p@a:1,b:2/main?sentinel_password=w&ssl_ca_certs=/ca&sentinel_username=u")
    assert shown == "rediss+sentinel://a:1,b:2/main?ssl_ca_certs=/ca"
