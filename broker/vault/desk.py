"""The broker's loop: agents open leases on one socket, jobs ask on a channel of their own, an operator on a third.

Called by service.py. One thread, one selector. Must never answer a sender that the kernel does not place inside the
lease's sandbox, release anything that is not in the record, wait for anybody, or let one client hold up another.

The records that go both ways stand in orders.py.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, cast

from broker.vault import approval, orders, peer
from broker.vault.audit import Audit
from broker.vault.cleaning import Cleaning
from broker.vault.errors import AuditError, VaultError, VaultUsageError
from broker.vault.keystore import Keystore
from broker.vault.leases import MAX_BAD, Lease, Leases, Opened
from broker.vault.lines import Lines
from broker.vault.masks import Masks
from broker.vault.orders import Seat
from broker.vault.peer import Message
from broker.vault.serving import Services
from broker.vault.unseal import Unsealer
from broker.vault.window import RefusedError, Window

__all__ = ["AGENT_GRACE_S", "Desk"]

log = logging.getLogger(__name__)

#: How long the leases of an agent that went away stay, for its next start or ours to adopt.
AGENT_GRACE_S: Final = 5.0
_SYNC_EVERY_S: Final = 0.1
_FAIR_SHARE: Final = 16
_OPEN_FDS: Final = 5
#: Ends after which nothing of the attempt is scrubbed any more; after the others its result still is.
_OVER: Final = frozenset({"done", "agent gone"})
Reply = dict[str, object]


@dataclass(slots=True, eq=False)
class _Channel:
    """A live lease with its descriptors."""

    lease: Lease
    seat: Seat
    socket: socket.socket
    pidfds: tuple[int, ...]
    agent: int
    orphan_until_s: float | None = None


@dataclass(slots=True, eq=False)
class _Agent:
    number: int
    socket: socket.socket
    attempts: set[str] = field(default_factory=set)


class Desk:
    """One broker's sockets and leases."""

    def __init__(
        self,
        store: Keystore,
        record: Audit,
        leases: Leases,
        *,
        agents: frozenset[int],
        cleaning: Cleaning,
        egress: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``agents``, ``egress``: the uids of node agents and of egress processes."""
        self._store, self._record, self._leases = store, record, leases
        self._agent_uids, self._clock = agents, clock
        self._selector = selectors.DefaultSelector()
        self._channels: dict[str, _Channel] = {}
        self._agents: dict[int, _Agent] = {}
        self._orphans: dict[str, _Channel] = {}
        self._number = 0
        self._masks = Masks(cleaning, store, self._note)
        self._unsealer = Unsealer(lambda: store.seal_keys().opening(), self._write, self._masks.tell)
        self._window = Window(store, self._write, self._unsealer)
        self._dirty, self._synced_s = False, 0.0
        self.lines = Lines(self._selector, egress, store, self._write, self._note, self._clock)
        self._services = Services(self._note, self._clock)
        self.watch(self._services.fileno(), self._services.serve)
        self.watch(cleaning.line.fileno(), cleaning.hear)

    def listen(self, control: socket.socket) -> None:
        """Take agents' connections on a bound SEQPACKET socket."""
        control.setblocking(False)
        self._selector.register(control, selectors.EVENT_READ, lambda: self._accept(control))

    def watch(self, fd: int, act: Callable[[], None]) -> None:
        """Call ``act`` whenever ``fd`` is readable: signals, another socket."""
        self._selector.register(fd, selectors.EVENT_READ, act)

    def close(self) -> None:
        """End every channel and connection. Idempotent. Leases stay in the record: the next start adopts them."""
        for channel in list(self._channels.values()):
            self._let_go(channel)
        self._channels.clear()
        self.lines.close()
        self._services.close()
        for agent in list(self._agents.values()):
            agent.socket.close()
        self._agents.clear()
        self._selector.close()

    def turn(self, timeout_s: float | None = None) -> None:
        """Serve what is ready; sleeps at most ``timeout_s``."""
        due_s = self._next_s()
        if due_s is not None:
            timeout_s = due_s if timeout_s is None else min(due_s, timeout_s)
        for key, _ in self._selector.select(timeout_s):
            cast("Callable[[], None]", key.data)()
        self._housekeep()

    def revoke(self, attempt: str, why: str) -> None:
        """End a lease now: its channel is shut for every holder of a copy."""
        channel = self._channels.pop(attempt, None)
        self._orphans.pop(attempt, None)
        self._services.end(attempt)
        self._leases.close(attempt, over=why in _OVER)
        self.lines.end(attempt)
        if channel is None:
            return
        # Closing alone would leave it open while the agent holds a copy of this end.
        with suppress(OSError):
            channel.socket.shutdown(socket.SHUT_RDWR)
        self._let_go(channel)
        if why in _OVER:
            self._masks.forget(attempt)
        self._note("lease.ended", attempt=attempt, why=why)

    # agents

    def _accept(self, control: socket.socket) -> None:
        try:
            connection, _ = control.accept()
        except OSError:
            return
        uid = peer.peer_uid(connection)
        if uid not in self._agent_uids:
            self._note("agent.refused", uid=uid)
            connection.close()
            return
        peer.arm(connection, rights=True)
        self._number += 1
        agent = _Agent(self._number, connection)
        self._agents[agent.number] = agent
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._from_agent(agent))

    def _from_agent(self, agent: _Agent) -> None:
        try:
            message = peer.receive(agent.socket, want_fds=_OPEN_FDS)
        except BlockingIOError:
            return
        except OSError:
            message = None
        if message is None:
            self._agent_gone(agent)
            return
        try:
            if message.sender.uid not in self._agent_uids:
                # A connection that leaked into a job: its words are nothing, and must not cut the agent off either.
                self._note("agent.foreign_word", uid=message.sender.uid)
                return
            reply, kept = self._agent_word(agent, message)
            if kept:
                message = message.without_fds()
        finally:
            message.close()
        if reply:
            self._send(agent.socket, reply)

    def _agent_word(self, agent: _Agent, message: Message) -> tuple[Reply, bool]:
        """Answer one record of an agent (an empty answer follows later); True if a lease now owns its descriptors."""
        try:
            order = orders.read(message.data)
            if order.get("op") == "open":
                return self._open(agent, order, message.fds)
            if order.get("op") == "proxy" and len(message.fds) == 1:
                self.lines.attach(self._leases.live(str(order["attempt"])), message.fds[0])
                return {"ok": True}, True
            return self._obey(agent, order, message.fds), False
        except VaultUsageError as error:
            return {"ok": False, "err": "garbage", "message": str(error)}, False
        except VaultError as error:
            return {"ok": False, "err": "unavailable", "message": str(error)}, False
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {"ok": False, "err": "garbage", "message": type(error).__name__}, False

    def _obey(self, agent: _Agent, order: Mapping[str, object], fds: tuple[int, ...]) -> Reply:
        match order.get("op"):
            case "sealed":
                return self._sealed(self._leases.live(str(order["attempt"])), order)
            case "streams":
                self._masks.streams(str(order["attempt"]), fds)
                return {"ok": True}
            case "file":
                self._masks.file(str(order["attempt"]), fds, functools.partial(self._send, agent.socket))
                return {}
            case "service" if len(fds) == 1:
                self._services.open(self._leases.live(str(order["attempt"])), fds[0])
                return {"ok": True}
            case "close":
                attempt = str(order.get("attempt"))
                if attempt in agent.attempts and attempt not in self._channels:
                    self._note("lease.ended", attempt=attempt, why="done")  # for the next start: nothing of it counts
                self.revoke(attempt, "done")
                self._masks.forget(attempt)
                agent.attempts.discard(attempt)
                return {"ok": True}
            case "approve" | "deny":
                return {"ok": True, **approval.decide(self._leases, self._write, order, self._clock(), origin="fleet")}
            case "ping":
                return {"ok": True, "leases": len(self._leases)}
            case _:
                raise VaultUsageError("unknown op")

    def _open(self, agent: _Agent, order: Mapping[str, object], fds: tuple[int, ...]) -> tuple[Reply, bool]:
        attempt, job = str(order["attempt"]), str(order["job"])
        seat = orders.seat_of(order, fds)
        asks = [orders.ask_of(item, order) for item in cast("list[object]", order["asks"])]
        adopted = self._adopted(attempt, fds[0])
        opened = adopted or self._leases.open(attempt, job, asks, self._store.names, self._clock())
        try:
            if opened.lease is None:
                self._write("lease.refused", attempt=attempt, names=[ask.secret for ask in asks])
                return {"ok": False, "err": "denied", "message": opened.message}, False
            opened.lease.tenant, opened.lease.signer = str(order["tenant"]), str(order["signer"])
            rules = {name: granted.rule for name, granted in opened.lease.grants.items()}
            since_s = round(opened.lease.since_s, 3)
            self._write("lease.opened", attempt=attempt, rules=rules, pending=list(opened.pending), since_s=since_s)
            if adopted is None:
                self._masks.pin(opened.lease)
            channel = orders.channel_of(fds[0])
        except BaseException:
            self._leases.close(attempt, over=opened.lease is None or opened.lease.fresh)
            raise
        kept = _Channel(opened.lease, seat, channel, (fds[1], fds[2]), agent.number)
        if len(fds) > 3:
            os.close(fds[3])
        peer.arm(channel, rights=False)
        self._channels[attempt] = kept
        agent.attempts.add(attempt)
        opened.lease.owed = int(str(order.get("sealed", 0)))
        if not opened.lease.owed:
            self._hear(kept)
        for fd in kept.pidfds:
            self._selector.register(fd, selectors.EVENT_READ, lambda: self.revoke(attempt, "exit"))
        return {"ok": True, "pending": list(opened.pending), "sdks": opened.sdks}, True

    def _adopted(self, attempt: str, fd: int) -> Opened | None:
        """Return the lease that an agent comes back for: what was spent stays spent, the job's channel stays open.

        It may come before the end of its old line is heard.
        """
        channel = self._channels.get(attempt)
        if channel is None or os.fstat(fd).st_ino != os.fstat(channel.socket.fileno()).st_ino:
            return None
        former = self._agents.get(channel.agent)
        if former is not None:
            former.attempts.discard(attempt)
        self._orphans.pop(attempt, None)
        del self._channels[attempt]
        self._let_go(channel)
        self._note("lease.adopted", attempt=attempt)
        channel.lease.sealed.clear()
        return Opened(channel.lease)

    def _hear(self, channel: _Channel) -> None:
        self._selector.register(channel.socket, selectors.EVENT_READ, lambda: self._from_job(channel))

    def _sealed(self, lease: Lease, order: Mapping[str, object]) -> Reply:
        """Take a sealed value; a job is heard once its lease has all of them, also after a restart of ours."""
        had = len(lease.sealed)
        reply = self._unsealer.take(lease, order)
        channel = self._channels.get(lease.attempt)
        if channel is not None and had < len(lease.sealed) == lease.owed:
            self._hear(channel)
        return reply

    def _agent_gone(self, agent: _Agent) -> None:
        self._selector.unregister(agent.socket)
        agent.socket.close()
        del self._agents[agent.number]
        until_s = self._clock() + AGENT_GRACE_S
        for attempt in agent.attempts:
            channel = self._channels.get(attempt)
            if channel is not None:
                channel.orphan_until_s = until_s
                self._orphans[attempt] = channel
            else:
                self._masks.forget(attempt)

    # jobs

    def _from_job(self, channel: _Channel) -> None:
        for _ in range(_FAIR_SHARE):
            if self._channels.get(channel.lease.attempt) is not channel:
                return
            try:
                message = peer.receive(channel.socket)
            except BlockingIOError:
                return
            except OSError:
                message = None
            if message is None:
                self.revoke(channel.lease.attempt, "channel closed")
                return
            try:
                reply = self._job_word(channel, message)
            finally:
                message.close()
            if not self._send(channel.socket, reply):
                self.revoke(channel.lease.attempt, "does not read")

    def _job_word(self, channel: _Channel, message: Message) -> Reply:
        lease = channel.lease
        if not channel.seat.holds(message.sender):
            return self._refuse(lease, "not-you", uid=message.sender.uid)
        if message.cut:
            return self._refuse(lease, "too-big")
        if not lease.admit(self._clock()):
            return {"ok": False, "err": "slow-down"}
        try:
            order = orders.read(message.data)
        except (ValueError, RecursionError):
            return self._refuse(lease, "garbage")
        try:
            reply = self._window.answer(lease, order, self._clock())
        except RefusedError as refused:
            return self._refuse(lease, refused.code, **refused.fields)
        # Between the question and the answer the asker may have ended, and its number with it.
        return reply if channel.seat.holds(message.sender) else self._refuse(lease, "not-you")

    def _refuse(self, lease: Lease, code: str, **fields: object) -> Reply:
        lease.bad += 1
        self._note("request.refused", attempt=lease.attempt, code=code, **fields)
        if lease.bad > MAX_BAD:
            self.revoke(lease.attempt, "too many wrong requests")
        return {"ok": False, "err": code}

    # the record and time

    def _write(self, event: str, **fields: object) -> None:
        self._record.write(event, **fields)
        self._dirty = True

    def _note(self, event: str, **fields: object) -> None:
        """Record what is no release: without room for it, nothing that was going to be given is given anyway."""
        try:
            self._write(event, **fields)
        except AuditError as error:
            log.warning("not recorded", extra={"event": event, "error": str(error)})

    def _housekeep(self) -> None:
        now_s = self._clock()
        for attempt in [a for a, channel in self._orphans.items() if (channel.orphan_until_s or 0.0) <= now_s]:
            self.revoke(attempt, "agent gone")
        if self._dirty and now_s - self._synced_s >= _SYNC_EVERY_S:
            self._synced_s, self._dirty = now_s, False
            with suppress(AuditError):
                self._record.sync()

    def _next_s(self) -> float | None:
        if self._dirty:
            return _SYNC_EVERY_S
        return 0.1 if self._orphans else None

    def _send(self, channel: socket.socket, reply: Reply) -> bool:
        try:
            channel.send(json.dumps(reply, separators=(",", ":")).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def _let_go(self, channel: _Channel) -> None:
        for fd in (channel.socket.fileno(), *channel.pidfds):
            with suppress(KeyError, ValueError):
                self._selector.unregister(fd)
        channel.socket.close()
        for fd in channel.pidfds:
            with suppress(OSError):
                os.close(fd)
