"""The operator's side of a running broker: put, remove, rotate, approve, reload, on a socket of its own.

Called by service.py through the desk's loop; the command line is the other end. Must never take a word from anybody but
root and the broker's own user, answer with a value, or change anything that is not in the record first.

    {"op": "put", "name", "value" (base64), "note"} · {"op": "list" | "verify" | "reload" | "status"} ·
    {"op": "remove", "name"} · {"op": "rollback", "name", "version"} · {"op": "rotate" | "reencrypt"} ·
    {"op": "recovery", "recipients"} · {"op": "recipient"[, "rotate"]} · {"op": "approve" | "deny", "attempt",
    "name", "by"} · {"op": "pending"}
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from broker.vault import approval, orders, peer
from broker.vault.audit import Audit
from broker.vault.errors import VaultError, VaultUsageError
from broker.vault.keystore import Keystore
from broker.vault.leases import Leases
from broker.vault.peer import Message

__all__ = ["Clerk", "Counter"]

MAX_CLERKS: Final = 16
Reply = dict[str, object]


class Counter:
    """Serves operators one record at a time."""

    def __init__(self, clerk: Clerk) -> None:
        self._clerk = clerk
        self._selector = selectors.EpollSelector()
        self._open = 0

    def listen(self, admin: socket.socket) -> None:
        """Take operators' connections on a bound SEQPACKET socket."""
        admin.setblocking(False)
        self._selector.register(admin, selectors.EVENT_READ, lambda: self._accept(admin))

    def fileno(self) -> int:
        """Return what is readable when there is something to serve."""
        return self._selector.fileno()

    def serve(self) -> None:
        """Serve what is ready, without waiting."""
        for key, _ in self._selector.select(0):
            key.data()

    def close(self) -> None:
        """End every connection. Idempotent."""
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self, admin: socket.socket) -> None:
        try:
            connection, _ = admin.accept()
        except OSError:
            return
        if peer.peer_uid(connection) not in {0, os.geteuid()} or self._open >= MAX_CLERKS:
            connection.close()
            return
        peer.arm(connection, rights=False)
        self._open += 1
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection))

    def _hear(self, connection: socket.socket) -> None:
        try:
            message = peer.receive(connection)
        except BlockingIOError:
            return
        except OSError:
            message = None
        if message is None:
            self._selector.unregister(connection)
            connection.close()
            self._open -= 1
            return
        try:
            reply = self._word(message)
        finally:
            message.close()
        with suppress(OSError):
            connection.send(json.dumps(reply).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _word(self, message: Message) -> Reply:
        if message.sender.uid not in {0, os.geteuid()} or message.cut:
            return {"ok": False, "err": "garbage", "message": "not for you, or too long"}
        try:
            return {"ok": True, **self._clerk.act(orders.read(message.data))}
        except VaultError as error:
            return {"ok": False, "err": error.code, "message": str(error)}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return {"ok": False, "err": "garbage", "message": type(error).__name__}


class Clerk:
    """Carries out what an operator asks, on an open vault; also without a broker, for the command line."""

    def __init__(
        self,
        store: Keystore,
        record: Audit,
        leases: Leases,
        *,
        reload: Callable[[], Reply] = dict,
        about: Callable[[], Reply] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``reload``: reads the rules anew and applies them; its reply is ours. ``about``: what the process wears."""
        self._store, self._record, self._leases = store, record, leases
        self._reload, self._about, self._clock = reload, about, clock

    def act(self, order: Mapping[str, object]) -> Reply:
        """Carry out one order; returns what it has to say. Raises VaultError, KeyError, TypeError, ValueError."""
        act = self._acts().get(str(order.get("op")))
        if act is None:
            raise VaultUsageError("unknown op")
        return act(order)

    def _acts(self) -> Mapping[str, Callable[[Mapping[str, object]], Reply]]:
        return {
            "put": self._put,
            "list": self._list,
            "remove": self._remove,
            "rollback": self._rollback,
            "rotate": self._rotate,
            "reencrypt": self._reencrypt,
            "recovery": self._recovery,
            "recipient": self._recipient,
            "verify": self._verify,
            "approve": self._decide,
            "deny": self._decide,
            "pending": self._pending,
            "reload": lambda _: self._reload(),
            "status": lambda _: self._status(),
        }

    def _status(self) -> Reply:
        return {"leases": len(self._leases), "head": self._record.head.mac, "pid": os.getpid(), **self._about()}

    def _put(self, order: Mapping[str, object]) -> Reply:
        try:
            value = base64.b64decode(str(order["value"]), validate=True)
        except binascii.Error:
            raise VaultUsageError("the value is not base64") from None
        name = str(order["name"])
        version = self._store.put(name, value, note=str(order.get("note", "")))
        self._record.write("secret.put", name=name, version=version)
        return {"version": version}

    def _list(self, _: Mapping[str, object]) -> Reply:
        return {"entries": [{"name": one.name, "versions": list(one.versions)} for one in self._store.entries()]}

    def _remove(self, order: Mapping[str, object]) -> Reply:
        name = str(order["name"])
        self._store.remove(name)
        self._record.write("secret.removed", name=name)
        return {}

    def _rollback(self, order: Mapping[str, object]) -> Reply:
        name, version = str(order["name"]), int(str(order["version"]))
        new = self._store.rollback(name, version)
        self._record.write("secret.rolled_back", name=name, version=new, to=version)
        return {"version": new}

    def _rotate(self, _: Mapping[str, object]) -> Reply:
        self._store.rotate_host_key()
        self._record.write("vault.rotated")
        return {}

    def _reencrypt(self, _: Mapping[str, object]) -> Reply:
        count = self._store.adopt_host_key()
        self._record.write("vault.reencrypted")
        return {"count": count}

    def _recovery(self, order: Mapping[str, object]) -> Reply:
        recipients = order["recipients"]
        if not isinstance(recipients, list):
            raise VaultUsageError("recipients are a list")
        self._store.set_recovery([str(one) for one in recipients])
        self._record.write("vault.recovery_changed", recipients=len(recipients))
        return {}

    def _recipient(self, order: Mapping[str, object]) -> Reply:
        keys = self._store.seal_keys()
        if not order.get("rotate"):
            return {"recipient": keys.current()}
        self._record.write("sealing.rotated")
        return {"recipient": keys.rotate()}

    def _verify(self, _: Mapping[str, object]) -> Reply:
        good, bad = self._store.verify()
        return {"good": good, "bad": list(bad)}

    def _decide(self, order: Mapping[str, object]) -> Reply:
        return approval.decide(self._leases, self._record.write, order, self._clock(), origin="host")

    def _pending(self, _: Mapping[str, object]) -> Reply:
        waiting = [
            {"attempt": lease.attempt, "name": name, "rule": granted.rule}
            for lease in self._leases.all()
            for name, granted in lease.grants.items()
            if granted.pending
        ]
        return {"pending": waiting}
