"""Signals for jobs: `runner.signals`. Handlers and masks of this process, and signals to others.

Called by jobs. Must never decide about a signal that is enforced: KILL, STOP, CONT, POLICY and TRUST act from outside
whatever is said here, and what BUDGET, LOOP and DRIFT do follows after their handler was told.

    from runner import signals

    signals.on("USR1", lambda told: save())           # runs in a thread of its own
    with signals.blocked("TERM"):                     # comes when the block is left
        ...
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, cast

from runner.guest.calls import CallRefused, Session, call
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.signals import TOLD, SignalName

__all__ = ["Outcome", "Told", "block", "blocked", "command", "history", "on", "send", "watch"]

#: How often who waits for the thread looks whether there still is one, in seconds.
_LOOK_S: Final = 0.5
_SYSTEM: Final = {
    SignalName.INT: signal.SIGINT,
    SignalName.TERM: signal.SIGTERM,
    SignalName.USR1: signal.SIGUSR1,
    SignalName.USR2: signal.SIGUSR2,
}


@dataclass(frozen=True, slots=True)
class Told:
    """A signal that this process was told: which, from whom (the node's word), when (Unix ms) and why."""

    name: SignalName
    sender: str
    at_ms: int
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a signal: ``delivered``, ``queued``, ``refused`` or ``applied``."""

    outcome: str
    reason: str = ""


Handler = Callable[[Told], object]


class _Ear:
    """The thread of this process that hears signals, on a session of its own."""

    def __init__(self) -> None:
        self.handlers: dict[SignalName, Handler] = {}
        self.blocked: frozenset[SignalName] = frozenset()
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._stirred, self._stir = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wanted: frozenset[SignalName] | None = None
        self._masked = threading.Event()
        self._failed: CallRefused | None = None
        self._session = Session(on_push=self._hear)
        self._session.call("signal.listen")
        self._thread = threading.Thread(target=self._run, name="ringfence-signals", daemon=True)
        self._thread.start()

    def mask(self, names: frozenset[SignalName]) -> None:
        """Hold up these and no others; returns once the node knows. Raises CallRefused."""
        if threading.current_thread() is self._thread:
            # A handler asks: nobody else could tell the node now.
            self._session.call("signal.mask", blocked=[str(name) for name in sorted(names)])
            self.blocked = names
            return
        with self._lock:
            self._masked.clear()
            self._wanted, self._failed = names, None
            os.write(self._stir, b"m")
            while not self._masked.wait(_LOOK_S):
                if not self._thread.is_alive():
                    raise CallRefused(ErrorCode.ENDED, "the node has ended the session that signals came by")
            if self._failed is not None:
                raise self._failed
            self.blocked = names

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._session.fileno(), select.POLLIN)
        poll.register(self._stirred, select.POLLIN)
        while True:
            poll.poll()
            try:
                with suppress(BlockingIOError):
                    while os.read(self._stirred, 64):
                        pass
                if self._wanted is not None:
                    self._tell_mask()
                while (message := self._session.pushed(0)) is not None:
                    self._hear(message)
            except CallRefused as refused:
                # The attempt is over, and this process with it.
                self._failed = refused
                self._masked.set()
                return

    def _tell_mask(self) -> None:
        names, self._wanted = self._wanted or frozenset(), None
        try:
            self._session.call("signal.mask", blocked=[str(name) for name in sorted(names)])
        except CallRefused as refused:
            self._failed = refused
        self._masked.set()

    def _hear(self, message: dict[str, Json]) -> None:
        found = message.get("signal")
        if not isinstance(found, dict):
            return
        told = Told(
            SignalName(str(found["signal"])), str(found["from"]), cast("int", found["at_ms"]), str(found["why"])
        )
        handler = self.handlers.get(told.name)
        if handler is not None:
            with suppress(Exception):  # a handler's fault is its own; the next signal comes all the same
                handler(told)
        elif told.name in TOLD:
            # As if nobody had listened.
            os.kill(os.getpid(), _SYSTEM[told.name])


_ears: Final[list[_Ear]] = []
_making: Final = threading.Lock()


def on(name: str, handler: Handler | None) -> None:
    """Call ``handler`` (in a thread of its own) for each signal of that name; None: the system's own way again.

    Raises CallRefused, ValueError: no such signal.
    """
    known = SignalName(name)
    ear = _ear()
    if handler is None:
        ear.handlers.pop(known, None)
    else:
        ear.handlers[known] = handler


def block(*names: str) -> None:
    """Hold up these signals and no others; what waited and may come now comes, in order, each once.

    Raises CallRefused: DENIED, one of them acts from outside.
    """
    _ear().mask(frozenset(SignalName(name) for name in names))


@contextmanager
def blocked(*names: str) -> Iterator[None]:
    """Hold up these signals, too, until the block is left. Raises CallRefused."""
    ear = _ear()
    before = ear.blocked
    ear.mask(before | frozenset(SignalName(name) for name in names))
    try:
        yield
    finally:
        ear.mask(before)


def send(name: str, job: str = "", why: str = "") -> Outcome:
    """Send a signal to a job (empty: this one) that this one started, or watches. Raises CallRefused."""
    found = cast("dict[str, Json]", call("signal.send", signal=str(SignalName(name)), job=job, why=why))
    return Outcome(str(found["outcome"]), str(found.get("reason", "")))


def history() -> list[dict[str, Json]]:
    """Return the last signals of this attempt and what became of each. Raises CallRefused."""
    return cast("dict[str, list[dict[str, Json]]]", call("signal.list"))["history"]


def watch(wait: float = 10.0, after: str = "") -> Iterator[dict[str, Json]]:
    """Return what becomes of the jobs that this one watches (``watch`` in its grants), for ever. Raises CallRefused.

    ``after``: where to go on; empty: from now on, whenever the first of it is asked for.
    """
    return _news(_look(0.0, after), wait)


def _news(found: dict[str, Json], wait: float) -> Iterator[dict[str, Json]]:
    while True:
        yield from cast("list[dict[str, Json]]", found["events"])
        found = _look(wait, str(found["after"]))


def _look(wait: float, after: str) -> dict[str, Json]:
    return cast("dict[str, Json]", call("job.watch", after=after, wait_s=float(wait)))


def command(words: list[str]) -> int:
    """Carry out `ringfence-guest signals …`; return the exit code. Raises CallRefused."""
    if words and words[0] == "send" and len(words) in (2, 3):
        name = words[1].upper().removeprefix("SIG")
        if name not in set(SignalName):
            sys.stderr.write(f"ringfence-guest: no signal {words[1]!r}; there are {', '.join(SignalName)}\n")
            return 2
        sys.stdout.write(f"{send(name, *words[2:]).outcome}\n")
    elif words == ["history"]:
        for row in history():
            sys.stdout.write(json.dumps(row) + "\n")
    else:
        sys.stderr.write("usage: ringfence-guest signals send NAME [JOB] | history\n")
        return 2
    return 0


def _ear() -> _Ear:
    with _making:
        if not _ears or _ears[0].pid != os.getpid():
            _ears[:] = [_Ear()]
        return _ears[0]
