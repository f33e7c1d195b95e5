"""Port: redis. Mailboxes and topics as the store keeps them: bounded streams, moved on by one script.

Called by mail. Must never hand a letter to two nodes at a time without both knowing by ``times``, and never wait longer
than the store's bound: CallError(UNAVAILABLE) instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from node_agent.kernel.errors import CallError
from node_agent.kernel.storecalls import StoreCalls, text_of
from runner.wire.calls import ErrorCode
from runner.wire.letters import OWN_BOX, Letter, is_topic

__all__ = ["HOLD_MS", "MOST_TIMES", "Given", "MailStore", "Place"]

#: A letter whose receiver has not said that it is done with it comes again after this time, in milliseconds.
HOLD_MS: Final = 60_000
#: How often a letter is given out before it counts as dead.
MOST_TIMES: Final = 5
#: Most letters and bytes of a box; a job's own box of answers has less.
MOST_LETTERS: Final = 256
MOST_BYTES: Final = 4 << 20
MOST_ANSWERS: Final = 64
MOST_ANSWER_BYTES: Final = 1 << 20
#: No further letter is taken along once an answer has as many bytes.
ANSWER_BYTES: Final = 20 * 1024
#: The one group of a mailbox.
_GROUP: Final = "mail"
_FULL: Final = "the box is full: nobody takes its letters; send again when some were"
_CROWDED: Final = "the topic has as many subscribers as one may have; some have to end first"


@dataclass(frozen=True, slots=True)
class Place:
    """One box of a tenant, as one job sees it: a topic has a group for each of its subscribers."""

    tenant: str
    box: str
    job: str

    @property
    def group(self) -> str:
        """Who shares the letters."""
        return self.job if is_topic(self.box) else _GROUP

    @property
    def own(self) -> bool:
        """Whether it holds the answers to a job's own letters."""
        return self.box.startswith(OWN_BOX)


@dataclass(frozen=True, slots=True)
class Given:
    """One letter that was given to this node. ``times``: how often it has been given out now."""

    id: str
    data: bytes
    signature: str
    times: int


@dataclass(frozen=True, slots=True)
class Handful:
    """What one look brought. ``missed``: letters of a topic that were dropped before this subscriber saw them."""

    letters: tuple[Given, ...] = field(default=())
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """What a box holds. ``held``: given out and not done with. ``subscribers``: of a topic."""

    letters: int
    held: int
    dead: int
    size_bytes: int
    subscribers: int


class MailStore:
    """One node's way to all boxes."""

    def __init__(self, calls: StoreCalls, node: str, hold_ms: int = HOLD_MS) -> None:
        self._calls, self._node, self._hold_ms = calls, node, hold_ms

    async def send(self, place: Place, letter: Letter, data: bytes, signature: str) -> int:
        """Put a signed letter into its box; return how many subscribers a topic has. Raises CallError."""
        reply = await self._run(
            "send",
            place,
            data,
            sig=signature,
            until=letter.until_ms,
            size=len(data),
            corr=letter.corr,
            confirm=letter.confirm,
            most=MOST_ANSWERS if place.own else MOST_LETTERS,
            most_bytes=MOST_ANSWER_BYTES if place.own else MOST_BYTES,
        )
        if reply[0] == b"full":
            raise CallError(ErrorCode.QUOTA, _FULL)
        return int(str(reply[2]))

    async def receive(self, place: Place, count: int, *, wait: bool) -> Handful:
        """Return what waits in the box; with ``wait`` and nothing there, this node's bell is rung later."""
        reply = await self._run(
            "receive", place, count=count, bytes=ANSWER_BYTES, hold_ms=self._hold_ms, most_times=MOST_TIMES, wait=wait
        )
        if reply[0] == b"crowded":
            raise CallError(ErrorCode.QUOTA, _CROWDED)
        return _handful(reply)

    async def take(self, place: Place, corr: str, *, wait: bool) -> Handful:
        """Return and remove the answer to one letter, if it is there."""
        return _handful(await self._run("take", place, corr=corr, wait=wait, most=MOST_ANSWERS))

    async def ack(self, place: Place, entry: str, times: int, word: tuple[bytes, str] | None = None) -> bool:
        """Say that the job is done with a letter; False: somebody else has it by now.

        ``word``: the signed Taken for its sender.
        """
        data, signature = word or (b"", "")
        taken = word is not None
        return await self._done("ack", place, data, id=entry, times=times, taken=taken, sig=signature)

    async def keep(self, place: Place, entry: str, times: int) -> bool:
        """Hold a letter for another full time; False: somebody else has it by now."""
        return await self._done("keep", place, id=entry, times=times)

    async def back(self, place: Place, held: Sequence[tuple[str, int]]) -> None:
        """Give letters back: whoever asks next gets them."""
        await self._run("back", place, ids=[list(one) for one in held])

    async def bury(self, place: Place, held: Sequence[tuple[str, int]], why: str) -> None:
        """Put letters away that nobody may have."""
        await self._run("bury", place, ids=[list(one) for one in held], why=why)

    async def look(self, place: Place) -> Counts:
        """Count what the box holds."""
        reply = await self._run("look", place)
        return Counts(*(int(str(part)) for part in reply))

    async def _done(self, op: str, place: Place, data: bytes = b"", **words: object) -> bool:
        return (await self._run(op, place, data, **words))[0] == b"done"

    async def _run(self, op: str, place: Place, data: bytes = b"", **words: object) -> list[object]:
        keys = self._calls.keys
        names = [form(place.tenant, place.box) for form in (keys.mail, keys.box, keys.dead)]
        head = {"op": op, "tenant": place.tenant, "box": place.box, "topic": is_topic(place.box)}
        document = {**head, "group": place.group, "node": self._node, **words}
        return await self._calls.run("mail", names, document, data)


def _handful(reply: list[object]) -> Handful:
    if reply[0] != b"letters":
        return Handful()
    rows = cast("list[list[object]]", reply[2:])
    letters = (Given(text_of(row[0]), cast("bytes", row[1]), text_of(row[2]), int(str(row[3]))) for row in rows)
    return Handful(tuple(letters), int(str(reply[1])))
