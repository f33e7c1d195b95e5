"""Where a proxied value stands in a request: one header or one field, as the vault's rule names it. Pure.

Called by rules.py (checks the text), masks.py (does this value fit?) and lines.py. Must never make a header that ends
before its value does, or one that says where a message ends or whom it is for; nor let a value into a field of a host
that is asked in words what to answer (attack 15).

    header = "Authorization: Bearer {value}"               # the default
    header = "x-api-key: {value}"
    header = "Authorization: Basic {basic:x-access-token}"   # base64 of USER:VALUE
    field = "query:api_key"     # in the place of {{SECRET}} there: one parameter of the query,
    field = "form:token"        # one of a form,
    field = "json:token"        # one at the top of a JSON body,
    field = "path:/bot{value}/" # or the path's beginning
"""

from __future__ import annotations

import base64
import re
from fnmatch import fnmatchcase
from typing import Final

from broker.vault.errors import RulesError, VaultUsageError

__all__ = ["DEFAULT", "MODEL_HOSTS", "check", "check_field", "models", "name_of", "plain", "render"]

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
_FIELD: Final = re.compile(r"(query|form|json):[A-Za-z0-9_.\[\]-]{1,64}|path:/[A-Za-z0-9_.~/-]{0,64}\{value\}/?")
#: Hosts that answer in words to words; and `sdk` names others.
MODEL_HOSTS: Final = (
    "api.openai.com", "*.openai.azure.com", "*.services.ai.azure.com", "api.anthropic.com",
    "generativelanguage.googleapis.com", "*aiplatform.googleapis.com",
    "bedrock*.amazonaws.com", "openrouter.ai", "*.huggingface.co", "api.mistral.ai", "api.groq.com", "api.x.ai",
    "api.deepseek.com", "api.together.xyz", "api.fireworks.ai", "api.cohere.*", "api.perplexity.ai", "ollama.com",
)  # fmt: skip # several to a line
_VALUE: Final = re.compile(rb"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def check(text: str) -> str:
    """Return a rule's header text. Raises RulesError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise RulesError('a header is "NAME: {value}", with text around it, or "NAME: Basic {basic:USER}"')
    if match["name"].lower() in _NEVER:
        raise RulesError(f"the header {match['name']} can't carry a secret: it frames or routes the request")
    return text


def check_field(text: str) -> str:
    """Return a rule's field text. Raises RulesError."""
    if not _FIELD.fullmatch(text):
        raise RulesError('a field is "query:NAME", "form:NAME", "json:NAME" or "path:/BEFORE{value}/"')
    return text


def models(host: str) -> bool:
    """Return whether ``HOST`` or ``HOST:PORT`` is known as a model's API."""
    name = host.lower().removesuffix(".") if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()
    return any(fnmatchcase(name.removesuffix("."), pattern) for pattern in MODEL_HOSTS)


def plain(value: bytes) -> bytes:
    """Return what stands in a field; white space around the value is no part of it. Raises VaultUsageError."""
    return render("X: {value}", value)


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
