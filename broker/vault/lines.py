"""The egress process's lines: one per attempt with proxied secrets, for as long as its lease lives.

Called by the desk, which tells it when a lease begins and ends. Must never answer anybody but the egress process, let a
request go out that is not in the record, or leave a line open behind its lease.

    egress → broker   {"op": "use", "id", "host", "request" (METHOD TARGET), "empty": no value is held}
                      {"op": "masked", "hits"}
    broker → egress   {"id", "ok": true, "keys": [{"name", "version", "header" or "field", "text", "value"}], "for_s",
                      "body_bytes", "at_once"} (base64; text and value only the first time on a line; the others where a
                      rule says them) · {"id", "ok": false, "err": CODE} · {"op": "drop"}
"""

from __future__ import annotations

import base64
import functools
import logging
import os
import selectors
import socket
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from broker.vault import orders, peer, placing
from broker.vault.errors import VaultError, VaultUsageError
from broker.vault.keystore import Keystore
from broker.vault.leases import MAX_BAD, Granted, Lease
from broker.vault.rules import least
from runner.wire import codec

__all__ = ["Lines"]

log = logging.getLogger(__name__)

Reply = dict[str, object]


@dataclass(slots=True, eq=False)
class _Line:
    lease: Lease
    socket: socket.socket
    #: What the other end holds: names with their versions.
    told: set[tuple[str, int]] = field(default_factory=set)
    #: Lines of the record about refusals and covers, by what they say: a job makes as many as it likes.
    noted: Tally[str] = field(default_factory=Tally)


class Lines:
    """All lines of one broker. ``write`` appends to the record or raises; ``note`` records what is no release."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        users: frozenset[int],
        store: Keystore,
        write: Callable[..., None],
        note: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        """``selector``: the desk's; it calls what each line is registered with.

        ``users``: the uids that egress processes run under.
        """
        self._selector = selector
        self._users, self._store, self._write, self._note, self._clock = users, store, write, note, clock
        self._lines: dict[str, _Line] = {}

    def attach(self, lease: Lease, fd: int) -> None:
        """Take one end of a line; an earlier one of the lease is cut. Raises VaultUsageError, OSError."""
        end = orders.channel_of(fd)
        old = self._lines.get(lease.attempt)
        if old is not None and os.path.sameopenfile(old.socket.fileno(), end.fileno()):
            # An agent that connects again gives what it has given before.
            end.close()
            return
        self.end(lease.attempt)
        peer.arm_uid(end)
        line = self._lines[lease.attempt] = _Line(lease, end)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._hear(line))

    def end(self, attempt: str) -> None:
        """Cut an attempt's line: its other end forgets every value. Idempotent."""
        line = self._lines.pop(attempt, None)
        if line is None:
            return
        # Closing is not enough: the agent holds a copy of this end.
        with suppress(OSError):
            line.socket.shutdown(socket.SHUT_RDWR)
        self._selector.unregister(line.socket)
        line.socket.close()

    def withdraw(self, attempt: str) -> None:
        """Have an attempt's values forgotten: the rules took one of them away."""
        line = self._lines.get(attempt)
        if line is not None:
            line.told.clear()
            self._send(line, {"op": "drop"})

    def close(self) -> None:
        """Let go of every line; their other ends wait for the next broker. Idempotent."""
        for line in self._lines.values():
            self._selector.unregister(line.socket)
            line.socket.close()
        self._lines.clear()

    def _hear(self, line: _Line) -> None:
        if self._lines.get(line.lease.attempt) is not line:
            return  # it was cut in this turn of the desk
        try:
            heard = peer.receive_uid(line.socket)
        except BlockingIOError:
            return
        except OSError:
            heard = None
        # Without a message the egress process has ended, or its door has: the lease stays for the next one.
        reply = None if heard is None else self._word(line, *heard)
        if reply is None or (reply and not self._send(line, reply)):
            self.end(line.lease.attempt)

    def _word(self, line: _Line, data: bytes, uid: int, cut: bool) -> Reply:
        if uid not in self._users or cut:
            self._remark(line, "line.foreign_word", uid=uid)
            return {}
        try:
            order = orders.read(data)
            if order.get("op") == "masked":
                hits = order["hits"]
                self._remark(line, "secret.masked", hits=hits if isinstance(hits, int) else 0, where="answer")
                return {}
            if order.get("empty") is True:
                # It forgets all at once, also those of other hosts than the one whose time is over.
                line.told.clear()
            return {"id": order["id"], **self._use(line, str(order["host"]), str(order.get("request", "")))}
        except (VaultUsageError, ValueError, KeyError, RecursionError):
            return {}

    def _use(self, line: _Line, host: str, request: str) -> Reply:
        lease, now_s = line.lease, self._clock()
        if not lease.admit(now_s):
            return {"ok": False, "err": "slow-down"}
        granted, code = lease.take_for(orders.host_of(host), now_s, request)
        if not granted:
            if code != "pending":
                self._remark(line, "request.refused", code=code, host=host[:260])
            return {"ok": False, "err": code}
        try:
            keys = [self._key(line, name, one, host) for name, one in granted]
        except (VaultError, OSError) as error:
            log.warning("secret not released", extra={"attempt": lease.attempt, "error": type(error).__name__})
            return {"ok": False, "err": "unavailable"}
        line.told |= {(name, one.version or 0) for name, one in granted}
        return {"ok": True, "keys": keys, **_for(granted, now_s)}

    def _remark(self, line: _Line, event: str, **fields: object) -> None:
        about = f"{event} {fields.get('code', '')}"
        line.noted[about] += 1
        if line.noted[about] <= MAX_BAD:
            self._note(event, attempt=line.lease.attempt, **fields)

    def _key(self, line: _Line, name: str, granted: Granted, host: str) -> Mapping[str, object]:
        """Record one use, and return what the other end needs for it: the value, if it has it not yet."""
        version = granted.version or 0
        known = (name, version) in line.told
        held = None if known else self._store.get(name, granted.version)
        self._write("secret.released", attempt=line.lease.attempt, name=name, version=version, mode="proxy", host=host)
        if held is None:
            return {"name": name, "version": version}
        text = placing.plain(held.value) if granted.field else placing.render(granted.header, held.value)
        place = {"field": granted.field} if granted.field else {"header": placing.name_of(granted.header)}
        return {
            "name": name,
            "version": version,
            **place,
            "text": base64.b64encode(text).decode(),
            "value": base64.b64encode(held.value.strip()).decode(),
        }

    def _send(self, line: _Line, reply: Reply) -> bool:
        try:
            line.socket.send(codec.dump(reply), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True


def _for(granted: list[tuple[str, Granted]], now_s: float) -> Reply:
    """Return what holds for a request: how long its values are kept, and how much it may be."""
    until_s = functools.reduce(least, (one.until_s for _, one in granted))
    found = {
        "for_s": None if until_s is None else max(0.0, until_s - now_s),
        "body_bytes": functools.reduce(least, (one.body_bytes for _, one in granted)),
        "at_once": functools.reduce(least, (one.at_once for _, one in granted)),
    }
    return {name: value for name, value in found.items() if value is not None}
