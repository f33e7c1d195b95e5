"""Port: broker.egress. From a job's grants to base URLs: for programs that know neither a proxy nor an authority. Pure.

Called by the stage (what the door serves) and by sandbox.py (what the job is told), which must agree. Must never make a
route to a host that the job was not granted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from broker.egress.errors import BadRequestError
from broker.egress.rules import ROUTES, Destination, Route, canonical
from node_agent.containment.plan import PROXY
from node_agent.errors import EgressRefusedError
from runner.wire.grants import Grants, NetGrant, SecretGrant

__all__ = ["STAND_IN", "Sdk", "base_urls", "library_urls", "routes_of", "sdk_of"]

#: What a job finds in the variable of a proxied secret's name; the egress process replaces it on the way.
STAND_IN: Final = "ringfence-proxied"
Sdk = Literal["openai", "anthropic", "generic"]

_OWN: Final = f"http://{PROXY[0]}:{PROXY[1]}{ROUTES}"
_HTTPS_PORTS: Final = frozenset({443, 8443})
_DEFAULT_PORTS: Final = frozenset({80, 443})
_ODD: Final = re.compile(r"[^A-Z0-9]+")
_SDK_HOSTS: Final[Mapping[str, Sdk]] = {"api.openai.com": "openai", "api.anthropic.com": "anthropic"}
_SDK_NAMES: Final[tuple[Sdk, ...]] = ("openai", "anthropic")
#: What libraries of each kind read: base URLs with the path that they expect in them, and the key's variable.
_SDK_URLS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "openai": (("OPENAI_BASE_URL", "/v1"), ("OPENAI_API_BASE", "/v1")),
    "anthropic": (("ANTHROPIC_BASE_URL", ""),),
}
_SDK_KEYS: Final[Mapping[str, str]] = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}


def routes_of(grants: Grants) -> tuple[Route, ...]:
    """Return the routes of a job: one for each proxied secret, by its name, and one for each net grant, by its host.

    Raises:
        EgressRefusedError, GrammarError: a grant is no destination.
    """
    found = {secret.name: Route(secret.name, _to(secret.destination), secure=True) for secret in _proxied(grants)}
    secrets = {route.to for route in found.values()}
    for grant in grants.net:
        to = _to(grant)
        # The host of a secret is reached by requests that carry it, however it was granted besides.
        found.setdefault(_label(to), Route(_label(to), to, secure=to in secrets or to.port in _HTTPS_PORTS))
    return tuple(found.values())


def base_urls(grants: Grants) -> dict[str, str]:
    """Return a variable for each route of a job, RINGFENCE_URL_…, with the route's base URL."""
    found: dict[str, str] = {}
    try:
        routes = routes_of(grants)
    except EgressRefusedError:
        return {}  # the stage refuses this job
    for route in routes:
        found.setdefault(f"RINGFENCE_URL_{_ODD.sub('_', route.name.upper()).strip('_')}", _OWN + route.name)
    return found


def library_urls(grants: Grants, sdks: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what known libraries read: the base URL of the first secret of their kind, and a stand-in for its key.

    ``sdks``: for which library the vault's rule says a secret is; others go by ``sdk_of``.
    """
    found: dict[str, str] = {}
    for secret in _proxied(grants):
        sdk = (sdks or {}).get(secret.name) or sdk_of(secret)
        for variable, path in _SDK_URLS.get(sdk, ()):
            found.setdefault(variable, _OWN + secret.name + path)
        if sdk in _SDK_KEYS:
            found.setdefault(_SDK_KEYS[sdk], STAND_IN)
    return found


def sdk_of(secret: SecretGrant) -> Sdk:
    """Return which library a proxied secret is for: by its host, else by its name."""
    by_host = _SDK_HOSTS.get(secret.destination.host)
    named = next((sdk for sdk in _SDK_NAMES if secret.name.lower().startswith(sdk)), None)
    return by_host or named or "generic"


def _proxied(grants: Grants) -> Iterator[SecretGrant]:
    return (secret for secret in grants.secrets if secret.mode == "proxy")


def _to(grant: NetGrant) -> Destination:
    try:
        return canonical(grant.host, grant.port)
    except BadRequestError as error:
        raise EgressRefusedError(f"a net grant is not understood: {error}") from None


def _label(to: Destination) -> str:
    return to.host if to.port in _DEFAULT_PORTS and ":" not in to.host else str(to)
