"""The line of one attempt's door to the vault broker: leave for each request that is to carry a secret.

Made by the door of an attempt with proxied secrets. Must never give a value for a request that the broker has not
recorded, keep one longer than the broker said, or any when the line is gone: the broker shuts it when the lease ends.

    door → broker   {"op": "use", "id", "host", "request" (METHOD TARGET), "empty": no value is held}
                    {"op": "masked", "hits"}
    broker → door   {"id", "ok": true, "keys": [{"name", "version", "header" or "field", "text", "value"}], "for_s",
                    "body_bytes", "at_once"} (base64; text and value only the first time; for_s: when all must be
                    forgotten; body_bytes, at_once: the rule's bounds) · {"id", "ok": false, "err": CODE} ·
                    {"op": "drop"}: forget all values
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from broker.egress.errors import SecretRefusedError
from broker.egress.fields import Field
from broker.egress.mask import Veil
from broker.egress.prompt import Prompt
from broker.egress.rules import Destination
from runner.wire import codec
from runner.wire.codec import Json
from runner.wire.errors import WireError

__all__ = ["NO_LEAVE", "Held", "Keys", "Leave"]

#: Longest wait for the broker: a restart of it takes less, and costs no request.
ANSWER_S: Final = 5.0
_LINE: Final = re.compile(rb"[\x20-\x7e]+")
_MAX_RECORD_BYTES: Final = 256 * 1024
#: After these there will be no other answer.
_FINAL: Final = frozenset({"denied", "expired", "used-up"})


@dataclass(frozen=True, slots=True)
class Held:
    """One value, as it goes into a request: the header's name and whole text, or its field (fields.py)."""

    name: str
    header: bytes
    text: bytes
    value: bytes
    field: str = ""

    def __repr__(self) -> str:
        return f"Held({self.name})"


@dataclass(frozen=True, slots=True)
class Leave:
    """What one request may carry, and what its answer must not."""

    headers: tuple[tuple[bytes, bytes], ...]
    veil: Veil
    fields: tuple[Field, ...] = ()
    #: Most that the request may send, and most requests to that host under way; None: the door's own bound.
    body_bytes: int | None = None
    at_once: int | None = None


NO_LEAVE: Final = Leave((), Veil({}))


