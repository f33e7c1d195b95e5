"""Letters: what one job writes to another through a mailbox or a topic of their tenant, and the word that it was taken.

Called by node_agent/kernel/mail.py (writes, signs and checks them) and grants (names of boxes). Must never carry a
sender that a job named: the sending node fills it in and signs the whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from runner.wire import ids
from runner.wire.errors import GrammarError, RecordError

__all__ = [
    "MAX_LETTER_BYTES",
    "MAX_LIFE_S",
    "OWN_BOX",
    "TOPIC",
    "Letter",
    "Taken",
    "check_box",
    "is_topic",
    "reply_box",
]

#: Largest signed letter: a body of 32 KiB and its head.
MAX_LETTER_BYTES: Final = 36 * 1024
#: Longest life of a letter that nobody takes, in seconds.
MAX_LIFE_S: Final = 7 * 86_400
#: A topic is ``topic/NAME``; any other name is a mailbox.
TOPIC: Final = "topic/"
#: What a job calls the box of answers to its own letters.
OWN_BOX: Final = "@"
_BOX: Final = re.compile(r"(topic/)?[a-zA-Z0-9][a-zA-Z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class Letter:
    """One letter. ``body`` is plain JSON. Times are Unix milliseconds, UTC.

    ``sender``: the job that wrote it, ``attempt`` its attempt, ``node`` where that ran. ``until_ms``: void after it.
    ``answer``: the sender waits for one. ``corr``: the id of the letter that this one answers. ``confirm``: the sender
    waits for the word that it was taken.
    """

    id: str
    tenant: str
    box: str
    sender: str
    attempt: int
    node: str
    at_ms: int
    until_ms: int
    body: object
    answer: bool = False
    confirm: bool = False
    corr: str = ""

    def __post_init__(self) -> None:
        if ids.tenant_of(self.sender) != self.tenant:
            raise RecordError("the sender is a job of another tenant", path="sender")


@dataclass(frozen=True, slots=True)
class Taken:
    """A receiver's word that it is done with a letter, signed by the receiver's node."""

    letter: str
    tenant: str
    box: str
    taker: str
    attempt: int
    node: str


def check_box(name: str) -> str:
    """Return the name of a mailbox or topic that a grant may hold. Raises GrammarError."""
    if not _BOX.fullmatch(name):
        raise GrammarError("a mailbox is NAME and a topic topic/NAME: 1 to 64 of letters, digits, _ . and -")
    return name


def is_topic(box: str) -> bool:
    """Return whether each subscriber of it gets each letter, instead of one receiver."""
    return box.startswith(TOPIC)


def reply_box(job_id: str) -> str:
    """Return where answers to a job's letters go. No grant names it. Raises GrammarError."""
    return OWN_BOX + ids.check_job_id(job_id)
