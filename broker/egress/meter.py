"""What an attempt's requests cost: how many there were, and the tokens that model APIs say they took, by model.

Made by the door; each request that passes in plain text has a tally of its own. Must never hold back or keep more of an
answer than the start of its account, and never take a missing account for nothing: such an answer is counted as
unknown, with its size.

An account is the object under ``"usage"`` in JSON or in an event of a stream. A quote inside a JSON string is escaped,
so what a model writes can't be taken for one; of several the largest figures count, because streams repeat and grow
them, and an object that a host gives back must not make them smaller.

Source: the OpenAI API (chat completions, responses, embeddings: prompt_tokens, completion_tokens, input_tokens,
output_tokens, stream_options.include_usage) and the Anthropic Messages API (message_start, message_delta, and input
that was written to or read from a cache, which input_tokens leaves out).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Final

__all__ = ["Count", "Meter", "Tally", "Usage", "models_path"]

#: Between two reports of one door.
REPORT_EVERY_S: Final = 0.1
#: Models of one attempt that are told apart between two reports; a job names as many as it likes.
_MOST_MODELS: Final = 16
#: They begin with plain text, which is found fast; what may stand before is looked at afterwards.
_ACCOUNT: Final = re.compile(rb'"usage"\s{0,16}:\s{0,16}(?=\{)')
_MODEL: Final = re.compile(rb'"model"\s{0,16}:\s{0,16}"([!#-\[\]-~]{1,128})"')
_BEFORE_A_KEY: Final = frozenset(b"{, \t\r\n")
#: Longest account that is read, and the most of them in what comes at once.
_ACCOUNT_BYTES: Final = 4096
_MOST_ACCOUNTS: Final = 256
#: The start of an account, or of a model's name, that the next part may go on with.
_OPEN_BYTES: Final = 256
_MOST_TOKENS: Final = 10**12
_IN: Final = ("prompt_tokens", "input_tokens")
_BESIDE: Final = ("cache_creation_input_tokens", "cache_read_input_tokens")
_OUT: Final = ("completion_tokens", "output_tokens")
_MODEL_PATHS: Final = re.compile(r"/(chat/completions|completions|messages|responses|embeddings)/?(\?.*)?")
_EVENTS: Final = b"text/event-stream"
_OK: Final = range(200, 300)
_DECODER: Final = json.JSONDecoder()


@dataclass(slots=True)
class Usage:
    """What one attempt did through its door, in all.

    ``requests``: HTTP requests and tunnels. ``keyed``: requests that carried a secret. ``masked``: values that hosts
    gave back and that were covered. ``unknown``: answers of models that did not say how many tokens they took.
    """

    connections: int = 0
    refused: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    keyed: int = 0
    masked: int = 0
    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unknown: int = 0


@dataclass(slots=True)
class Count:
    """What was used with one model ("": none was named). ``unknown``: answers of a model without an account.

    ``unknown_bytes``: the size of those answers. ``same``: how many equal requests to models came in a row, up to the
    last one; 0: it was not as the one before.
    """

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unknown: int = 0
    unknown_bytes: int = 0
    same: int = 0

    def add(self, other: Count) -> None:
        """Take another count in."""
        self.requests += other.requests
        self.tokens_in += other.tokens_in
        self.tokens_out += other.tokens_out
        self.unknown += other.unknown
        self.unknown_bytes += other.unknown_bytes
        self.same = max(self.same, other.same)


def models_path(path: str) -> bool:
    """Return whether a request's path is one of a model's API."""
    return _MODEL_PATHS.search(path) is not None


class Meter:
    """One door's counts. ``tell`` is given a model and its count since the last report; False: ask again later."""

    def __init__(self, usage: Usage, tell: Callable[[str, dict[str, int]], bool]) -> None:
        """``usage``: the totals, which the door shares."""
        self._usage, self._tell = usage, tell
        self._open: dict[str, Count] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._told_s = 0.0
        self._last, self._row = b"", 0
        self._loop = asyncio.get_running_loop()

    def count(self, model: str, count: Count) -> None:
        """Add what one request took; it is told at once, or with others a moment later."""
        usage = self._usage
        usage.requests += count.requests
        usage.tokens_in += count.tokens_in
        usage.tokens_out += count.tokens_out
        usage.unknown += count.unknown
        if model not in self._open and len(self._open) >= _MOST_MODELS:
            model = ""
        self._open.setdefault(model, Count()).add(count)
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._told_s + REPORT_EVERY_S, self._loop.time()), self.flush)

    def repeated(self, digest: bytes) -> int:
        """Return how many equal requests to models have come in a row now; 0: this one is not as the one before."""
        self._row = self._row + 1 if digest == self._last else 1
        self._last = digest
        return self._row if self._row > 1 else 0

    def flush(self) -> None:
        """Tell everything that is not told yet. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_s = self._loop.time()
        for model, count in tuple(self._open.items()):
            if not self._tell(model, asdict(count)):
                self._timer = self._loop.call_later(REPORT_EVERY_S, self.flush)
                return
            del self._open[model]

    def close(self) -> None:
        """Tell the rest, and nothing any more. Idempotent."""
        self.flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Tally:
    """One request and its answer. ``head``, ``feed``, then ``end``."""

    def __init__(self, meter: Meter, method: bytes, path: str) -> None:
        self._meter = meter
        self._asks = method == b"POST"
        #: "": the path is none of a model's.
        self._place = found[1] if (found := _MODEL_PATHS.search(path)) is not None else ""
        #: What is asked of a model, path and body: the same again and again is a loop (node_agent/kernel/loops.py).
        self._asked = hashlib.sha256(path.encode("utf-8", "replace")) if self._asks and self._place else None
        self._reads = self._owed = False
        self._kept = b""
        self._tokens = (0, 0)
        self._accounts = 0
        self._awaited = 1
        self._spoiled = False
        self._bytes = 0
        self.model = ""

    def head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Look at an answer's head: is there an account to come?"""
        named = {name.lower(): value.strip().lower() for name, value in headers}
        kind = named.get(b"content-type", b"").partition(b";")[0].strip()
        events = kind == _EVENTS
        readable = events or kind == b"application/json" or kind.endswith(b"+json")
        self._reads = readable and named.get(b"content-encoding", b"identity") in (b"", b"identity")
        self._owed = self._asks and status in _OK and (events or bool(self._place))
        # A stream of messages begins with one and ends with another; the rest is in an answer's last words.
        self._awaited = 2 if events and self._place == "messages" else 1

    def sent(self, data: bytes) -> None:
        """Look at a part of the request's body."""
        if self._asked is not None:
            self._asked.update(data)

    def feed(self, data: bytes) -> None:
        """Look at a part of an answer's body as the host sent it."""
        self._bytes += len(data)
        if not self._reads:
            return
        text = self._kept + data if self._kept else data
        if not self.model:
            named = next((match for match in islice(_MODEL.finditer(text), _MOST_ACCOUNTS) if _is_key(match)), None)
            self.model = "" if named is None else named[1].decode("ascii")
        self._kept = self._searched(text)

    def _searched(self, text: bytes) -> bytes:
        """Read the accounts in a text; return its end, where another one may begin."""
        done = 0
        found = 0
        for match in islice(_ACCOUNT.finditer(text), _MOST_ACCOUNTS):
            found += 1
            if match.end() < done or not _is_key(match):
                continue
            account, done = _object_at(text, match.end())
            if account is not None:
                self._take(account)
            elif done > len(text):
                # It goes on in the next part, and what stands before tells that it is a key.
                return text[match.start() - 1 :]
        self._spoiled = self._spoiled or found == _MOST_ACCOUNTS
        # Not what was read already: it would be read again.
        return text[max(done, len(text) - _OPEN_BYTES) :]

    def end(self, *, whole: bool) -> None:
        """The answer is over. ``whole``: all of it came, so that no other account can follow."""
        count = Count(1, *self._tokens)
        if self._spoiled or (self._owed and (not self._accounts or (self._accounts < self._awaited and not whole))):
            count.unknown, count.unknown_bytes = 1, self._bytes
        if self._asked is not None:
            count.same = self._meter.repeated(self._asked.digest())
        self._meter.count(self.model, count)

    def _take(self, account: dict[str, object]) -> None:
        numbers = {name: value for name, value in account.items() if type(value) is int and 0 <= value <= _MOST_TOKENS}
        found_in = max((numbers[name] for name in _IN if name in numbers), default=None)
        found_out = max((numbers[name] for name in _OUT if name in numbers), default=None)
        if found_in is None and found_out is None:
            return
        whole_in = (found_in or 0) + sum(numbers.get(name, 0) for name in _BESIDE)
        self._accounts += 1
        before_in, before_out = self._tokens
        self._tokens = max(before_in, whole_in), max(before_out, found_out or 0)


def _is_key(match: re.Match[bytes]) -> bool:
    """Return whether what was found begins where a key may: not in the middle of a text."""
    return match.start() > 0 and match.string[match.start() - 1] in _BEFORE_A_KEY


def _object_at(text: bytes, at: int) -> tuple[dict[str, object] | None, int]:
    """Return the object that begins there, and its end: beyond the text's if more of it has to come."""
    part = text[at : at + _ACCOUNT_BYTES].decode("ascii", "replace")
    try:
        found, size = _DECODER.raw_decode(part)
    except (ValueError, RecursionError):
        return None, len(text) + 1 if len(text) - at < _ACCOUNT_BYTES else at
    return (found if isinstance(found, dict) else None), at + size
