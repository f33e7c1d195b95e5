"""The way of an attempt to its node: hands out sessions on descriptor 100, counts and bounds what comes of them.

Called by the supervisor (one Channel for each attempt that runs) and containment/reused.py (OPEN of a reused worker).
Must never cost an attempt that calls nothing more than this object, hand out more than MAX_SESSIONS at a time, read on
after a word that no honest job says, or serve anything once the attempt is over.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from node_agent.kernel.bucket import Bucket
from node_agent.kernel.caller import Caller
from node_agent.kernel.desk import Desk
from node_agent.kernel.rota import Rota
from node_agent.kernel.session import CallSession
from node_agent.pipes import Pipes
from node_agent.run import Run
from runner.wire import frames, ids
from runner.wire.calls import MAX_SESSIONS
from runner.wire.event import EventType
from runner.wire.frames import Op
from runner.wire.grants import Grants
from runner.wire.spec import JobSpec

__all__ = ["BURST", "CALLS_PER_S", "Channel", "Exchange", "Plug", "Talker"]

#: How many calls an attempt may make; what is over it waits unread.
CALLS_PER_S: Final = 2000.0
BURST: Final = 500.0
#: Processor time that counts as one call; what takes longer counts as several, so that no job gets more of the loop.
CALL_S: Final = 100e-6
#: How many sessions an attempt may ask for.
OPENS_PER_S: Final = 50.0
_OPENS_BURST: Final = 32.0
#: Most words of one look at a channel.
_WORDS: Final = 16
#: Violations of one attempt that are told.
_TOLD: Final = 3
_WORD_BYTES: Final = 64
_SO_PASSRIGHTS: Final = 83
_RUNNING: Final = frames.pack(Op.RUNNING)
_OPEN: Final = frames.pack(Op.OPEN)
_SESSION: Final = frames.pack(Op.SESSION)
_BUSY: Final = frames.pack(Op.BUSY)


class Talker(Protocol):
    """The part of an attempt that a channel needs."""

    channel: socket.socket
    #: Called for each OPEN by who reads the channel itself (a reused worker's attempt).
    on_open: Callable[[], object] | None

    def hear(self) -> bool:
        """Read the worker's first word, if there is one; return whether it is READY."""

    def listens_itself(self) -> bool:
        """Whether it reads the channel itself, and calls ``on_open``."""


class Exchange:
    """The kernel of one boot as the supervisor sees it: one desk, one rota, all channels.

    A job that was granted what it can only use by calls is listened to from its start on; any other one from where its
    output is (output.LISTEN_S), so that one that ends before costs nothing.
    """

    def __init__(self, desk: Desk | None, pipes: Pipes, clock: Callable[[], float] = time.monotonic) -> None:
        """``desk``: None where no job gets a session."""
        self.desk = desk
        self.pipes = pipes
        self.clock = clock
        self.rota = Rota()

    def plug(self, run: Run, spec: JobSpec, attempt: Talker) -> Plug:
        """Return what stands for the channel of an attempt that is about to run; ``close`` it at its end."""
        found = Plug(self, run, spec, attempt)
        if self.desk is not None and (attempt.listens_itself() or _asks_for_calls(spec.grants)):
            found.listen()
        return found

    def channel(self, run: Run, spec: JobSpec, attempt: Talker) -> Channel:
        """Return the channel of an attempt; ``close`` it at its end."""
        return Channel(self, run, spec, attempt)


class Plug:
    """An attempt's channel once there is something to hear; before that nothing but this object."""

    __slots__ = ("_attempt", "_channel", "_closed", "_exchange", "_run", "_spec")

    def __init__(self, exchange: Exchange, run: Run, spec: JobSpec, attempt: Talker) -> None:
        self._exchange = exchange
        self._run = run
        self._spec = spec
        self._attempt = attempt
        self._channel: Channel | None = None
        self._closed = False

    def listen(self) -> None:
        """Hear the attempt from now on. Idempotent."""
        if self._channel is None and not self._closed and self._exchange.desk is not None:
            self._channel = self._exchange.channel(self._run, self._spec, self._attempt)
            self._channel.listen()

    def close(self, _: object = None) -> None:
        """End every session: the attempt is over. Idempotent; takes the future that it may be called by."""
        self._closed = True
        if self._channel is not None:
            self._channel.close()


