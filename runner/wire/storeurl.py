"""A store behind Sentinel, as one URL.

    redis+sentinel://[USER[:PASSWORD]@]HOST:PORT[,HOST:PORT]…/SERVICE[/DB][?OPTION=VALUE&…]

``rediss+sentinel`` speaks TLS with the sentinels and the store. Options: ``sentinel_username``, ``sentinel_password``,
``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``. Called by whoever opens a connection: client, agent, scheduler.
Pure. Must never guess: what it does not know is an error. A cluster's URL is read by cluster.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote

__all__ = ["SentinelUrl", "sentinel_of", "shown_url"]

_SCHEMES: Final = {"redis+sentinel": False, "rediss+sentinel": True}
_TLS_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_LOGIN_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
_PORT: Final = 26379
_SECRET: Final = re.compile(r"(?<=://)[^/@?]*@|(?<=[?&])(?:sentinel_)?(?:username|password)=[^&]*&?")


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """``places``: the sentinels; ``service``: what they call the store; the rest as redis-py's constructors take it."""

    places: tuple[tuple[str, int], ...]
    service: str
    login: dict[str, str | int]
    sentinel_login: dict[str, str]
    tls: dict[str, str | bool]


def sentinel_of(url: str) -> SentinelUrl | None:
    """Return the parts of a Sentinel URL, None for another one. Raises ValueError: no such URL."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        return None
    place, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - _TLS_OPTIONS - _LOGIN_OPTIONS)
    if unknown:
        raise ValueError(f"a Sentinel URL has no option {unknown[0]}")
    if not _SCHEMES[scheme] and _TLS_OPTIONS & set(options):
        raise ValueError("TLS options need rediss+sentinel://")
    host_part, _, path = place.partition("/")
    service, _, db = path.partition("/")
    if not service or not host_part or (db and not db.isdigit()):
        raise ValueError("a Sentinel URL is redis+sentinel://HOST:PORT,HOST:PORT/SERVICE[/DB]")
    account, _, hosts = host_part.rpartition("@")
    user, _, password = account.partition(":")
    login: dict[str, str | int] = {"db": int(db or 0)}
    login |= {name: unquote(word) for name, word in (("username", user), ("password", password)) if word}
    tls: dict[str, str | bool] = {name: value for name, value in options.items() if name in _TLS_OPTIONS}
    if _SCHEMES[scheme]:
        tls |= {"ssl": True, "ssl_check_hostname": True}
    own = {name.removeprefix("sentinel_"): value for name, value in options.items() if name in _LOGIN_OPTIONS}
    return SentinelUrl(tuple(_place(text) for text in hosts.split(",")), unquote(service), login, own, tls)


def shown_url(url: str) -> str:
    """Return any store's URL without user and password."""
    return _SECRET.sub("", url).rstrip("?&")


def _place(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host, int(port)
