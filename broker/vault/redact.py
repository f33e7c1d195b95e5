"""Takes values out of a stream of bytes: as they are, and in the forms that careless programs give them.

Called by the scrubber process with the values of one live job, and by the egress process for what hosts answer. Must
never promise more than it can: a program that wants to get a value past it can (reversed in pieces, encrypted); this is
for accidents. It holds back an end that a value may begin with, so that one split over two writes is found, and nothing
else: a prompt is seen at once.
"""

from __future__ import annotations

import base64
import html
import json
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["MIN_FORM_BYTES", "Redactor", "forms", "open_end"]

#: A shorter text would be found in half of all output, and its mask would say what it was.
MIN_FORM_BYTES: Final = 6
#: A line of a multi-line value (a key file) counts alone from this length on.
MIN_LINE_BYTES: Final = 16
#: What programs leave as it is: nothing; a path; a step of one and a path by RFC 3986; by the URL standard; what base64
#: has, in part.
_STEP: Final = "!$&'()*+,;=:@"
_LEFT: Final = ("", "/", _STEP, f"{_STEP}/", f"{_STEP}/?[]|^%\\", "+", "=", "+=", "+/", "=/", "+/=")
_HEX: Final = re.compile(r"%[0-9A-F]{2}")


def forms(value: bytes) -> frozenset[bytes]:
    """Return the texts that give ``value`` away: raw, hex, base64 at each phase, percent, JSON, repr, HTML, lines."""
    found = {value, value.strip(), value[::-1], value.hex().encode(), value.hex().upper().encode()}
    for phase in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(bytes(phase) + value)
            # Only characters that are the value's alone: at both ends one may hold a neighbour's bits too.
            found.add(text[(8 * phase + 5) // 6 : (8 * (phase + len(value))) // 6])
    found |= _percent(value)
    try:
        text_form = value.decode()
    except UnicodeDecodeError:
        found.add(repr(value)[2:-1].encode())
    else:
        found |= {json.dumps(text_form)[1:-1].encode(), json.dumps(text_form, ensure_ascii=False)[1:-1].encode()}
        found |= {html.escape(text_form).encode(), repr(text_form)[1:-1].encode("utf-8", "backslashreplace")}
        # JSON in JSON, as agents' tool calls have it; a result is JSON by itself.
        found |= {_in_json(form) for form in tuple(found)}
        found |= {text_form.encode("utf-16-le"), text_form.encode("utf-16-be")}
    found |= {line.strip() for line in value.split(b"\n") if len(line.strip()) >= MIN_LINE_BYTES}
    return frozenset(form for form in found if len(form) >= MIN_FORM_BYTES)


def _percent(value: bytes) -> set[bytes]:
    """Return its forms in addresses: programs differ in what they leave as it is there."""
    texts = {urllib.parse.quote_from_bytes(value, safe=safe) for safe in _LEFT}
    texts |= {urllib.parse.quote_plus(value), urllib.parse.quote_plus(value, safe="/")}
    texts |= {_HEX.sub(lambda found: found[0].lower(), text) for text in texts}
    return {form.encode() for text in texts for form in (text, html.escape(text))}


def _in_json(form: bytes) -> bytes:
    return json.dumps(form.decode("utf-8", "replace"))[1:-1].encode()


def open_end(text: bytes, looked_for: Iterable[bytes]) -> int:
    """Return the length of the longest end of ``text`` that one of the forms begins with, and is longer than."""
    longest = 0
    for form in looked_for:
        at = text.find(form[:1], max(0, len(text) - len(form) + 1))
        while at >= 0 and len(text) - at > longest:
            if form.startswith(text[at:]):
                longest = len(text) - at
                break
            at = text.find(form[:1], at + 1)
    return longest


class Redactor:
    """Scrubs one stream. ``hits`` counts what was masked, ``found`` says of which secrets."""

    def __init__(self, secrets: Mapping[str, bytes]) -> None:
        """``secrets``: name → value. A value of fewer than MIN_FORM_BYTES is not looked for."""
        pairs = sorted(
            ((form, name) for name, value in secrets.items() for form in forms(value)),
            key=lambda pair: (-len(pair[0]), pair),
        )
        self._names = dict(reversed(pairs))
        self._pattern = re.compile(b"|".join(re.escape(form) for form, _ in pairs)) if pairs else None
        self._kept = b""
        self.hits = 0
        #: The secrets that were found, in the order of their first time.
        self.found: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"Redactor({len(self._names)} forms)"

    def feed(self, chunk: bytes) -> bytes:
        """Return what can be let go: all but an end that may be the start of a value."""
        return self._pass(chunk, last=False)

    def finish(self) -> bytes:
        """Return the rest of the stream."""
        return self._pass(b"", last=True)

    def whole(self, data: bytes) -> bytes:
        """Return ``data`` scrubbed, apart from the stream."""
        return self._pattern.sub(self._mask, data) if self._pattern is not None else data

    def _mask(self, match: re.Match[bytes]) -> bytes:
        self.hits += 1
        name = self._names[match[0]]
        self.found[name] = None
        return f"[secret:{name}]".encode()

    def _pass(self, chunk: bytes, *, last: bool) -> bytes:
        data = self._kept + chunk
        if self._pattern is None:
            return data
        cut = len(data) if last else len(data) - open_end(data, self._names)
        out, at = [], 0
        for match in self._pattern.finditer(data):
            if match.start() >= cut:
                break
            out += [data[at : match.start()], self._mask(match)]
            at = match.end()
        cut = max(cut, at)
        out.append(data[at:cut])
        self._kept = data[cut:]
        for match in self._pattern.finditer(self._kept):
            # What is held back may be masked only with the next piece, but it was shown.
            self.found[self._names[match[0]]] = None
        return b"".join(out)
