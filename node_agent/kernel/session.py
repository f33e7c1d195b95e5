"""One session of calls: reads records, checks them, has them carried out, answers in order.

Made by the channel, one per process of the job that asked. Must never carry out a call before policy and recorder have
spoken, answer one after the attempt's end, or hold more than MAX_IN_FLIGHT calls whose answers were not taken.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import time
import types
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from node_agent.errors import InvariantError
from node_agent.kernel.bucket import Bucket
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from node_agent.pipes import Pipes
from node_agent.policycalls import Verdict
from runner.wire import codec, record
from runner.wire.calls import MAX_CALL_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.errors import CodecError, RecordError

__all__ = ["MAX_IN_FLIGHT", "STUCK_S", "CallSession", "Owner"]

log = logging.getLogger(__name__)

#: Calls of one session that are under way or whose answers were not taken yet.
MAX_IN_FLIGHT: Final = 8
#: What a call that waits for something costs more than one that does not.
WAITING_CALLS: Final = 4.0
#: A running process that takes no answer for so long loses its session.
STUCK_S: Final = 10.0
_AGAIN_S: Final = 0.005
#: Most characters of a resource in a record.
_MOST_TOLD: Final = 256
_MOST_NUMBER: Final = 2**53
#: Faults of parts that are logged, the node's all together: a job that found one could fill the disk. All are counted.
_faults: Final = Bucket(0.2, 20.0)
#: Where records arrive; the loop reads one at a time.
_space: Final = memoryview(bytearray(MAX_CALL_BYTES + 1))


class Owner(Protocol):
    """The channel that a session belongs to."""

    def ready(self, session: CallSession) -> None:
        """The session has something to read."""

    def closed(self, session: CallSession) -> None:
        """The session has ended."""

    def violated(self, what: str) -> None:
        """The job sent what no honest one does."""

    def charge(self, calls: float) -> None:
        """A call costs as much as so many more."""

    def worked(self, took_s: float) -> None:
        """A call that waits went on, and took so much of the loop's time."""


@dataclass(slots=True)
class _Call:
    """A call whose answer was not sent yet; ``answer`` once there is one."""

    number: int
    entry: Entry
    fields: dict[str, Json]
    data: bytes
    started_s: float
    resource: str = ""
    answer: bytes | None = None


