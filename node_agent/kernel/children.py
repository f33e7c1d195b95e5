"""Port: runner.scripts, runner.lineage. Child jobs: what a running job starts, waits for and ends itself with.

Made by the desk. Must never sign a job: what it signs is a record of what was asked, which every other node compares
with the job that a client signed (runner/wire/derived.py, attack 4). Must never let a child come to be after a kill of
a job above it, nor tell a job about another one than those that it started.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, cast

from redis.exceptions import NoScriptError, ResponseError

from node_agent.dependencies import Ended
from node_agent.kernel.caller import Caller
from node_agent.kernel.childforms import ExitAsk, JobAsk, SpawnAsk, WaitAsk, told
from node_agent.kernel.endwatch import MISUSED, EndWatch, bounded, fields_of, states_of
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from runner import lineage
from runner.scripts import loader, payload, rows
from runner.scripts.payload import JobData, Link
from runner.wire import derived, ids, record
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.derived import BeyondError, Child, Origin
from runner.wire.envelope import Domain
from runner.wire.errors import RecordError, WireError
from runner.wire.grants import Grants
from runner.wire.spec import JobSpec
from runner.wire.states import END_STATES

__all__ = ["Children"]

#: Each child carries what was signed for the job above all, and its node reads it on the loop that all jobs share.
MAX_ORIGIN_BYTES: Final = 128 * 1024
#: How often a number may turn out to be taken.
_TRIES: Final = 4
MAX_WAIT_S: Final = 3600.0
#: A job whose signed words are as long is packed by a thread.
_LARGE_BYTES: Final = 16 * 1024
_EXIT_CODES: Final = 256
_MOST_DIGITS: Final = 9
_ENDED: Final = "this attempt is over"


@dataclass(slots=True)
class _Line:
    """What an attempt starts jobs from: what is stored of it, the numbers that it may give, and the next one."""

    found: JobData
    origin: Origin
    next: int
    #: Children by name: a job that asks again and again costs nothing more.
    names: dict[str, str] = field(default_factory=dict)


class Children:
    """The calls job.exit, job.spawn, job.wait and job.status of one boot."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._redis = around.redis
        self._keys = around.keys
        self._lines: dict[str, _Line] = {}
        #: By attempt: the jobs that are known to be below it, and the hash of what makes each; "" if unknown.
        self._mine: dict[str, dict[str, str]] = {}
        self._watch = EndWatch(around.redis, around.keys)
        around.ending.append(self._forget)
        around.stopping.append(self._watch.stop)

    def entries(self) -> tuple[Entry, ...]:
        """Return the calls of this part."""
        spawn = "--spawn N"
        away = (ErrorCode.UNAVAILABLE,)
        return (
            Entry(
                "job.exit",
                ExitAsk,
                self._exit,
                "Ends the attempt with all its processes, as if its first process had exited with `code`.",
                "{}",
                changes=True,
            ),
            Entry(
                "job.spawn",
                SpawnAsk,
                self._spawn,
                "Starts a child job of the same program, with no more than this job itself has.",
                '{"job": its id, "known": whether this job had one of that `name` before}',
                grant=spawn,
                changes=True,
                errors=(ErrorCode.QUOTA, ErrorCode.TOO_LARGE, ErrorCode.CONFLICT, *away),
            ),
            Entry(
                "job.wait",
                WaitAsk,
                self._wait,
                "Waits until a job that this one started has ended, and returns its end as its node signed it.",
                '{"job", "state", "reason", "exit_code", "signal", "node", "attempt", "detail", "result", "omitted"}',
                grant=spawn,
                errors=(ErrorCode.NOT_FOUND, ErrorCode.TIMEOUT, *away),
            ),
            Entry(
                "job.status",
                JobAsk,
                self._status,
                "Tells the stored state of a job that this one started; a hint, unlike what job.wait returns.",
                '{"job", "state", "attempt"}',
                grant=spawn,
                errors=(ErrorCode.NOT_FOUND, *away),
            ),
        )

    def _exit(self, caller: Caller, ask: ExitAsk) -> Json:
        if not 0 <= ask.code < _EXIT_CODES:
            raise CallError(ErrorCode.BAD_REQUEST, "an exit code is 0 to 255")
        _alive(caller)
        # After this turn of the loop, so that the answer is on its way.
        asyncio.get_running_loop().call_soon(caller.run.leave, ask.code)
        return {}

    async def _spawn(self, caller: Caller, ask: SpawnAsk) -> Json:
        caller.needs(caller.spec.grants.spawn is not None, "the right to start jobs (--spawn N)")
        if ask.name:
            _checked(ids.check_name, ask.name, "name")
        line = await self._line(caller)
        if ask.name in line.names:
            return {"job": line.names[ask.name], "known": True}
        for _ in range(_TRIES):
            _alive(caller)
            child = self._asked(caller, ask, line)
            try:
                spec = derived.child_of(line.origin, child).spec
            except BeyondError as error:
                full = error.path == "number"
                raise CallError(ErrorCode.QUOTA if full else ErrorCode.DENIED, str(error)) from None
            except WireError as error:
                raise CallError(ErrorCode.BAD_REQUEST, str(error)) from None
            answer = await self._enqueue(caller, ask.name, line, child, spec)
            if answer is not None:
                return answer
        raise CallError(ErrorCode.CONFLICT, "other processes of this job start jobs at the same time; ask again")

    def _asked(self, caller: Caller, ask: SpawnAsk, line: _Line) -> Child:
        grants = ask.grants
        if ask.inherit:
            if grants is not None:
                raise CallError(ErrorCode.BAD_REQUEST, "inherit takes this job's grants: name no others")
            grants = replace(caller.spec.grants, spawn=None)
        try:
            return Child(
                parent=caller.job,
                attempt=caller.run.attempt,
                node=self._around.notary.node,
                number=line.next,
                task=ask.task,
                argv=ask.argv,
                args=ask.args,
                kwargs=ask.kwargs,
                env=ask.env,
                cwd=ask.cwd,
                grants=grants or Grants(),
                limits=ask.limits,
                retries=ask.retries,
                priority=ask.priority,
                not_after_ms=ask.not_after_ms,
                pin=ask.node,
                fresh=ask.fresh,
                at_most_once=ask.at_most_once,
            )
        except WireError as error:
            raise CallError(ErrorCode.BAD_REQUEST, str(error)) from None

    async def _enqueue(self, caller: Caller, name: str, line: _Line, child: Child, spec: JobSpec) -> Json | None:
        """Enqueue one child; None: its number was taken, and another one is next."""
        data = record.dumps(child, bare=True)
        if len(data) > derived.MAX_CHILD_BYTES:
            raise CallError(ErrorCode.TOO_LARGE, f"a child is asked for in at most {derived.MAX_CHILD_BYTES} bytes")
        notary, found, keys = self._around.notary, line.found, self._keys
        link = Link(data, notary.signer.sign(Domain.CHILD, data), self._around.card)
        made = replace(found, links=(*found.links, link))
        packed = await _packed(made)
        row, now_ms = rows.row(spec, spec.not_before_ms), time.time_ns() // 1_000_000
        below = child.number + 1 + (spec.grants.spawn or 0)
        ttl_s = 7 * 86_400
        document: dict[str, object] = {
            "ttl": ttl_s,
            "jobs": [row],
            "child": {
                "parent": caller.job,
                "claim": f"{notary.node}/{notary.boot}/{caller.run.slot}",
                "attempt": caller.run.attempt,
                "node": notary.node,
                "ancestors": list(caller.spec.ancestors),
                "name": name,
                "number": child.number,
                "below": below,
                "life": max(0, caller.spec.not_after_ms - now_ms) // 1000 + ttl_s,
            },
        }
        places = [keys.seq(), keys.lanes(), keys.queues(), keys.job(spec.id), keys.queue(str(row["lane"]))]
        places += [keys.active(spec.tenant), keys.kids(caller.job)]
        self._around.recorder.write("child", caller.attempt, child=spec.id, number=child.number)
        try:
            await bounded(self._run("spawn", places, document, packed))
        except ResponseError as error:
            return self._refused(caller, name, line, str(error))
        line.next = below
        self._keep(caller, name, line, spec.id, made.sha256)
        return {"job": spec.id, "known": False}

    def _keep(self, caller: Caller, name: str, line: _Line, job: str, digest: str) -> None:
        if name:
            line.names[name] = job
        self._mine.setdefault(caller.attempt, {}).setdefault(job, digest)

    def _refused(self, caller: Caller, name: str, line: _Line, error: str) -> Json | None:
        word, _, rest = error.partition(" ")
        number = int(rest) if rest.isdecimal() and len(rest) <= _MOST_DIGITS else None
        if word == "NUMBER" and number is not None:
            line.next = max(line.next, number)
            return None
        if word == "KNOWN_CHILD" and number is not None:
            if not line.origin.first <= number < line.origin.end:
                raise CallError(ErrorCode.FAULT, f"the store names no child of this job as {name}: choose another name")
            # Worked out, not read: the store may say which of its own children, and no other job.
            job = derived.child_id(line.origin.root, number)
            self._keep(caller, name, line, job, "")
            return {"job": job, "known": True}
        if word == "ENDED":
            raise CallError(ErrorCode.ENDED, "this job, or one above it, is over or is being killed")
        if word == "CROWDED_LANES":
            raise CallError(ErrorCode.QUOTA, "the fleet has as many lanes as may be: ask for no node")
        raise CallError(ErrorCode.UNAVAILABLE, f"the store took no child job: {error[:100]}")

    async def _line(self, caller: Caller) -> _Line:
        """Return what this attempt starts jobs from: what is stored of it has to be what this node verified."""
        line = self._lines.get(caller.attempt)
        if line is not None:
            return line
        if self._around.fleet is None or not self._around.card:
            why = "this node has no card of the fleet, so no other node would take a child job from it"
            raise CallError(ErrorCode.DENIED, f"{why}: `ringfence keys` issues one")
        most = payload.MAX_DATA_BYTES
        read = await bounded(fields_of(self._redis, self._keys, caller.job, ("data",), most))
        (stored,) = cast("list[bytes | None]", read)
        try:
            found = payload.parse(stored or b"")
            if found.sha256 != caller.run.envelope_sha256:
                raise RecordError("it is not the job that this node took")
            if len(found.envelope) > MAX_ORIGIN_BYTES:
                what = f"a job whose signed form has more than {MAX_ORIGIN_BYTES} bytes starts no others"
                raise CallError(ErrorCode.TOO_LARGE, f"{what}: pass long arguments as files")
            origin = lineage.origin_of(found, self._around.fleet, time.time_ns() // 1_000_000)
        except WireError as error:
            raise CallError(ErrorCode.FAULT, f"the stored job can't be read: {error}") from None
        return self._lines.setdefault(caller.attempt, _Line(found, origin, origin.first))

    async def _wait(self, caller: Caller, ask: WaitAsk) -> Json:
        if not 0 <= ask.timeout_s <= MAX_WAIT_S:
            raise CallError(ErrorCode.BAD_REQUEST, f"timeout_s is 0 to {MAX_WAIT_S:g} seconds")
        digest = await self._own(caller, ask.job)
        (stored,) = cast("list[str | None]", await bounded(states_of(self._redis, self._keys, [ask.job])))
        try:
            if stored not in END_STATES:
                async with asyncio.timeout(ask.timeout_s):
                    await self._watch.ended(ask.job)
        except TimeoutError:
            why = f"job {ask.job} has not ended in {ask.timeout_s:g} s; it goes on"
            raise CallError(ErrorCode.TIMEOUT, why) from None
        ends = self._around.ends
        if ends is None:
            raise CallError(ErrorCode.FAULT, "this node can't verify how other jobs ended")
        end = cast("Ended | str", await bounded(ends.end_of(ask.job, caller.tenant, digest)))
        if isinstance(end, str):
            raise CallError(ErrorCode.FAULT, end)
        return told(end)

    async def _status(self, caller: Caller, ask: JobAsk) -> Json:
        await self._own(caller, ask.job)
        (state,) = cast("list[str | None]", await bounded(states_of(self._redis, self._keys, [ask.job])))
        if state == MISUSED:
            raise CallError(ErrorCode.FAULT, f"the store holds nonsense where the state of {ask.job} should be")
        read = await bounded(fields_of(self._redis, self._keys, ask.job, ("rf_attempt",), _MOST_DIGITS))
        (attempt,) = cast("list[bytes | None]", read)
        if state is None:
            raise CallError(ErrorCode.NOT_FOUND, f"the store holds no job {ask.job} any more")
        number = int(attempt) if attempt is not None and attempt.isdigit() else 0
        return {"job": ask.job, "state": state, "attempt": number}

    async def _own(self, caller: Caller, job: str) -> str:
        """Make sure that this job, or one that it started, started ``job``; return the hash of that, "" if unknown."""
        mine = self._mine.setdefault(caller.attempt, {})
        if job in mine:
            return mine[job]
        _checked(ids.check_job_id, job)
        ends = self._around.ends
        spec = cast("JobSpec | None", await bounded(ends.known(job, caller.tenant))) if ends is not None else None
        if spec is None or caller.job not in spec.ancestors:
            raise CallError(ErrorCode.NOT_FOUND, f"this job has started no job {job}")
        return mine.setdefault(job, "")

    async def _run(self, name: str, keys: list[str], document: dict[str, object], blob: bytes) -> object:
        script = loader.load(name)
        text = json.dumps({"rq": self._keys.rq, "rf": self._keys.rf, **document}, separators=(",", ":"))
        words = [*keys, text, blob]
        try:
            return await cast("Awaitable[object]", self._redis.evalsha(script.sha, len(keys), *words))  # type: ignore[arg-type] # redis-py types words as str, it sends bytes as they are
        except NoScriptError:
            return await cast("Awaitable[object]", self._redis.eval(script.text, len(keys), *words))  # type: ignore[arg-type] # as above

    def _forget(self, caller: Caller) -> None:
        self._lines.pop(caller.attempt, None)
        self._mine.pop(caller.attempt, None)


async def _packed(job: JobData) -> bytes:
    """Return the stored form. Compressing a large one takes milliseconds, in which the loop belongs to others."""
    words = (job.envelope, job.signature, job.occurrence, job.links)
    if len(job.envelope) + len(job.links[-1].child) < _LARGE_BYTES:
        return payload.pack(*words)
    return await asyncio.to_thread(payload.pack, *words)


def _alive(caller: Caller) -> None:
    if caller.run.stopping or caller.run.proved.done():
        raise CallError(ErrorCode.ENDED, _ENDED)


def _checked(check: Callable[..., object], *words: str) -> None:
    try:
        check(*words)
    except WireError as error:
        raise CallError(ErrorCode.BAD_REQUEST, str(error)) from None