class Keys:
    """The values of one attempt. ``on_lost`` is called once, when the line ends."""

    def __init__(self, end: socket.socket, on_lost: Callable[[], None]) -> None:
        """``end`` is this object's from here on."""
        self._end = end
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._held: dict[tuple[str, int], Held] = {}
        self._leaves: dict[tuple[tuple[str, int], ...], Leave] = {}
        #: Questions by number, oldest first, each with the time when it was asked.
        self._waiting: dict[int, tuple[float, Prompt[dict[str, Json]]]] = {}
        #: One for all of them: a timer for each would cost more than asking.
        self._alarm: asyncio.TimerHandle | None = None
        self._next = 0
        #: What the rules say of requests under way, by host, as it was told last.
        self.at_once: dict[Destination, int] = {}
        self._names: dict[Destination, tuple[bytes, ...]] = {}
        self._timer: asyncio.TimerHandle | None = None
        end.setblocking(False)
        self._loop.add_reader(end, self._read)

    def __repr__(self) -> str:
        return f"Keys({len(self._held)} held)"

    @property
    def closed(self) -> bool:
        """Whether the line is gone."""
        return self._end.fileno() < 0

    async def use(
        self, host: Destination, request: str = "", meanwhile: Callable[[tuple[bytes, ...]], None] | None = None
    ) -> Leave:
        """Return what one request (``METHOD TARGET``) to ``host`` carries; the broker has recorded it.

        ``meanwhile``: called while the broker works, with the names of the headers that the last request there carried;
        not for the first one, nor where a value goes into a field.

        Raises:
            SecretRefusedError: it may carry nothing now, or the broker does not answer.
        """
        self._next += 1
        number = self._next
        answer: Prompt[dict[str, Json]] = Prompt(self._loop)
        self._waiting[number] = self._loop.time(), answer
        if self._alarm is None:
            self._alarm = self._loop.call_later(ANSWER_S, self._late)
        try:
            ask = {"op": "use", "id": number, "host": str(host), "request": request, "empty": not self._held}
            self._end.send(codec.dump(ask))
            names = self._names.get(host)
            if meanwhile is not None and names:
                meanwhile(names)
            reply = await answer
        except OSError:
            raise SecretRefusedError("unavailable") from None
        finally:
            self._waiting.pop(number, None)
        if not reply.get("ok"):
            if reply.get("err") in _FINAL:
                self._forget()
            raise SecretRefusedError(str(reply.get("err")))
        try:
            leave = self._leave(reply)
        except (KeyError, TypeError, ValueError):
            raise SecretRefusedError("unavailable") from None
        self._names[host] = () if leave.fields else tuple(name for name, _ in leave.headers)
        if leave.at_once is not None:
            self.at_once[host] = leave.at_once
        return leave

    def masked(self, hits: int) -> None:
        """Have it recorded that a host gave values back."""
        with suppress(OSError):
            self._end.send(codec.dump({"op": "masked", "hits": hits}))

    def close(self) -> None:
        """Forget every value and the line. Idempotent."""
        self._forget()
        if self.closed:
            return
        self._loop.remove_reader(self._end)
        self._end.close()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for _, answer in tuple(self._waiting.values()):
            answer.fail(SecretRefusedError("unavailable"))

    def _late(self) -> None:
        """Refuse what was asked too long ago, and look again when the next question will have been."""
        self._alarm, now_s = None, self._loop.time()
        for asked_s, answer in tuple(self._waiting.values()):
            if now_s - asked_s >= ANSWER_S:
                answer.fail(SecretRefusedError("unavailable"))
            elif not answer.done:
                self._alarm = self._loop.call_at(asked_s + ANSWER_S, self._late)
                return

    def _leave(self, reply: dict[str, Json]) -> Leave:
        entries = reply["keys"]
        if not isinstance(entries, list) or not entries:
            raise TypeError("no keys")
        marks: list[tuple[str, int]] = []
        for one in entries:
            if not isinstance(one, dict):
                raise TypeError("no key")
            mark = (str(one["name"]), int(str(one["version"])))
            if "value" in one:
                text, value = (base64.b64decode(str(one[part])) for part in ("text", "value"))
                header, place = str(one.get("header", "")).encode("ascii"), str(one.get("field", ""))
                if (not header and not place) or not _LINE.fullmatch(text):
                    raise TypeError("no place, or more than one line")
                self._held[mark] = Held(mark[0], header, text, value, place)
                self._leaves.clear()
            marks.append(mark)
        for_s = reply.get("for_s")
        if isinstance(for_s, int | float):
            self._forget_at(self._loop.time() + for_s)
        known = self._leaves.get(tuple(marks))
        if known is None:
            known = self._leaves[tuple(marks)] = _leave([self._held[mark] for mark in marks])
        if "body_bytes" not in reply and "at_once" not in reply:
            return known
        return replace(known, body_bytes=_bound(reply, "body_bytes"), at_once=_bound(reply, "at_once"))

    def _forget_at(self, end_s: float) -> None:
        """Forget all when the first of the values has to be forgotten."""
        if self._timer is not None:
            if self._timer.when() <= end_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(end_s, self._forget)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._held.clear()
        self._leaves.clear()

    def _read(self) -> None:
        try:
            data = self._end.recv(_MAX_RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            record = codec.load(data, limit_bytes=_MAX_RECORD_BYTES) if data else None
        except WireError:
            record = None
        if not isinstance(record, dict):
            self.close()
            self._on_lost()
            return
        number = record.get("id")
        found = self._waiting.get(number) if isinstance(number, int) else None
        if record.get("op") == "drop":
            self._forget()
        elif found is not None:
            found[1].tell(record)


def _leave(held: Sequence[Held]) -> Leave:
    values = {one.name: one.value for one in held}
    # With a user's name before it, the value's base64 form is another one.
    texts = {f"{one.name}:sent": _sent(one) for one in held}
    others = {name: text for name, text in texts.items() if text not in values.values()}
    headers = tuple((one.header, one.text) for one in held if not one.field)
    fields = tuple(Field(one.name, one.field, one.text) for one in held if one.field)
    return Leave(headers, Veil(values | others), fields)


def _sent(one: Held) -> bytes:
    return Field(one.name, one.field, one.text).sent if one.field else one.text.split(b" ")[-1]


def _bound(reply: dict[str, Json], name: str) -> int | None:
    value = reply.get(name)
    return value if type(value) is int else None
