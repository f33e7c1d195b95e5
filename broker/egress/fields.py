"""A proxied value in the one field that the vault's rule names, where the job has put its placeholder. Pure.

Called by keyed.py for each request that has leave. Must never put a value into any other place: a placeholder elsewhere
travels as it is, and so does one that is part of a longer text (attack 15).

Source: RFC 3986 (path and query), the URL standard's application/x-www-form-urlencoded, RFC 8259 (JSON).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from broker.egress.errors import BadRequestError

__all__ = ["Field", "body_kind", "in_body", "in_target"]

_FORM: Final = b"application/x-www-form-urlencoded"
_JSON: Final = b"application/json"
#: What may stand in a segment of a path as it is.
_SEGMENT: Final = "-._~!$&'()*+,;=:@"
_WHERE: Final = "{value}"


@dataclass(frozen=True, slots=True)
class Field:
    """One value and its place: ``query:NAME``, ``form:NAME``, ``json:NAME`` or ``path:/BEFORE{value}/``."""

    secret: str
    place: str
    value: bytes

    def __repr__(self) -> str:
        return f"Field({self.secret}, {self.place})"

    @property
    def kind(self) -> str:
        """What of the request it is in."""
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        """The field's name, or the path's beginning."""
        return self.place.partition(":")[2]

    @property
    def sent(self) -> bytes:
        """The value as it stands in a request."""
        if self.kind == "path":
            return quote(self.value, safe=_SEGMENT).encode()
        return self.value if self.kind == "json" else quote_plus(self.value).encode()

    @property
    def sign(self) -> str:
        """The placeholder."""
        return "{{" + self.secret + "}}"


def in_target(target: str, fields: Sequence[Field]) -> str:
    """Return a request's target with the values that belong into its path or its query."""
    path, mark, query = target.partition("?")
    for field in fields:
        if field.kind == "path":
            path = _in_path(path, field)
        elif field.kind == "query":
            query = _in_pairs(query, field)
    return path + mark + query


def body_kind(kinds: Sequence[bytes], fields: Sequence[Field]) -> str:
    """Return which fields a body of these content types may hold: form, json, or "" for none of these.

    More than one type, or another charset: a host may read the body as something else than it is read here.
    """
    if len(kinds) != 1:
        return ""
    plain, _, more = kinds[0].lower().partition(b";")
    if more.strip(b" \t;").replace(b'"', b"") not in (b"", b"charset=utf-8"):
        return ""
    found = {_FORM: "form", _JSON: "json"}.get(plain.strip(), "")
    return found if any(field.kind == found for field in fields) else ""


def in_body(body: bytes, kind: str, fields: Sequence[Field]) -> bytes:
    """Return a request's whole body with the values that belong into it. Raises BadRequestError: it is no such body."""
    mine = [field for field in fields if field.kind == kind]
    if not any(_held(body, field) for field in mine):
        return body
    if kind == "form":
        text = body.decode("latin-1")
        for field in mine:
            text = _in_pairs(text, field)
        return text.encode("latin-1")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequestError("the body is no JSON, so that its field can't be found") from None
    if not isinstance(found, dict):
        return body
    changed = [field for field in mine if found.get(field.name) == field.sign]
    if not changed:
        return body
    found.update({field.name: field.value.decode("ascii") for field in changed})
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _held(body: bytes, field: Field) -> bool:
    """Return whether the placeholder may be in a body; its braces may be escaped."""
    return field.secret.encode("ascii") in body


def _in_path(path: str, field: Field) -> str:
    before, _, after = field.name.partition(_WHERE)
    if not path.startswith(before):
        return path
    rest = path[len(before) :]
    sign, slash, more = rest.partition("/")
    if unquote(sign) != field.sign or (after and not slash):
        return path
    return before + field.sent.decode("ascii") + slash + more


def _in_pairs(text: str, field: Field) -> str:
    pairs = text.split("&")
    for index, pair in enumerate(pairs):
        name, equal, value = pair.partition("=")
        if equal and unquote_plus(value) == field.sign and unquote_plus(name) == field.name:
            pairs[index] = f"{name}={field.sent.decode('ascii')}"
            break
    return "&".join(pairs)
