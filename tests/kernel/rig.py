"""Callers, a recorder, a policy and what stands around a part, for tests that call handlers directly.

Called by the kernel's tests. A fake here only notes and answers; what a part does with the store is tested on a real
one (`around(redis)`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import pytest
from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around, Verdict
from node_agent.kernel.table import Entry
from node_agent.records import Notary, Signed
from node_agent.run import Run
from runner.wire import ids, record
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.grants import Grants
from runner.wire.keys import Keys
from runner.wire.spec import JobSpec
from tests.agent import build

__all__ = ["FakePolicy", "FakeRecorder", "around", "ask", "caller", "refused"]

NODE = "n1"


@dataclass(slots=True)
class FakeRecorder:
    """Notes every line; ``broken`` refuses each one, ``full`` those that the attempt itself has caused."""

    lines: list[tuple[str, str, dict[str, object]]] = field(default_factory=list)
    broken: bool = False
    full: bool = False

    def write(self, kind: str, attempt: str, **fields: str | int | float | bool | None) -> None:
        """Note one line. Raises CallError(UNRECORDED) if broken, SLOW_DOWN if full."""
        if self.full:
            raise CallError(ErrorCode.SLOW_DOWN, "the job has no room in the record")
        self.about(kind, attempt, **fields)

    def about(self, kind: str, attempt: str, **fields: str | int | float | bool | None) -> None:
        """The same, of what others have caused."""
        if self.broken:
            raise CallError(ErrorCode.UNRECORDED, "the recorder takes no line")
        self.lines.append((kind, attempt, dict(fields)))

    def kinds(self) -> list[str]:
        """Return the kinds of the lines in order."""
        return [kind for kind, _, _ in self.lines]


@dataclass(slots=True)
class FakePolicy:
    """Allows everything but what ``effects`` says, by action; notes what it was asked."""

    effects: dict[str, Literal["allow", "deny", "ask"]] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, Json]]] = field(default_factory=list)

    def decide(self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json]) -> Verdict:
        """Answer as told."""
        self.asked.append((action, resource, dict(facts)))
        effect = self.effects.get(action, "allow")
        return Verdict(effect, rule="fake", reason=f"the test says {effect}")

    async def permit(
        self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json], verdict: Verdict
    ) -> Callable[[], None]:
        """Nothing is ever decided: what asks is pending."""
        if verdict.effect == "ask":
            raise CallError(ErrorCode.PENDING, verdict.reason)
        return lambda: None


@dataclass(slots=True)
class Pushed:
    """What was pushed to a caller's process; ``deaf``: it takes none."""

    records: list[dict[str, Json]] = field(default_factory=list)
    deaf: bool = False

    def __call__(self, message: dict[str, Json]) -> bool:
        if not self.deaf:
            self.records.append(message)
        return not self.deaf


def caller(spec: JobSpec | None = None, *, number: int = 1, attempt: int = 1, **grants: object) -> Caller:
    """Return a session of a job of tenant main with these grants; call it on a running loop, or without any.

    ``caller.push.records`` holds what was pushed to it. Another session of one attempt: ``again(caller)``.
    """
    given = Grants(**grants)  # type: ignore[arg-type] # tests name real fields
    job = spec if spec is not None else build.job(grants=given)
    if spec is not None and grants:
        job = dataclasses.replace(spec, grants=given)
    run = _run(job, attempt)
    return Caller(run, job, number, ids.attempt_name(job.id, attempt), "a" * 16, Pushed())


def again(first: Caller, number: int = 2) -> Caller:
    """Return another session of the same attempt."""
    return Caller(first.run, first.spec, number, first.attempt, first.signer, Pushed())


def around(redis: Redis | None = None, **changes: object) -> Around:
    """Return what stands around a part; ``redis`` for parts that use the store, ``changes`` replace fields.

    ``emit`` notes (tenant, Signed) in ``emitted(around)``; recorder and decider are the fakes of this module.
    """
    notary = Notary(build.signer(), NODE, "boot-1", "A")
    emitted: list[tuple[str | None, Signed]] = []

    def emit(tenant: str | None, event: Signed) -> None:
        emitted.append((tenant, event))

    emit.emitted = emitted  # type: ignore[attr-defined] # read by emitted()
    base = Around(cast("Redis", redis), Keys(), NODE, FakeRecorder(), FakePolicy(), notary, emit)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type] # tests name real fields


def emitted(stands: Around) -> list[tuple[str | None, Signed]]:
    """Return what was emitted so far."""
    found: list[tuple[str | None, Signed]] = stands.emit.emitted  # type: ignore[attr-defined] # set by around()
    return found


async def ask(entries: Iterable[Entry], who: Caller, op: str, **fields: object) -> Json:
    """Call ``op`` as the session does: decode the fields, run the handler, wait for it. Raises CallError."""
    entry = next(entry for entry in entries if entry.op == op)
    answer = entry.handle(who, record.decode(entry.ask, fields))
    if asyncio.iscoroutine(answer) or asyncio.isfuture(answer):
        return cast("Json", await answer)
    return cast("Json", answer)


async def refused(entries: Iterable[Entry], who: Caller, op: str, **fields: object) -> ErrorCode:
    """Call ``op``, which must be refused; return why."""
    with pytest.raises(CallError) as caught:
        await ask(entries, who, op, **fields)
    return caught.value.error


def _run(spec: JobSpec, attempt: int) -> Run:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        # A future needs a loop to belong to, even if nobody waits for it.
        loop = asyncio.new_event_loop()
        loop.close()
    futures = {name: loop.create_future() for name in ("proved", "acknowledged", "marked")}
    return Run(spec.id, attempt, 0, 1, spec=spec, selectors=(), started_at_ms=1, **futures)  # type: ignore[arg-type]  # fields by name
