"""Mail: mailboxes and topics between the jobs of one tenant that were granted them, on any node, and answers.

Made by the desk. Must never name a sender but the job whose session it is, hand out a letter that no node of the fleet
signed, or say that one was taken before its receiver said so.

At least once: a letter that was given out and not acknowledged comes again, after HOLD_MS or when the attempt ends,
and after MOST_TIMES lies among the dead ones. There are no priorities: who needs one makes a box of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Final, Literal

from node_agent.cancelling import end_all
from node_agent.kernel.bell import Bell, Ring
from node_agent.kernel.bucket import Bucket
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.maildesk import MAX_WAIT_S, MOST_WAITING, Desk, Held, Waiting
from node_agent.kernel.mailforms import ANSWER_LIFE_S, Ask, Nothing, One, Receive, Reply, Send, letter_of, shown
from node_agent.kernel.mailstore import HOLD_MS, Given, Handful, MailStore, Place
from node_agent.kernel.seals import Seals
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from node_agent.run import now_ms
from runner.wire import codec
from runner.wire.calls import MAX_DATA_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.errors import CodecError
from runner.wire.letters import OWN_BOX, Letter, Taken, is_topic, reply_box

__all__ = ["MAX_WAIT_S", "Mail"]

log = logging.getLogger(__name__)

#: Without a ring the box is looked at again so often: letters of a dead receiver ring nobody. In seconds.
LOOK_S: Final = 5.0
#: How often an attempt may send or ask for letters.
PER_S: Final = 50.0
BURST: Final = 200.0
#: Most letters that an attempt holds.
MOST_HELD: Final = 256
MOST_AT_ONCE: Final = 16
#: Confirmations that are read at a time.
_MOST_TASKS: Final = 256
#: How far the clocks of two nodes may be apart, in milliseconds.
CLOCKS_MS: Final = 60_000
_KEEP: Final = "it comes again: somebody else has it, or will"


class Mail:
    """Mail for one boot."""

    def __init__(
        self,
        around: Around,
        store: MailStore,
        seals: Seals,
        bell: Bell,
        *,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._around, self._store, self._seals, self._look_s, self._clock = around, store, seals, look_s, clock
        self._desks: dict[str, Desk] = {}
        self._stirred: dict[tuple[str, str], set[asyncio.Future[None]]] = {}
        #: What waits for the word that it was taken, by its id.
        self._confirms: dict[str, tuple[Letter, asyncio.Future[Taken]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        bell.on("box", self._rung)
        bell.on("taken", self._taken)
        around.ending.append(self.ended)
        around.stopping.append(self.stop)

    def entries(self) -> tuple[Entry, ...]:
        """Return every call of this part."""
        grant, away = "mail", ErrorCode.UNAVAILABLE
        full, gone, late = ErrorCode.QUOTA, ErrorCode.NOT_FOUND, ErrorCode.CONFLICT
        sends = (ErrorCode.TOO_LARGE, full, away)
        return (
            Entry("mail.send", Send, self._send, "Send a letter.", "{id, confirmed, by, subscribers}", grant, True,
                  sends, _box),
            Entry("mail.ask", Ask, self._ask, "Send a letter and wait for the answer to it.", "{id, from, body}", grant,
                  True, (*sends, ErrorCode.TIMEOUT), _box),
            Entry("mail.receive", Receive, self._receive, "Take letters; each has to be acknowledged.",
                  "{letters: [{id, letter, from, attempt, at_ms, times, answer, body}], missed}", grant, False,
                  (full, away), _box),
            Entry("mail.ack", One, self._ack, "Say that the job is done with a letter: it never comes again.", "{}",
                  grant, True, (gone, late, away), _box, late=True),
            Entry("mail.reply", Reply, self._reply, "Answer a letter and acknowledge it.", "{id}", grant, True,
                  (*sends, gone, late), _box, late=True),
            Entry("mail.keep", One, self._keep, "Hold a letter for another full time.", "{}", grant, False,
                  (gone, late, away), _box),
            Entry("mail.back", One, self._back, "Give a letter back: it comes again at once.", "{}", grant, True,
                  (gone, away), _box, late=True),
            Entry("mail.boxes", Nothing, self._boxes, "Count what the job's boxes hold.",
                  "[{box, mode, letters, held, dead, bytes, subscribers}]", grant, False, (away,)),
        )  # fmt: skip # several to a line

    def ended(self, caller: Caller) -> None:
        """An attempt is over: what it held goes to whoever asks next."""
        desk = self._desks.pop(caller.attempt, None)
        if desk is not None:
            desk.over = True
        boxes: dict[str, list[tuple[str, int]]] = {}
        for (box, entry), held in desk.held.items() if desk is not None else ():
            boxes.setdefault(box, []).append((entry, held.times))
        for box, letters in boxes.items():
            self._spawn(self._give_back(Place(caller.tenant, box, caller.job), letters))

    async def stop(self) -> None:
        """Let nobody wait any more. Idempotent."""
        # What is on its way to the store gets there, unless that is away: then the letters come again by themselves.
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=1.0)
        await end_all(self._tasks)

    async def _send(self, caller: Caller, asked: Send) -> Json:
        self._may(caller, asked.box, "send")
        confirm = asked.wait_s > 0
        if confirm and is_topic(asked.box):
            why = "a topic has many receivers, none of which speaks for all: send without wait_s"
            raise CallError(ErrorCode.BAD_REQUEST, why)
        desk = self._pay(caller)
        letter = letter_of(self._around.node, caller, asked.box, asked.body, asked.life_s, confirm=confirm)
        if not confirm:
            subscribers = await self._post(caller, letter)
            return {"id": letter.id, "confirmed": False, "by": None, "subscribers": subscribers}
        taken: asyncio.Future[Taken] = asyncio.get_running_loop().create_future()
        self._confirms[letter.id] = letter, taken
        try:
            with Waiting(desk, asked.wait_s):
                await self._post(caller, letter)
                await asyncio.wait([taken], timeout=asked.wait_s)
        finally:
            del self._confirms[letter.id]
        by = taken.result().taker if taken.done() else None
        return {"id": letter.id, "confirmed": taken.done(), "by": by, "subscribers": 0}

    async def _ask(self, caller: Caller, asked: Ask) -> Json:
        self._may(caller, asked.box, "send")
        if is_topic(asked.box) or asked.wait_s <= 0:
            raise CallError(ErrorCode.BAD_REQUEST, "an answer is asked of a mailbox, and needs a time to wait")
        desk = self._pay(caller)
        letter = letter_of(self._around.node, caller, asked.box, asked.body, asked.wait_s, answer=True)
        place = Place(caller.tenant, reply_box(caller.job), caller.job)
        with Waiting(desk, asked.wait_s):
            await self._post(caller, letter)
            while True:
                left_s = letter.until_ms / 1000 - now_ms() / 1000
                found = await self._look(
                    desk, place, left_s, lambda wait: self._store.take(place, letter.id, wait=wait)
                )
                if not found.letters:
                    why = f"nobody answered in {asked.wait_s:g} s; a late answer comes to the job's own box {OWN_BOX}"
                    raise CallError(ErrorCode.TIMEOUT, why)
                answer = await self._opened(place, found.letters[0])
                if answer is not None and answer.corr == letter.id:
                    return {"id": letter.id, "from": answer.sender, "body": answer.body}  # type: ignore[dict-item]  # plain JSON

    async def _receive(self, caller: Caller, asked: Receive) -> Json:
        place = self._place(caller, asked.box, "receive")
        if not 1 <= asked.count <= MOST_AT_ONCE:
            raise CallError(ErrorCode.BAD_REQUEST, f"count is 1 to {MOST_AT_ONCE}")
        desk = self._pay(caller)
        if len(desk.held) >= MOST_HELD:
            # Those whose time is over are somebody else's by now.
            desk.held = {key: held for key, held in desk.held.items() if held.until_s > self._clock()}
        room = MOST_HELD - len(desk.held)
        if room <= 0:
            raise CallError(ErrorCode.QUOTA, f"this job holds {MOST_HELD} letters: acknowledge some, then ask again")
        count = min(asked.count, room)
        with Waiting(desk, asked.wait_s):
            found = await self._look(
                desk, place, asked.wait_s, lambda wait: self._store.receive(place, count, wait=wait)
            )
        if desk.over:
            # The attempt ended while the store answered: nobody would ever acknowledge these.
            await self._give_back(place, [(given.id, given.times) for given in found.letters])
            raise CallError(ErrorCode.ENDED, "the attempt is over")
        letters: list[Json] = []
        for given in found.letters:
            letter = await self._opened(place, given)
            if letter is not None:
                until_s = self._clock() + HOLD_MS / 1000
                held = Held(given.times, letter.id, letter.sender, letter.answer, letter.confirm, until_s)
                desk.held[place.box, given.id] = held
                letters.append(shown(given, letter))
        return {"letters": letters, "missed": found.missed}

    async def _ack(self, caller: Caller, asked: One) -> Json:
        place = self._place(caller, asked.box, "receive")
        await self._done_with(caller, place, asked.id)
        return {}

    async def _reply(self, caller: Caller, asked: Reply) -> Json:
        place = self._place(caller, asked.box, "receive")
        held = self._held(caller, place, asked.id)
        if not held.answer:
            raise CallError(ErrorCode.BAD_REQUEST, "its sender waits for no answer: acknowledge it")
        self._pay(caller)
        letter = letter_of(
            self._around.node, caller, reply_box(held.sender), asked.body, ANSWER_LIFE_S, corr=held.letter
        )
        await self._post(caller, letter)
        await self._done_with(caller, place, asked.id)
        return {"id": letter.id}

    async def _keep(self, caller: Caller, asked: One) -> Json:
        place = self._place(caller, asked.box, "receive")
        held = self._held(caller, place, asked.id)
        if not await self._store.keep(place, asked.id, held.times):
            self._forget(caller, place, asked.id)
            raise CallError(ErrorCode.CONFLICT, _KEEP)
        held.until_s = self._clock() + HOLD_MS / 1000
        return {}

    async def _back(self, caller: Caller, asked: One) -> Json:
        place = self._place(caller, asked.box, "receive")
        held = self._held(caller, place, asked.id)
        await self._store.back(place, [(asked.id, held.times)])
        self._forget(caller, place, asked.id)
        return {}

    async def _boxes(self, caller: Caller, _: Nothing) -> Json:
        caller.needs(bool(caller.spec.grants.mail), "mail (--mail NAME)")
        self._pay(caller)
        rows: list[Json] = []
        for grant in caller.spec.grants.mail[:MOST_WAITING]:
            counts = await self._store.look(Place(caller.tenant, grant.name, caller.job))
            rows.append(
                {
                    "box": grant.name,
                    "mode": grant.mode,
                    "letters": counts.letters,
                    "held": counts.held,
                    "dead": counts.dead,
                    "bytes": counts.size_bytes,
                    "subscribers": counts.subscribers,
                }
            )
        return rows

    def _may(self, caller: Caller, box: str, mode: Literal["send", "receive"]) -> None:
        grants = caller.spec.grants.mail
        own = box == OWN_BOX and mode == "receive" and bool(grants)
        granted = any(grant.name == box and grant.mode in (mode, "both") for grant in grants)
        caller.needs(own or granted, f"to {mode} in {box[:80]!r} (--mail {box[:80]}:{mode})")

    def _place(self, caller: Caller, box: str, mode: Literal["send", "receive"]) -> Place:
        self._may(caller, box, mode)
        return Place(caller.tenant, reply_box(caller.job) if box == OWN_BOX else box, caller.job)

    def _pay(self, caller: Caller) -> Desk:
        desk = self._desks.get(caller.attempt)
        if desk is None:
            desk = self._desks[caller.attempt] = Desk(Bucket(PER_S, BURST, self._clock))
        if not desk.bucket.take():
            raise CallError(ErrorCode.SLOW_DOWN, f"at most {PER_S:g} calls for mail a second; ask again in a moment")
        return desk

    def _held(self, caller: Caller, place: Place, entry: str) -> Held:
        desk = self._desks.get(caller.attempt)
        held = desk.held.get((place.box, entry)) if desk is not None else None
        if held is None:
            raise CallError(ErrorCode.NOT_FOUND, "this job holds no such letter; mail.receive gives some out")
        return held

    def _forget(self, caller: Caller, place: Place, entry: str) -> None:
        if (desk := self._desks.get(caller.attempt)) is not None:
            desk.held.pop((place.box, entry), None)

    async def _done_with(self, caller: Caller, place: Place, entry: str) -> None:
        held = self._held(caller, place, entry)
        word = None
        if held.confirm:
            taken = Taken(held.letter, place.tenant, place.box, caller.job, caller.run.attempt, self._around.node)
            word = self._seals.seal(taken)
        done = await self._store.ack(place, entry, held.times, word)
        self._forget(caller, place, entry)
        if not done:
            raise CallError(ErrorCode.CONFLICT, _KEEP)

    async def _post(self, caller: Caller, letter: Letter) -> int:
        data, signature = self._seals.seal(letter)
        return await self._store.send(Place(caller.tenant, letter.box, caller.job), letter, data, signature)

    async def _opened(self, place: Place, given: Given) -> Letter | None:
        """Return a letter that a node signed for this very box and time; any other is put away."""
        # Its signature costs as much as some calls: the loop belongs to others in between (attack 41).
        await asyncio.sleep(0)
        letter = await self._seals.read(Letter, given.data, given.signature, place.tenant)
        if letter is None or (letter.tenant, letter.box) != (place.tenant, place.box):
            log.warning("a letter that no node signed was put away", extra={"box": place.box, "entry": given.id})
            with suppress(CallError):
                await self._store.bury(place, [(given.id, given.times)], "unsigned")
            return None
        if letter.until_ms + CLOCKS_MS < now_ms():
            # The store looks at a time that nobody signed: who writes there can have it keep a letter for ever.
            with suppress(CallError):
                await self._store.bury(place, [(given.id, given.times)], "expired")
            return None
        return letter

    async def _look(
        self, desk: Desk, place: Place, wait_s: float, look: Callable[[bool], Awaitable[Handful]]
    ) -> Handful:
        """Look into a box until something is there or the time is over; between two looks a ring is waited for."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        key = (place.tenant, place.box)
        while True:
            # Before the look: a ring in between counts.
            stirred: asyncio.Future[None] = loop.create_future()
            self._stirred.setdefault(key, set()).add(stirred)
            try:
                left_s = until_s - loop.time()
                # A cancellation can get lost on its way (cancelling.py): whoever is over looks no more.
                found = await look(left_s > 0 and not desk.over)
                if found.letters or left_s <= 0 or desk.over:
                    return found
                await asyncio.wait([stirred], timeout=min(left_s, self._look_s))
            finally:
                self._stirred[key].discard(stirred)
                if not self._stirred[key]:
                    del self._stirred[key]

    def _rung(self, ring: Ring) -> None:
        key = (ring.get("tenant", b"").decode("utf-8", "replace"), ring.get("box", b"").decode("utf-8", "replace"))
        for stirred in self._stirred.get(key, ()):
            if not stirred.done():
                stirred.set_result(None)

    def _taken(self, ring: Ring) -> None:
        if self._confirms and len(self._tasks) < _MOST_TASKS:
            self._spawn(self._confirm(ring))

    async def _confirm(self, ring: Ring) -> None:
        data, signature = ring.get("word", b""), ring.get("sig", b"").decode("ascii", "replace")
        try:
            tenant = str((codec.load(data, limit_bytes=MAX_DATA_BYTES) or {}).get("tenant", ""))  # type: ignore[union-attr]  # else caught
            taken = await self._seals.read(Taken, data, signature, tenant)
        except (CodecError, AttributeError, CallError):
            return
        if taken is None or taken.letter not in self._confirms:
            return
        letter, waiter = self._confirms[taken.letter]
        # A node speaks for jobs of the tenants that it serves: its word on a letter of another one counts for nothing.
        meant = (letter.tenant, letter.box) == (tenant, taken.box) == (taken.tenant, taken.box)
        if meant and taken.taker.startswith(f"{tenant}-") and not waiter.done():
            waiter.set_result(taken)

    async def _give_back(self, place: Place, letters: Sequence[tuple[str, int]]) -> None:
        if letters:
            with suppress(CallError):  # then they come again when their time is over
                await self._store.back(place, letters)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _box(asked: Send | Ask | Receive | One | Reply) -> str:
    return asked.box
