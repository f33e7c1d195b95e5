"""Which requests a proxied value may go with: method and path, as the vault's rule lists them. Pure.

Called by rules.py (checks the text) and leases.py (does this request fit?). Must never take a path for one that a host
may read as another: what is unclear fits nothing.

    requests = ["GET /v1/models", "POST /v1/chat/*"]      # * and ? match within the whole path; "* /v1/*" any method
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

from broker.vault.errors import RulesError

__all__ = ["check", "fits"]

_FORM: Final = re.compile(r"(?:\*|[A-Z][A-Z-]{0,31}) /[\x21-\x7e]*")
_LONGEST: Final = 4096
#: Steps up, empty steps, path parameters, and hidden forms of what separates: hosts differ in what they make of these.
_UNCLEAR: Final = re.compile(r"//|/\.{1,2}(?:/|$)|[\\;#]|%(?:00|2[3ef]|3[bf]|5c|25)", re.IGNORECASE)


def check(pattern: str) -> str:
    """Return one entry of a rule's list. Raises RulesError."""
    if not _FORM.fullmatch(pattern):
        raise RulesError('requests are "METHOD /PATH", such as "GET /v1/*"; "* /v1/*" for any method')
    return pattern


def fits(request: str, bounds: Sequence[Sequence[str]]) -> bool:
    """Return whether ``METHOD TARGET`` fits an entry of every list; a query counts for nothing."""
    if not bounds:
        return True
    method, _, target = request.partition(" ")
    path = target.partition("?")[0]
    if not path.startswith("/") or len(path) > _LONGEST or _UNCLEAR.search(path):
        return False
    return all(any(_covers(pattern, method, path) for pattern in one) for one in bounds)


def _covers(pattern: str, method: str, path: str) -> bool:
    name, _, where = pattern.partition(" ")
    return name in {"*", method} and fnmatchcase(path, where)
