"""Where a plain request goes: which destination, which path there, and whether over TLS. Pure.

Called by http.py for each request. A route is a path of the job's own proxy, `/r/NAME/…`, that stands for a granted
host: for programs that take a base URL and know neither a proxy nor an authority. Must never name a destination that
the rules don't hold, nor change the path that is asked for beyond the route's name.

Source: RFC 9112 section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from broker.egress.errors import BadRequestError, RefusedError
from broker.egress.rules import ROUTES, Destination, Rules, canonical

__all__ = ["Goal", "goal_of", "path_of", "target_of"]

_HTTP_PORT: Final = 80
_HTTPS_PORT: Final = 443
_SCHEME: Final = "http://"
_MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True)
class Goal:
    """``secure``: TLS from the egress process on."""

    to: Destination
    path: str
    secure: bool


def goal_of(target: str, rules: Rules, own: Destination | None = None) -> Goal:
    """Return the goal of a request in plain text. ``own``: the proxy's own address, as the job sees it.

    Raises:
        EgressError: no destination, or no route of this job.
    """
    if target.startswith("/"):
        return _routed(target, rules)
    host, port, path = target_of(target)
    wanted = canonical(host, port)
    secret = rules.keyed_at(wanted)
    if secret is not None:
        return Goal(secret, path, secure=True)
    if wanted == own and not rules.grants(wanted):
        # A client that sends everything through its proxy, also what is meant for the proxy itself.
        return _routed(path, rules)
    return Goal(wanted, path, secure=False)


def _routed(target: str, rules: Rules) -> Goal:
    if not target.startswith(ROUTES):
        raise BadRequestError(f"this is a proxy: send CONNECT HOST:PORT, http://HOST/, or a path below {ROUTES}NAME/")
    rest = target[len(ROUTES) :].partition("#")[0]
    cut = min((at for at in map(rest.find, "/?") if at >= 0), default=len(rest))
    name, path = rest[:cut], rest[cut:]
    route = rules.route(name)
    if route is None:
        raise RefusedError(
            f"{ascii(name[:_MAX_NAME])[1:-1]} is no route of this job: its variables RINGFENCE_URL_* hold those"
        )
    return Goal(route.to, path if path.startswith("/") else f"/{path}", route.secure)


def path_of(target: str, host: Destination) -> str:
    """Return the path of a request inside a TLS session with ``host``. Raises BadRequestError."""
    if target.startswith("/") or target == "*":
        return target
    if target.lower().startswith("https://"):
        name, port, path = target_of(f"{_SCHEME}{target[len('https://') :]}", _HTTPS_PORT)
        if canonical(name, port) == host:
            return path
    raise BadRequestError(f"this connection is for requests to {host}")


def target_of(target: str, default_port: int = _HTTP_PORT) -> tuple[str, int, str]:
    """Return host, port and path of an absolute-form target. Raises BadRequestError."""
    if target.lower().startswith("https://"):
        raise BadRequestError("https goes through CONNECT")
    if not target.lower().startswith(_SCHEME):
        raise BadRequestError("this is a proxy: send CONNECT HOST:PORT, or a request for http://HOST/")
    rest = target[len(_SCHEME) :]
    cut = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    authority, path = rest[:cut], rest[cut:].partition("#")[0]
    host, colon, port = authority.rpartition(":")
    if not colon or (authority.startswith("[") and authority.endswith("]")):
        host, port = authority, str(default_port)
    if "@" in authority or not port.isascii() or not port.isdigit():
        raise BadRequestError("the address must be http://HOST or http://HOST:PORT, without a user")
    return host, int(port[:6]), path if path.startswith("/") else f"/{path}"
