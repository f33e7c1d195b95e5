"""What mail is asked with, and how a letter is made of it.

Called by mail. Must never let a body or a life over its bounds become a letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.mailstore import Given
from node_agent.run import now_ms
from runner.wire import codec, ids
from runner.wire.calls import MAX_DATA_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.errors import CodecError
from runner.wire.letters import MAX_LIFE_S, Letter

__all__ = ["ANSWER_LIFE_S", "Ask", "Nothing", "One", "Receive", "Reply", "Send", "letter_of", "shown"]

#: How long an answer lies in its box, in seconds.
ANSWER_LIFE_S: Final = 86_400.0
#: A body stands some levels deep in what carries it.
_WRAPS: Final = 8


@dataclass(frozen=True, slots=True)
class Send:
    """``wait_s``: how long to wait for the receiver's acknowledgement (0: not at all). ``life_s``: void after it."""

    box: str
    body: object
    wait_s: float = 0.0
    life_s: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A letter that wants an answer within ``wait_s``; it is void after that."""

    box: str
    body: object
    wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Receive:
    """``box``: ``@`` for the answers to own letters. ``count``: at most so many letters."""

    box: str
    wait_s: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True)
class One:
    """One letter that this job holds."""

    box: str
    id: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one letter that this job holds."""

    box: str
    id: str
    body: object


@dataclass(frozen=True, slots=True)
class Nothing:
    """No fields."""


def letter_of(
    node: str,
    caller: Caller,
    box: str,
    body: object,
    life_s: float,
    *,
    answer: bool = False,
    confirm: bool = False,
    corr: str = "",
) -> Letter:
    """Return a letter of this caller's. Raises CallError: its body or its time is over the bounds."""
    if not 0 < life_s <= MAX_LIFE_S:
        raise CallError(ErrorCode.BAD_REQUEST, f"life_s is more than 0 and at most {MAX_LIFE_S} seconds")
    wrapped = body
    for _ in range(_WRAPS):
        wrapped = [wrapped]
    try:
        size = len(codec.dump(wrapped)) - 2 * _WRAPS
    except CodecError as error:
        raise CallError(ErrorCode.BAD_REQUEST, f"the body: {error}") from None
    if size > MAX_DATA_BYTES:
        raise CallError(ErrorCode.TOO_LARGE, f"a body has at most {MAX_DATA_BYTES} bytes as JSON, not {size}")
    at_ms = now_ms()
    until_ms = at_ms + round(life_s * 1000)
    words = (ids.new_nonce(), caller.tenant, box, caller.job, caller.run.attempt, node, at_ms, until_ms, body)
    return Letter(*words, answer=answer, confirm=confirm, corr=corr)


def shown(given: Given, letter: Letter) -> Json:
    """Return a letter as its receiver sees it."""
    return {
        "id": given.id,
        "letter": letter.id,
        "from": letter.sender,
        "attempt": letter.attempt,
        "at_ms": letter.at_ms,
        "times": given.times,
        "answer": letter.answer,
        "body": letter.body,  # type: ignore[dict-item]  # plain JSON, as it was read
        **({"corr": letter.corr} if letter.corr else {}),
    }
