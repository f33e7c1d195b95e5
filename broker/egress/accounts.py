"""What the text of a model's API says of itself: the tokens under ``"usage"`` and the model's name. Pure.

Called by meter.py with requests and answers as they pass. Must never hold more of a text than the start of an account,
nor take for one what somebody has written into the text: neither in a string, nor deeper than where these APIs put it.
Schemas of tools, metadata and what a model gives a tool come back as JSON of the job's own making.

Only the place of a name is worked out, by counting brackets outside strings; each line of a stream is a text by itself.

Source: RFC 8259; the HTML standard's server-sent events; the OpenAI API (chat completions, responses, embeddings:
prompt_tokens, completion_tokens, input_tokens, output_tokens) and the Anthropic Messages API (message_start,
message_delta, and input that was written to or read from a cache, which input_tokens leaves out).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

__all__ = ["Reader"]

#: They begin with plain text, which is found fast.
_ACCOUNT: Final = re.compile(rb'"usage"\s{0,16}:\s{0,16}(?=\{)')
_NO_ACCOUNT: Final = re.compile(rb'"usage"\s{0,16}:\s{0,16}null')
_MODEL: Final = re.compile(rb'"model"\s{0,16}:\s{0,16}"([!#-\[\]-~]{1,128})"')
#: An account stands at the top of an answer; in an event also in the one object that it is about.
_TOP: Final = 1
_IN_EVENT: Final = 2
#: Longest account that is read, and the most candidates in what comes at once.
_ACCOUNT_BYTES: Final = 4096
_MOST: Final = 256
#: The start of an account, or of a model's name, that the next part may go on with.
_OPEN_BYTES: Final = 256
_TAIL_BYTES: Final = 64
_MOST_TOKENS: Final = 10**9
_IN: Final = ("prompt_tokens", "input_tokens")
_BESIDE: Final = ("cache_creation_input_tokens", "cache_read_input_tokens")
_OUT: Final = ("completion_tokens", "output_tokens")
#: After these events nothing follows in a stream.
_LAST: Final = frozenset({b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"})
_DONE: Final = b"data:[DONE]"
_DECODER: Final = json.JSONDecoder()


class Reader:
    """One text in parts. ``events``: it is a stream of events, each line with a text of its own.

    ``tokens``: in and out; of several accounts the largest figures, because streams repeat and grow them.
    ``accounts``: how many were read. ``spoiled``: there were more than are looked at. ``missing``: the text says that
    its account is null.
    """

    def __init__(self, *, events: bool = False) -> None:
        self._events = events
        self._deepest = _IN_EVENT if events else _TOP
        self._kept = b"\n" if events else b""
        #: Where what is kept begins: how deep, in a string, behind a backslash.
        self._depth = 0
        self._quoted = self._escaped = False
        self._event = b""
        self._tail = b""
        self.tokens = (0, 0)
        self.accounts = 0
        self.spoiled = self.missing = False
        self.model = ""

    @property
    def finished(self) -> bool:
        """Whether a stream has said its last word, so that no other account follows."""
        last = self._tail.rstrip()
        line = last[last.rfind(b"\n") + 1 :].replace(b" ", b"")
        return line == _DONE or (self._event in _LAST and self._tail.endswith((b"\n\n", b"\n\r\n")))

    def feed(self, data: bytes) -> None:
        """Read the next part."""
        text = self._kept + data if self._kept else data
        if self._events:
            self._note_event(text, data)
        at = done = 0
        for found in self._candidates(text):
            start = found.start()
            if start < done:
                continue
            self._advance(text[at:start])
            at = start
            if self._quoted or self._escaped or self._depth > self._deepest:
                continue
            done = self._read(text, found)
            if done > len(text):
                # It goes on in the next part.
                self._kept = text[start:]
                return
        cut = max(at, done, len(text) - _OPEN_BYTES)
        self._advance(text[at:cut])
        self._kept = text[cut:]

    def _candidates(self, text: bytes) -> Iterator[re.Match[bytes]]:
        found = list(islice(_ACCOUNT.finditer(text), _MOST))
        self.spoiled = self.spoiled or len(found) == _MOST
        others = [] if self.model else list(islice(_MODEL.finditer(text), _MOST))
        if not self._events:
            others += islice(_NO_ACCOUNT.finditer(text), _MOST)
        return iter(sorted(found + others, key=lambda match: match.start()) if others else found)

    def _read(self, text: bytes, found: re.Match[bytes]) -> int:
        """Read what was found; return its end, beyond the text's if more of it has to come."""
        if found.re is _MODEL:
            self.model = self.model or found[1].decode("ascii")
            return found.end()
        if found.re is _NO_ACCOUNT:
            self.missing = True
            return found.end()
        account, done = _object_at(text, found.end())
        if account is not None:
            self._take(account)
        return done

    def _take(self, account: dict[str, object]) -> None:
        numbers = {name: value for name, value in account.items() if type(value) is int and 0 <= value <= _MOST_TOKENS}
        found_in = max((numbers[name] for name in _IN if name in numbers), default=None)
        found_out = max((numbers[name] for name in _OUT if name in numbers), default=None)
        if found_in is None and found_out is None:
            return
        whole_in = (found_in or 0) + sum(numbers.get(name, 0) for name in _BESIDE)
        self.accounts += 1
        before_in, before_out = self.tokens
        self.tokens = max(before_in, whole_in), max(before_out, found_out or 0)

    def _advance(self, part: bytes) -> None:
        """Go over a part: how deep is what follows, and is it in a string?"""
        line = part.rfind(b"\n") + 1 if self._events else 0
        if line:
            part, self._depth, self._quoted, self._escaped = part[line:], 0, False, False
        if not part:
            return
        if self._escaped:
            part = part[1:]
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._escaped = part.endswith(b"\\")
        pieces = part.split(b'"')
        plain = b"".join(pieces[1::2] if self._quoted else pieces[::2])
        self._depth += plain.count(b"{") + plain.count(b"[") - plain.count(b"}") - plain.count(b"]")
        self._quoted ^= len(pieces) % 2 == 0

    def _note_event(self, text: bytes, data: bytes) -> None:
        begin = text.rfind(b"\nevent:")
        end = text.find(b"\n", begin + 1)
        if begin >= 0 and end >= 0:
            self._event = text[begin + len(b"\nevent:") : end].strip()
        self._tail = (data if len(data) >= _TAIL_BYTES else self._tail + data)[-_TAIL_BYTES:]


def _object_at(text: bytes, at: int) -> tuple[dict[str, object] | None, int]:
    """Return the object that begins there, and its end: beyond the text's if more of it has to come."""
    part = text[at : at + _ACCOUNT_BYTES].decode("ascii", "replace")
    try:
        found, size = _DECODER.raw_decode(part)
    except (ValueError, RecursionError):
        return None, len(text) + 1 if len(text) - at < _ACCOUNT_BYTES else at
    return (found if isinstance(found, dict) else None), at + size
