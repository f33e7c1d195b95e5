"""A store in a cluster, as one URL; and which node owns its one hash slot.

    redis+cluster://[USER[:PASSWORD]@]HOST:PORT[,HOST:PORT]…/TAG[?OPTION=VALUE&…]

TAG is the hash tag of every key, so that all of a fleet lie in one slot, on one node at a time, where scripts see them
all. ``rediss+cluster`` speaks TLS; options ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``. Called by whoever opens
a connection and by whoever names keys. Pure. Must never guess: what it does not know is an error.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote

from runner.wire.keys import Keys

__all__ = ["ClusterUrl", "cluster_of", "keys_of", "owner_in", "places_in", "slot_of"]

_SCHEMES: Final = {"redis+cluster": False, "rediss+cluster": True}
_TLS_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_PORT: Final = 6379
_SLOTS: Final = 16384


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """``places``: nodes to ask first; ``login`` and ``tls`` as redis-py's constructors take them."""

    places: tuple[tuple[str, int], ...]
    tag: str
    login: dict[str, str]
    tls: dict[str, str | bool]


def cluster_of(url: str) -> ClusterUrl | None:
    """Return the parts of a cluster's URL, None for another one. Raises ValueError: no such URL."""
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        return None
    place, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(set(options) - _TLS_OPTIONS):
        raise ValueError(f"a cluster's URL has no option {unknown[0]}")
    if options and not _SCHEMES[scheme]:
        raise ValueError("TLS options need rediss+cluster://")
    host_part, _, tag = place.partition("/")
    if not host_part or not _TAG.fullmatch(tag):
        raise ValueError("a cluster's URL is redis+cluster://HOST:PORT,HOST:PORT/TAG, with one hash tag for all keys")
    account, _, hosts = host_part.rpartition("@")
    user, _, password = account.partition(":")
    login = {name: unquote(word) for name, word in (("username", user), ("password", password)) if word}
    tls: dict[str, str | bool] = {**options}
    if _SCHEMES[scheme]:
        tls |= {"ssl_check_hostname": True}
    return ClusterUrl(tuple(_place(text) for text in hosts.split(",")), tag, login, tls)


def keys_of(url: str) -> Keys:
    """Return the names of all keys in the store of this URL. Raises ValueError: no such URL."""
    cluster = cluster_of(url)
    return Keys() if cluster is None else Keys.tagged(cluster.tag)


def slot_of(tag: str) -> int:
    """Return the hash slot of a tag. Source: the Redis cluster specification, CRC16 of the XMODEM kind."""
    return binascii.crc_hqx(tag.encode("ascii"), 0) % _SLOTS


def owner_in(reply: object, slot: int, asked: str) -> tuple[str, int] | None:
    """Return host and port of the slot's owner in a reply to CLUSTER SLOTS; ``asked``: the host that gave it."""
    for first, last, nodes in _ranges(reply):
        if first <= slot <= last and nodes:
            return _node(nodes[0], asked)
    return None


def places_in(reply: object, asked: str) -> tuple[tuple[str, int], ...]:
    """Return every node, replicas too, in a reply to CLUSTER SLOTS."""
    found = [_node(node, asked) for _, _, nodes in _ranges(reply) for node in nodes]
    return tuple(dict.fromkeys(place for place in found if place is not None))


def _ranges(reply: object) -> list[tuple[int, int, Sequence[object]]]:
    rows = reply if isinstance(reply, list) else []
    return [
        (row[0], row[1], row[2:])
        for row in rows
        if isinstance(row, list) and len(row) > 2 and isinstance(row[0], int) and isinstance(row[1], int)
    ]


def _node(node: object, asked: str) -> tuple[str, int] | None:
    if not isinstance(node, list) or len(node) < 2 or not isinstance(node[1], int):
        return None
    host = node[0].decode("utf-8", "replace") if isinstance(node[0], bytes) else ""
    # A node that does not know its own name is meant by the address that it was asked at.
    return (host if host not in {"", "?"} else asked, node[1])


def _place(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host, int(port)