class CallSession:
    """The node's end of one session. ``end`` is idempotent."""

    def __init__(
        self, owner: Owner, end: socket.socket, caller: Caller, table: Mapping[str, Entry], around: Around, pipes: Pipes
    ) -> None:
        self._owner = owner
        self._socket = end
        self._caller = caller
        self._table = table
        self._around = around
        self._pipes = pipes
        self._out: deque[_Call] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stuck_s = 0.0
        self._watched = False
        self._ended = False
        caller.push = self.push
        self.watch()

    @property
    def ended(self) -> bool:
        """Whether nothing is answered any more."""
        return self._ended

    def watch(self) -> None:
        """Hear of what comes in, unless the session has enough to do."""
        if not (self._watched or self._ended) and self._room():
            self._watched = True
            self._pipes.watch(self._socket.fileno(), self._readable)

    def rest(self) -> None:
        """Hear of nothing until ``watch``."""
        if self._watched:
            self._watched = False
            self._pipes.forget(self._socket.fileno())

    def step(self) -> bool:
        """Handle one record; return whether there may be more to read."""
        if self._ended or not self._room():
            return False
        try:
            size = self._socket.recv_into(_space, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            size = 0
        if size == 0:
            self.end()
            return False
        if size > MAX_CALL_BYTES:
            self._refuse(0, ErrorCode.BAD_REQUEST, f"a call has at most {MAX_CALL_BYTES} bytes", "an oversized call")
            return False
        self._take(bytes(_space[:size]))
        if not self._room():
            self.rest()
            return False
        return not self._ended

    def push(self, message: dict[str, Json]) -> bool:
        """Send an unasked record; return whether the process can have it. Never blocks."""
        if self._ended or self._timer is not None:
            return False
        try:
            self._socket.send(codec.dump(message), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def end(self) -> None:
        """Close the session; what is under way is given up, what it holds goes back."""
        if self._ended:
            return
        self.rest()
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._socket.close()
        self._out.clear()
        for give_back in self._caller.closing:
            try:
                give_back()
            except Exception:
                log.exception("a part failed at the end of a session", extra={"job": self._caller.job})
        self._caller.closing.clear()
        self._owner.closed(self)

    def _room(self) -> bool:
        return len(self._out) < MAX_IN_FLIGHT and self._timer is None

    def _readable(self, _: int) -> None:
        self._owner.ready(self)

    def _take(self, data: bytes) -> None:
        try:
            found = codec.load(data, limit_bytes=MAX_CALL_BYTES)
        except CodecError as error:
            self._refuse(0, ErrorCode.BAD_REQUEST, str(error), "a call that is no strict JSON")
            return
        number = found.pop("n", None) if isinstance(found, dict) else None
        op = found.pop("op", None) if isinstance(found, dict) else None
        if not isinstance(found, dict) or type(number) is not int or not 0 <= number <= _MOST_NUMBER:
            self._refuse(0, ErrorCode.BAD_REQUEST, "a call is an object with a number n", "a call without number")
            return
        entry = self._table.get(op) if isinstance(op, str) else None
        if entry is None:
            self._refuse(number, ErrorCode.UNKNOWN_OP, "this node knows no such call", "an unknown call")
            return
        self._begin(_Call(number, entry, found, data, time.perf_counter()))

    def _begin(self, call: _Call) -> None:
        self._out.append(call)
        try:
            self._check_alive(call.entry)
            ask = record.decode(call.entry.ask, call.fields)
            if call.entry.resource is not None:
                call.resource = call.entry.resource(ask)
            verdict = self._judge(call)
            answer = self._carry_out(call, ask, verdict) if verdict.plain else self._permitted(call, ask, verdict)
        except Exception as error:  # noqa: BLE001 - a part's fault is the node's answer, never the end of its loop
            self._fail(call, error)
            return
        if isinstance(answer, Awaitable):
            self._owner.charge(WAITING_CALLS)
            task = asyncio.get_running_loop().create_task(self._wait(call, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._done(call, answer)

    def _check_alive(self, entry: Entry) -> None:
        """Nothing is carried out for a job that was told to end, but for what it may still put in order."""
        run = self._caller.run
        if run.stopping and (run.forced or not entry.late):
            raise CallError(ErrorCode.ENDED, "this job was told to end")

    def _judge(self, call: _Call) -> Verdict:
        """Ask policy. Raises CallError for a plain no."""
        verdict = self._around.decider.decide(self._caller, call.entry.op, call.resource, call.fields)
        if verdict.effect != "allow":
            self._around.recorder.write(
                "call.judged",
                self._caller.attempt,
                op=call.entry.op,
                resource=call.resource[:_MOST_TOLD],
                effect=verdict.effect,
                rule=verdict.rule,
                policy=verdict.policy,
            )
        if verdict.effect == "deny":
            raise CallError(ErrorCode.DENIED, verdict.reason)
        return verdict

    async def _permitted(self, call: _Call, ask: object, verdict: Verdict) -> Json:
        """Carry the call out once its quotas are taken and whoever has to decide has said yes."""
        decider = self._around.decider
        release = await decider.permit(self._caller, call.entry.op, call.resource, call.fields, verdict)
        try:
            self._check_alive(call.entry)
            answer = self._carry_out(call, ask, verdict)
            return await answer if isinstance(answer, Awaitable) else answer
        finally:
            release()

    def _carry_out(self, call: _Call, ask: object, verdict: Verdict) -> Json | Awaitable[Json]:
        """No record, no action: the arguments stand in it as a hash and a size, never as they are."""
        entry = call.entry
        if entry.changes:
            self._around.recorder.write(
                "call",
                self._caller.attempt,
                op=entry.op,
                resource=call.resource[:_MOST_TOLD],
                sha256=hashlib.sha256(call.data).hexdigest(),
                bytes=len(call.data),
                policy=verdict.policy,
            )
        return entry.handle(self._caller, ask)

    async def _wait(self, call: _Call, answer: Awaitable[Json]) -> None:
        try:
            value = await _metered(answer, self._owner.worked)
        except Exception as error:  # noqa: BLE001 - as in _begin
            self._fail(call, error)
        else:
            self._done(call, value)

    def _done(self, call: _Call, value: Json) -> None:
        try:
            data = codec.dump({"n": call.number, "ok": value})
        except CodecError:
            self._fail(call, InvariantError(f"{call.entry.op} answered with what is no JSON"))
            return
        if len(data) > MAX_CALL_BYTES:
            why = f"the answer has {len(data)} bytes: ask for less at a time"
            self._fail(call, CallError(ErrorCode.TOO_LARGE, why))
            return
        self._answer(call, "ok", data)

    def _fail(self, call: _Call, error: Exception) -> None:
        if isinstance(error, CallError):
            code, why = error.error, error.why
        elif isinstance(error, RecordError):
            code, why = ErrorCode.BAD_REQUEST, str(error)
        else:
            if _faults.take():
                extra = {"job": self._caller.job, "op": call.entry.op}
                log.error("a call failed in the agent", exc_info=error, extra=extra)
            code, why = ErrorCode.FAULT, f"the node agent failed ({type(error).__name__})"
        self._answer(call, code.value, _refusal(call.number, code, why))

    def _answer(self, call: _Call, outcome: str, data: bytes) -> None:
        took_ms = (time.perf_counter() - call.started_s) * 1000
        try:
            for note in self._around.noting:
                note(self._caller, call.entry.op, call.resource[:_MOST_TOLD], outcome, took_ms)
        except Exception:
            log.exception("a call was carried out and could not be counted", extra={"op": call.entry.op})
        # Whoever takes no answers holds what it asked with for as long: a parsed record is much larger than its text.
        call.answer, call.data, call.fields = data, b"", {}
        self._flush()

    def _refuse(self, number: int, code: ErrorCode, why: str, what: str) -> None:
        """Answer a record that no honest client sends, and end the session."""
        self._owner.violated(what)
        if not self._out and not self._ended:
            try:  # noqa: SIM105 - the hot module does without contextlib
                self._socket.send(_refusal(number, code, why), socket.MSG_DONTWAIT)
            except OSError:
                pass
        self.end()

    def _flush(self) -> None:
        """Send what is answered, in order; what does not fit now is tried again, but not for ever."""
        out = self._out
        while out and (data := out[0].answer) is not None and not self._ended:
            try:
                self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._timer is None:
                    self.rest()
                    self._timer = asyncio.get_running_loop().call_later(_AGAIN_S, self._try_again)
                return
            except OSError:
                self.end()
                return
            out.popleft()
            self._stuck_s = 0.0
        if self._timer is None and not self._ended:
            self.watch()

    def _try_again(self) -> None:
        """A process that was stopped by the node can take nothing: that time does not count."""
        self._timer = None
        if not self._caller.run.holders:
            self._stuck_s += _AGAIN_S
        if self._stuck_s > STUCK_S:
            self._owner.violated("answers that nobody took")
            self.end()
            return
        self._flush()


@types.coroutine
def _metered(answer: Awaitable[Json], worked: Callable[[float], None]) -> Generator[Any, Any, Json]:
    """Wait for a call, and tell of each moment in which it had the loop."""
    steps = answer.__await__()
    thrown: BaseException | None = None
    while True:
        began_s = time.thread_time()
        try:
            awaited = next(steps) if thrown is None else steps.throw(thrown)
        except StopIteration as ended:
            return cast("Json", ended.value)
        finally:
            worked(time.thread_time() - began_s)
        try:
            thrown = None
            yield awaited
        except BaseException as error:  # noqa: BLE001 - passed on to where it is waited for
            thrown = error


def _refusal(number: int, code: ErrorCode, why: str) -> bytes:
    message: dict[str, Any] = {"n": number, "err": code.value, "why": why[:1024]}
    try:
        return codec.dump(message)
    except CodecError:
        return codec.dump(message | {"why": ""})
