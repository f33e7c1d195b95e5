"""What an attempt's requests cost: how many there were, and the tokens that model APIs say they took, by model.

Made by the door; each request that passes in plain text has a tally of its own. Must never hold back or keep more of an
answer than the start of its account (accounts.py), and never take a missing account for nothing: such an answer is
counted as unknown, with its size and its request's, and so is one that never came.

Source: the OpenAI and the Anthropic API, for the paths and for what ends a stream (stream_options.include_usage); the
Gemini, Bedrock and Ollama APIs for the paths alone: their accounts are not read.
"""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final
from urllib.parse import unquote

from broker.egress.accounts import Reader

__all__ = ["Count", "Meter", "Tally", "Usage", "models_path"]

#: Between two reports of one door.
REPORT_EVERY_S: Final = 0.1
#: Models of one attempt that are told apart between two reports; a job names as many as it likes.
_MOST_MODELS: Final = 16
#: More than any sum that is told: beyond it a number has no portable form, and a host says what it likes.
_MOST_SUM: Final = 2**53
_MODEL_PATHS: Final = re.compile(
    r"/(chat/completions|completions|messages|responses|embeddings|api/chat|api/generate)"
    r"|/model/[^/]+/(converse|invoke)|:(stream)?generatecontent"
)
#: They count, and make nothing.
_COUNTING: Final = re.compile(r"[A-Za-z0-9/_-]*/(messages/count_tokens|responses/input_tokens)(\?.*)?")
_PARAMETER: Final = re.compile(r";[^/]*")
_PLAIN_PATH: Final = re.compile(r"[a-z0-9_-]*(?:/[a-z0-9_-]+)*")
#: Forms within forms of a path that are looked through.
_MOST_FORMS: Final = 4
#: They ask for nothing to be made.
_READING: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"DELETE"})
_EVENTS: Final = b"text/event-stream"
_OK: Final = range(200, 300)


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

    ``unknown_bytes``: the size of those answers. ``unknown_sent_bytes``: of their requests, where not even what went in
    was told. ``same``: how many equal requests to models came in a row, up to the last one; 0: it was not as the one
    before, or none was made.
    """

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unknown: int = 0
    unknown_bytes: int = 0
    same: int = 0
    unknown_sent_bytes: int = 0

    def add(self, other: Count) -> None:
        """Take another count in."""
        self.requests += other.requests
        self.tokens_in = min(self.tokens_in + other.tokens_in, _MOST_SUM)
        self.tokens_out = min(self.tokens_out + other.tokens_out, _MOST_SUM)
        self.unknown += other.unknown
        self.unknown_bytes += other.unknown_bytes
        self.unknown_sent_bytes += other.unknown_sent_bytes
        self.same = max(self.same, other.same)


def models_path(path: str) -> bool:
    """Return whether a request's path is one of a model's API, as any host may read it."""
    form = path.partition("?")[0].lower()
    if not _PLAIN_PATH.fullmatch(form):
        for _ in range(_MOST_FORMS):
            if _MODEL_PATHS.search(form) is not None:
                return True
            form = unquote(form).lower().replace("\\", "/")
        form = posixpath.normpath(_PARAMETER.sub("", form))
    return _MODEL_PATHS.search(form) is not None


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
        usage.tokens_in = min(usage.tokens_in + count.tokens_in, _MOST_SUM)
        usage.tokens_out = min(usage.tokens_out + count.tokens_out, _MOST_SUM)
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
        self._meter, self.method = meter, method
        asks = method.upper() not in _READING
        self._asks, self._of_model = asks, models_path(path) and not _COUNTING.fullmatch(path)
        #: What is asked of a model, path and body: the same again and again is a loop (node_agent/kernel/loops.py).
        self._asked = hashlib.sha256(path.encode("utf-8", "replace")) if asks and self._of_model else None
        #: A model that was asked works, also if its answer never comes.
        self._owed = self._asked is not None
        self._reader: Reader | None = None
        self._events = False
        self._sent = self._bytes = 0

    @property
    def model(self) -> str:
        """The model that the answer names, "" if none."""
        return "" if self._reader is None else self._reader.model

    def head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Look at an answer's head: is there an account to come?"""
        named = {name.lower(): value.strip().lower() for name, value in headers}
        kind = named.get(b"content-type", b"").partition(b";")[0].strip()
        self._events = kind == _EVENTS
        readable = self._events or kind == b"application/json" or kind.endswith(b"+json")
        if readable and named.get(b"content-encoding", b"identity") in (b"", b"identity"):
            self._reader = Reader(events=self._events)
        # A stream tells what was made for it, also if it is one of an answer that was asked for before.
        self._owed = status in _OK and (self._asked is not None or (self._events and (self._asks or self._of_model)))

    def sent(self, data: bytes) -> None:
        """Look at a part of the request's body."""
        if self._asked is not None:
            self._asked.update(data)
        self._sent += len(data)

    def feed(self, data: bytes) -> None:
        """Look at a part of an answer's body as the host sent it."""
        self._bytes += len(data)
        if self._reader is not None:
            self._reader.feed(data)

    def end(self, *, whole: bool) -> None:
        """The answer is over. ``whole``: all of it came, so that no other account can follow."""
        reader = self._reader
        tokens_in, tokens_out = (0, 0) if reader is None else reader.tokens
        count = Count(1, tokens_in, tokens_out)
        if self._owed and not (reader is not None and _told(reader, whole=whole, events=self._events)):
            count.unknown, count.unknown_bytes = 1, self._bytes
            count.unknown_sent_bytes = 0 if tokens_in else self._sent
        if self._asked is not None:
            count.same = self._meter.repeated(self._asked.digest())
        self._meter.count(self.model, count)


def _told(reader: Reader, *, whole: bool, events: bool) -> bool:
    """Return whether an answer has told all its tokens. Who leaves in the middle has heard a first account at most."""
    ended = whole or (events and reader.finished)
    return reader.accounts > 0 and ended and not reader.spoiled and not reader.missing
