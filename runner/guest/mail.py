"""Mail for jobs: `runner.mail`. Mailboxes and topics that the job was granted, on whatever node the others run.

Called by jobs. Must never acknowledge a letter by itself: what a job did not say it is done with comes again, to it or
to another one, and after five times to nobody.

    from runner import mail

    mail.send("results", {"page": 3})
    for letter in mail.receive("tasks", wait=30):
        ...
        letter.ack()                                  # or letter.reply(…), letter.back()
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Final, cast

from runner.guest.calls import call
from runner.wire.codec import Json

__all__ = ["Letter", "Sent", "ask", "boxes", "command", "receive", "send"]

_USAGE: Final = (
    "usage: ringfence-guest mail send BOX JSON | ask BOX JSON [SECONDS] | receive BOX [SECONDS] | ack BOX ID | "
    "reply BOX ID JSON | keep BOX ID | back BOX ID\n"
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A letter that was sent. ``by``: the job that said it is done with it, if that was waited for and came in time.

    ``subscribers``: of a topic.
    """

    id: str
    by: str | None = None
    subscribers: int = 0


@dataclass(frozen=True, slots=True)
class Letter:
    """A letter that this job holds. ``sender``, ``attempt``: the node's word. ``times``: how often it was given out.

    ``asks``: its sender waits for an answer. ``corr``: of an answer, the id of the letter that it answers.
    """

    id: str
    box: str
    letter: str
    sender: str
    attempt: int
    at_ms: int
    times: int
    asks: bool
    body: Json
    corr: str = ""

    def ack(self) -> None:
        """Say that the job is done with it. Raises CallRefused: CONFLICT, somebody else has it by now."""
        call("mail.ack", box=self.box, id=self.id)

    def reply(self, body: Json) -> None:
        """Answer it, and say that the job is done with it. Raises CallRefused."""
        call("mail.reply", box=self.box, id=self.id, body=body)

    def keep(self) -> None:
        """Hold it for another minute. Raises CallRefused: CONFLICT, somebody else has it by now."""
        call("mail.keep", box=self.box, id=self.id)

    def back(self) -> None:
        """Give it back: whoever asks next gets it. Raises CallRefused."""
        call("mail.back", box=self.box, id=self.id)


def send(box: str, body: Json, *, confirm: float = 0.0, life: float = 86_400.0) -> Sent:
    """Send a letter; it is void after ``life`` seconds. Raises CallRefused: DENIED, QUOTA (the box is full), ….

    ``confirm``: wait so many seconds for the receiver's acknowledgement; without one ``by`` stays None, and the letter
    stands.
    """
    found = cast("dict[str, Json]", call("mail.send", box=box, body=body, wait_s=float(confirm), life_s=float(life)))
    by = found.get("by")
    return Sent(str(found["id"]), None if by is None else str(by), cast("int", found.get("subscribers", 0)))


def ask(box: str, body: Json, *, timeout: float = 30.0) -> Json:
    """Send a letter and return the answer to it. Raises CallRefused: TIMEOUT, nobody answered."""
    return cast("dict[str, Json]", call("mail.ask", box=box, body=body, wait_s=float(timeout)))["body"]


def receive(box: str, *, wait: float = 0.0, count: int = 1) -> list[Letter]:
    """Take up to ``count`` letters, waiting ``wait`` seconds for the first. A topic is subscribed by the first call.

    ``box`` ``"@"``: answers to this job's letters that came too late. Raises CallRefused.
    """
    found = cast("dict[str, list[dict[str, Json]]]", call("mail.receive", box=box, wait_s=float(wait), count=count))
    return [_letter(box, row) for row in found["letters"]]


def boxes() -> list[dict[str, Json]]:
    """Count what the job's boxes hold. Raises CallRefused."""
    return cast("list[dict[str, Json]]", call("mail.boxes"))


def command(words: list[str]) -> int:
    """Carry out `ringfence-guest mail …`; return the exit code. Raises CallRefused."""
    op, *rest = words or [""]
    try:
        if op == "send" and len(rest) == 2:
            sys.stdout.write(send(rest[0], json.loads(rest[1])).id + "\n")
            return 0
        if op == "ask" and len(rest) in (2, 3):
            sys.stdout.write(json.dumps(ask(rest[0], json.loads(rest[1]), timeout=float(*rest[2:] or ("30",)))) + "\n")
            return 0
        if op == "receive" and len(rest) in (1, 2):
            return _received(receive(rest[0], wait=float(*rest[1:] or ("0",))))
        if op in ("ack", "back", "keep") and len(rest) == 2:
            call(f"mail.{op}", box=rest[0], id=rest[1])
            return 0
        if op == "reply" and len(rest) == 3:
            call("mail.reply", box=rest[0], id=rest[1], body=json.loads(rest[2]))
            return 0
    except ValueError as error:
        sys.stderr.write(f"ringfence-guest: {error}\n")
        return 2
    sys.stderr.write(_USAGE)
    return 2


def _received(letters: list[Letter]) -> int:
    for letter in letters:
        row = {"id": letter.id, "from": letter.sender, "times": letter.times, "asks": letter.asks, "body": letter.body}
        sys.stdout.write(json.dumps(row) + "\n")
    return 0 if letters else 1


def _letter(box: str, row: dict[str, Json]) -> Letter:
    return Letter(
        id=str(row["id"]),
        box=box,
        letter=str(row["letter"]),
        sender=str(row["from"]),
        attempt=cast("int", row["attempt"]),
        at_ms=cast("int", row["at_ms"]),
        times=cast("int", row["times"]),
        asks=bool(row["answer"]),
        body=row["body"],
        corr=str(row.get("corr", "")),
    )