class Channel:
    """One attempt's sessions. ``close`` is idempotent."""

    __slots__ = (
        "_attempt",
        "_bucket",
        "_closed",
        "_exchange",
        "_first",
        "_listening",
        "_made",
        "_opens",
        "_owed",
        "_ready",
        "_run",
        "_running",
        "_sessions",
        "_spec",
        "_timers",
        "_told",
    )

    def __init__(self, exchange: Exchange, run: Run, spec: JobSpec, attempt: Talker) -> None:
        self._exchange = exchange
        self._run, self._spec = run, spec
        self._attempt = attempt
        self._sessions: set[CallSession] = set()
        self._ready: deque[CallSession] = deque()
        self._bucket: Bucket | None = None
        self._opens: Bucket | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._first: Caller | None = None
        self._made = self._told = 0
        self._listening = self._running = self._closed = self._owed = False

    def listen(self) -> None:
        """Hear the attempt from now on. Idempotent."""
        if self._listening or self._closed or self._exchange.desk is None:
            return
        self._listening = True
        if self._attempt.listens_itself():
            self._attempt.on_open = self._open
        else:
            self._exchange.pipes.watch(self._attempt.channel.fileno(), self._words)

    def close(self) -> None:
        """End every session: the attempt is over."""
        if self._closed:
            return
        self._stop_listening()
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._exchange.rota.leave(self)
        for session in tuple(self._sessions):
            session.end()
        if self._first is not None and self._exchange.desk is not None:
            self._exchange.desk.ended(self._first)

    def ready(self, session: CallSession) -> None:
        """A session has something to read: it is read when it is this attempt's turn."""
        if session not in self._ready:
            self._ready.append(session)
        self._exchange.rota.join(self)

    def closed(self, session: CallSession) -> None:
        """A session has ended."""
        self._sessions.discard(session)
        if session in self._ready:
            self._ready.remove(session)

    def violated(self, what: str) -> None:
        """Tell, a few times for each attempt, that the job did what no honest one does."""
        desk = self._exchange.desk
        if self._told >= _TOLD or desk is None:
            return
        self._told += 1
        detail: dict[str, str | int | float | bool] = {"what": what}
        desk.around.told(self._spec.id, self._run.attempt, EventType.CHANNEL_VIOLATION, detail)

    def charge(self, calls: float) -> None:
        """Something costs as much as so many calls."""
        if self._bucket is not None:
            self._bucket.charge(calls)

    def worked(self, took_s: float) -> None:
        """A call that waits went on: it costs as many calls as it took of the loop's time."""
        self.charge(took_s / CALL_S)
        self._exchange.rota.worked(took_s)

    @property
    def light(self) -> bool:
        """Whether it has more than half of its calls left."""
        return self._bucket is None or self._bucket.has(BURST / 2)

    def step(self) -> bool:
        """Handle one call of one session; without a call left in the bucket, all of them wait unread."""
        if self._bucket is None or self._closed:
            return False
        if not self._bucket.take():
            self._rest(self._bucket.wait_s())
            return False
        if self._ready:
            session = self._ready.popleft()
            began_s = time.thread_time()
            if session.step():
                self._ready.append(session)
            # Some calls take longer to read than others to carry out: what counts is the loop's time.
            self._bucket.charge(max(0.0, (time.thread_time() - began_s) / CALL_S - 1))
        return bool(self._ready)

    def _rest(self, wait_s: float) -> None:
        self._ready.clear()
        for session in self._sessions:
            session.rest()
        if "rest" not in self._timers:
            self._timers["rest"] = asyncio.get_running_loop().call_later(wait_s, self._wake)

    def _wake(self) -> None:
        self._timers.pop("rest", None)
        for session in self._sessions:
            session.watch()

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            self._attempt.on_open = None
            if not self._attempt.listens_itself():
                self._exchange.pipes.forget(self._attempt.channel.fileno())

    def _words(self, _: int) -> None:
        """Hear the job's processes. What is no word of theirs, at its time, ends the channel."""
        if not self._attempt.hear():
            self._stop_listening()
            return
        for _ in range(_WORDS):
            try:
                word = self._attempt.channel.recv(_WORD_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                word = b""
            if word == _RUNNING and not self._running:
                self._running = True
            elif word == _OPEN and self._running:
                if not self._open():
                    return
            else:
                self._end(word)
                return

    def _end(self, word: bytes) -> None:
        self._stop_listening()
        if word:
            self.violated("an unknown word on the channel")
        # Who asks from now on is told at once that nobody answers.
        try:  # noqa: SIM105 - the hot path's module does without contextlib
            self._attempt.channel.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        for session in tuple(self._sessions):
            session.end()

    def _open(self) -> bool:
        """Answer one OPEN; return whether another one may be read now."""
        desk = self._exchange.desk
        if self._closed or desk is None:
            return False
        if self._opens is None:
            self._opens = Bucket(OPENS_PER_S, _OPENS_BURST, self._exchange.clock)
            self._bucket = Bucket(CALLS_PER_S, BURST, self._exchange.clock)
        if not self._opens.take():
            # Who asks more often is read later; a worker whose words its attempt reads is told to come again.
            if self._attempt.listens_itself():
                self._say(_BUSY)
                return False
            self._stop_listening()
            self._owed = True
            self._timers["open"] = asyncio.get_running_loop().call_later(self._opens.wait_s(2.0), self._pay)
            return False
        if len(self._sessions) >= MAX_SESSIONS:
            self._say(_BUSY)
            return True
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setblocking(False)
        for end in (near, far):
            # A job can't put descriptors into what the agent would have to close (attack 51).
            try:  # noqa: SIM105 - as above
                end.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
            except OSError:
                pass  # before Linux 6.16: what comes is dropped, because nothing here asks for it
        with far:
            try:
                socket.send_fds(self._attempt.channel, [_SESSION], [far.fileno()], socket.MSG_DONTWAIT)
            except OSError:
                near.close()
                self._say(_BUSY)
                return True
        self._made += 1
        name = ids.attempt_name(self._spec.id, self._run.attempt)
        caller = Caller(self._run, self._spec, self._made, name, self._run.signer, _deaf)
        self._first = self._first or caller
        self._sessions.add(CallSession(self, near, caller, desk.table, desk.around, self._exchange.pipes))
        return True

    def _pay(self) -> None:
        """Answer the OPEN that came too early, and hear the others again."""
        self._timers.pop("open", None)
        if self._owed:
            self._owed = False
            if self._open():
                self.listen()

    def _say(self, word: bytes) -> None:
        try:  # noqa: SIM105 - as above
            self._attempt.channel.send(word, socket.MSG_DONTWAIT)
        except OSError:
            pass


def _asks_for_calls(grants: Grants) -> bool:
    """Whether a job was granted what it can only use by calls."""
    asked = grants.mail or grants.tools or grants.watch or grants.agent or grants.state_bytes or grants.spawn
    return bool(asked)


def _deaf(_: object) -> bool:
    return False
