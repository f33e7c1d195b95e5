"""A job's way to its node: sessions on descriptor 100, one per thread of each process that calls.

Called by jobs (`runner.files`, `runner.mail`, … and `call` itself) and by ringfence-guest. Must never be loaded by a
task that calls nothing, share a session between threads or across a fork, or be trusted by the node.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from runner.wire import codec, frames
from runner.wire.calls import MAX_CALL_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.errors import CodecError
from runner.wire.frames import FD_KERNEL, Op

__all__ = ["CallRefused", "Session", "call", "forget"]

_OPEN: Final = frames.pack(Op.OPEN)
#: How long the node may take to hand out a session: it listens to a job a moment after its start.
OPEN_S: Final = 10.0
_WORD_BYTES: Final = 64
#: Unasked records that nobody has taken yet; the oldest go first.
_MOST_PUSHED: Final = 256


class CallRefused(Exception):
    """The node did not carry a call out. ``code``: why, one of ErrorCode; ``why``: for people, with the next step."""

    def __init__(self, code: str, why: str = "") -> None:
        super().__init__(f"{code}: {why}" if why else code)
        self.code = code
        self.why = why


class Session:
    """One session of calls, for one thread. ``close`` is idempotent; the node closes it at the attempt's end.

    ``on_push``: called with each unasked record (signals) that comes while an answer is waited for; without it they
    are kept for ``pushed``.
    """

    def __init__(
        self, channel_fd: int | None = None, *, on_push: Callable[[dict[str, Json]], None] | None = None
    ) -> None:
        """Raises CallRefused: QUOTA (too many sessions of this job), ENDED (this process has no way to its node)."""
        self._number = 0
        self._on_push = on_push
        self._pushed: deque[dict[str, Json]] = deque(maxlen=_MOST_PUSHED)
        self._socket: socket.socket | None = None
        self._pid = os.getpid()
        self.busy = False
        self._socket = _opened(FD_KERNEL if channel_fd is None else channel_fd)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def mine(self) -> bool:
        """Whether it was made by this very process, and no call of this thread is under way."""
        return self._pid == os.getpid() and not self.busy and self._socket is not None

    def fileno(self) -> int:
        """Return the descriptor, to wait for unasked records; -1 once it is closed."""
        return -1 if self._socket is None else self._socket.fileno()

    def call(self, op: str, /, **fields: Json) -> Json:
        """Make one call and wait for its answer. Raises CallRefused."""
        if self._socket is None:
            raise CallRefused(ErrorCode.ENDED, "this session is closed")
        self._number += 1
        number = self._number
        try:
            data = codec.dump({**fields, "n": number, "op": op})
        except CodecError as error:
            raise CallRefused(ErrorCode.BAD_REQUEST, str(error)) from None
        if len(data) > MAX_CALL_BYTES:
            raise CallRefused(ErrorCode.BAD_REQUEST, f"{len(data)} bytes, a call has at most {MAX_CALL_BYTES}")
        self.busy = True
        try:
            return self._ask(self._socket, data, number)
        except OSError as error:
            self.close()
            raise CallRefused(ErrorCode.ENDED, f"the session has ended ({error.strerror or error})") from None
        finally:
            self.busy = False

    def pushed(self, timeout_s: float | None = None) -> dict[str, Json] | None:
        """Return the next unasked record, waiting for at most ``timeout_s`` (None: for ever); None if there is none.

        Raises CallRefused: ENDED.
        """
        if self._pushed:
            return self._pushed.popleft()
        if self._socket is None:
            raise CallRefused(ErrorCode.ENDED, "this session is closed")
        if not _readable(self._socket, timeout_s):
            return None
        found = self._receive(self._socket)
        return found if "n" not in found else None

    def close(self) -> None:
        """Give the session back. In a child that inherited it, only this process's copy."""
        held, self._socket = getattr(self, "_socket", None), None
        if held is not None:
            held.close()

    def _ask(self, held: socket.socket, data: bytes, number: int) -> Json:
        held.send(data, socket.MSG_NOSIGNAL)
        while True:
            answer = self._receive(held)
            if answer.get("n") == number:
                break
            if "n" not in answer:
                self._take(answer)
            elif answer["n"] == 0:
                break  # the node could not read the call at all
        if "err" in answer:
            raise CallRefused(str(answer["err"]), str(answer.get("why", "")))
        return answer.get("ok")

    def _receive(self, held: socket.socket) -> dict[str, Json]:
        data = held.recv(MAX_CALL_BYTES)
        if not data:
            self.close()
            raise CallRefused(ErrorCode.ENDED, "the node has ended this session")
        answer = codec.load(data)
        return answer if isinstance(answer, dict) else {}

    def _take(self, message: dict[str, Json]) -> None:
        if self._on_push is None:
            self._pushed.append(message)
        else:
            self._on_push(message)


def call(op: str, /, **fields: Json) -> Json:
    """Make one call on this thread's session, opened at the first one; wait for its answer. Raises CallRefused.

    A call that comes in the middle of another one of the same thread (a signal's handler) has a session of its own.
    """
    held: Session | None = getattr(_own, "session", None)
    if held is not None and held.mine:
        return held.call(op, **fields)
    if held is not None and held.busy and held.fileno() >= 0:
        with Session() as other:
            return other.call(op, **fields)
    _own.session = held = Session()
    return held.call(op, **fields)


_own = threading.local()
#: Called by ``forget``: give up what else holds a session.
forgetting: Final[list[Callable[[], None]]] = []


def forget() -> None:
    """Give this thread's session up: in the child of a fork, whose own it is not, and between two attempts."""
    for give_up in forgetting:
        give_up()
    held: Session | None = getattr(_own, "session", None)
    if held is not None:
        held.busy = False
        held.close()
        del _own.session


os.register_at_fork(after_in_child=forget)


def _opened(channel_fd: int) -> socket.socket:
    try:
        channel = socket.socket(fileno=os.dup(channel_fd))
    except OSError:
        raise CallRefused(ErrorCode.ENDED, f"descriptor {channel_fd} is no way to a node: is this a job?") from None
    with channel:
        try:
            return _asked(channel)
        except OSError as error:
            raise CallRefused(ErrorCode.ENDED, f"no session from the node ({error.strerror or error})") from None


def _asked(channel: socket.socket) -> socket.socket:
    """Ask for a session. Other processes of the job do so, too, and any of them may take the answer."""
    channel.send(_OPEN, socket.MSG_NOSIGNAL)
    until_s = time.monotonic() + OPEN_S
    while (left_s := until_s - time.monotonic()) > 0:
        if not _readable(channel, left_s):
            break
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        with suppress(BlockingIOError):
            word, fds, _, _ = socket.recv_fds(channel, _WORD_BYTES, 1, flags)
            if word[:1] == bytes((Op.SESSION,)) and fds:
                return socket.socket(fileno=fds[0])
            if word[:1] == bytes((Op.BUSY,)):
                raise CallRefused(ErrorCode.QUOTA, "this job has too many sessions: close some, or call from one")
            raise CallRefused(ErrorCode.ENDED, "the node hands out no session to this job any more")
    raise CallRefused(ErrorCode.TIMEOUT, f"the node handed out no session in {OPEN_S:g} s")


def _readable(held: socket.socket, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(held, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
