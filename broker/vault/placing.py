"""Where a proxied value stands in a request: one header, as the vault's rule names it. Pure.

Called by rules.py (checks the text), masks.py (does this value fit?) and lines.py. Must never make a header that ends
before its value does, or one that says where a message ends or whom it is for.

    header = "Authorization: Bearer {value}"               # the default
    header = "x-api-key: {value}"
    header = "Authorization: Basic {basic:x-access-token}"   # base64 of USER:VALUE
"""

from __future__ import annotations

import base64
import re
from typing import Final

from broker.vault.errors import RulesError, VaultUsageError

__all__ = ["DEFAULT", "check", "name_of", "render"]

DEFAULT: Final = "Authorization: Bearer {value}"
#: Most servers take no longer header.
MAX_BYTES: Final = 8000
_FORM: Final = re.compile(
    r"(?P<name>[A-Za-z0-9-]{1,64}): (?P<before>[\x21-\x7a|~ ]{0,100}?)"
    r"\{(?P<what>value|basic:[\x21-\x39\x3b-\x7a|~]{1,100})\}"
    r"(?P<after>[\x21-\x7a|~]{0,100})"
)
#: Framing, routing and what is for one connection only.
_NEVER: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
_VALUE: Final = re.compile(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def check(text: str) -> str:
    """Return a rule's header text. Raises RulesError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise RulesError('a header is "NAME: {value}", with text around it, or "NAME: Basic {basic:USER}"')
    if match["name"].lower() in _NEVER:
        raise RulesError(f"the header {match['name']} can't carry a secret: it frames or routes the request")
    return text


def name_of(text: str) -> str:
    """Return the header's name in lower case."""
    return text.partition(":")[0].lower()


def render(text: str, value: bytes) -> bytes:
    """Return the header's whole text with the value in it; white space around the value is no part of it.

    Raises:
        VaultUsageError: no header can hold it.
    """
    match, inner = _FORM.fullmatch(text), value.strip()
    if match is None or not _VALUE.fullmatch(inner) or len(inner) > MAX_BYTES:
        fault = f"it is longer than {MAX_BYTES} bytes, or has line breaks or other than ASCII in it"
        raise VaultUsageError(f"a header can't hold this value: {fault}")
    if match["what"] != "value":
        inner = base64.b64encode(match["what"].partition(":")[2].encode("ascii") + b":" + inner)
    return match["before"].encode("ascii") + inner + match["after"].encode("ascii")
