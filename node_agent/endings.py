"""From an ending to the Finish that the turn writes: outcome, event, result and RQ's failure text, signed.

Called by the supervisor. Pure but for the signatures' key. Must never put a job's output into an event.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Final

from node_agent.admission import Denial
from node_agent.containment.errors import ContainmentError, DoorError, GroupError, LeaseError, SetupError
from node_agent.containment.plan import Usage, Verdict
from node_agent.lifecycle import LIMIT_REASONS, Ending, next_attempt_ms
from node_agent.records import Notary
from node_agent.resultcheck import Result
from node_agent.run import KillOrder, Run, now_ms
from node_agent.turns import Claim, Finish, KillWord
from runner.wire import record
from runner.wire.command import MAX_COMMAND_BYTES, Command
from runner.wire.errors import WireError
from runner.wire.event import EventType
from runner.wire.receipt import Outcome
from runner.wire.states import FailReason, RefuseReason, State

__all__ = [
    "Evidence",
    "command_result",
    "denied",
    "exception_ending",
    "finish_of",
    "order_of",
    "retry_ms",
    "unbuilt",
]

_TEXT_LIMIT: Final = 64 * 1024


def denied(denial: Denial) -> Ending:
    """Return the end of a job that was never let in."""
    return Ending(State.REFUSED, denial.reason, 125, detail=denial.message)


def command_result(ending: Ending) -> Result:
    """Return what a command's result is: nothing; its exit code is part of the outcome."""
    return Result(value=b"null" if ending.state == State.FINISHED else None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of an attempt's end besides its state."""

    verdict: Verdict | None = None
    result: Result | None = None
    tail: str = ""
    output_bytes: int = 0


def finish_of(claim: Claim, run: Run, ending: Ending, notary: Notary, evidence: Evidence | None = None) -> Finish:
    """Return the Finish of one attempt: the next attempt if its end allows one, else the job's one end."""
    known = evidence or Evidence()
    started = run.started_at_ms is not None
    if run.cause in {"shutdown", "lease", "drain", "crowded"} and not started:
        return Finish(claim, "release")
    delay_ms = None if run.orders else retry_ms(run, ending, claim.attempt, known)
    if delay_ms is not None:
        return _retry(claim, ending, notary, known, started=started, delay_ms=delay_ms)
    value = known.result.value if known.result is not None and ending.state == State.FINISHED else None
    outcome = notary.outcome(_outcome(claim, run, ending, notary, known, value))
    facts = _detail(run, ending, known.verdict, known.output_bytes)
    event = notary.turn_event(EventType.JOB_ENDED, job=claim.job, attempt=claim.attempt, detail=facts)
    return Finish(
        claim=claim,
        kind="end",
        state=ending.state,
        reason=ending.reason,
        started=started,
        outcome=outcome.payload,
        outcome_signature=outcome.signature,
        event=event.payload,
        event_signature=event.signature,
        return_value=value,
        failure="" if ending.state == State.FINISHED else _failure(ending, known),
        wall_s=known.verdict.usage.wall_s if known.verdict is not None else 0.0,
    )


def retry_ms(run: Run, ending: Ending, attempt: int, known: Evidence) -> int | None:
    """Return in how many milliseconds the next attempt would follow, None if none would."""
    if run.spec is None or ending.state == State.FINISHED:
        return None
    if run.cause == "parked" and ending.reason == "parked":
        left_ms = run.spec.not_after_ms - now_ms() - 1000
        return min(run.parked_ms, left_ms) if left_ms > 0 else None
    asked_s = known.result.retry_in_s if known.result is not None else None
    share = random.random()  # noqa: S311 - spreads retries, protects nothing
    # Attempts that operators' words allowed use up no retry.
    return next_attempt_ms(ending, run.spec, attempt - run.parks, now_ms=now_ms(), share=share, asked_s=asked_s)


def _retry(claim: Claim, ending: Ending, notary: Notary, known: Evidence, *, started: bool, delay_ms: int) -> Finish:
    detail: dict[str, str | int | float | bool] = {"state": ending.state, "reason": ending.reason or ""}
    if delay_ms:
        detail["delay_s"] = delay_ms / 1000
    event = notary.turn_event(EventType.JOB_RETRIED, job=claim.job, attempt=claim.attempt, detail=detail)
    return Finish(
        claim=claim,
        kind="retry",
        state=ending.state,
        reason=ending.reason,
        started=started,
        event=event.payload,
        event_signature=event.signature,
        failure=_failure(ending, known),
        delay_ms=delay_ms,
    )


def _outcome(claim: Claim, run: Run, ending: Ending, notary: Notary, known: Evidence, value: bytes | None) -> Outcome:
    usage = known.verdict.usage if known.verdict is not None else Usage()
    return Outcome(
        job=claim.job,
        attempt=claim.attempt,
        state=ending.state,
        node=notary.node,
        boot=notary.boot,
        ended_at_ms=now_ms(),
        started_at_ms=run.started_at_ms,
        reason=ending.reason,
        detail=ending.detail,
        exit_code=ending.exit_code,
        signal=ending.signal,
        step=known.verdict.step or None if known.verdict is not None else None,
        result_sha256=hashlib.sha256(value).hexdigest() if value is not None else None,
        envelope_sha256=run.envelope_sha256,
        level=notary.level,
        wall_s=usage.wall_s,
        cpu_s=usage.cpu_s,
        max_rss_bytes=usage.max_rss_bytes,
        processes=usage.processes,
        output_bytes=known.output_bytes,
        tail="" if ending.state == State.FINISHED else known.tail,
        calls=() if ending.state == State.FINISHED or notary.witness is None else notary.witness.failed(run),
        error=known.result.error if known.result is not None else None,
    )


def unbuilt(error: ContainmentError) -> Ending:
    """Return the end of a job whose sandbox could not be built: refused, never run with less."""
    if isinstance(error, SetupError):
        detail = f"the sandbox could not be built, step {error.step} failed: {error.detail or error}"
    elif isinstance(error, GroupError):
        detail = f"a limit could not be set: {error}"
    elif isinstance(error, DoorError):
        return Ending(State.REFUSED, RefuseReason.BROKER_UNAVAILABLE, 125, detail=str(error))
    elif isinstance(error, LeaseError):
        return Ending(State.REFUSED, RefuseReason(error.reason), 125, detail=str(error))
    else:
        return Ending(State.FAILED, FailReason.NODE_FAULT, detail=f"no sandbox could be made: {error}")
    return Ending(State.REFUSED, RefuseReason.UNENFORCEABLE, 125, detail=detail)


def order_of(word: KillWord) -> KillOrder:
    """Return the order of a stored kill; an unreadable or unsigned one is honoured, killing is the safe side."""
    try:
        command = record.loads(Command, word.command, limit_bytes=MAX_COMMAND_BYTES)
    except WireError:
        return KillOrder("", now_ms(), reason="unreadable tombstone", by="unverified")
    return KillOrder.of(command)


def exception_ending(error: dict[str, str], limit: str = "", data_bytes: int | None = None) -> Ending:
    """Return the end of a task that raised. Never ``refused``: the job's own code ran, and may claim what it likes.

    ``limit``: the verdict's; ``data_bytes``: what one process may hold, where this host has no memory total.
    """
    if error["type"] in {"ResultTooLarge", "ResultNotStorable"}:
        return Ending(State.FAILED, FailReason.RESULT_NOT_STORABLE, 1, detail=error["message"])
    first = error["message"].splitlines()[0][:500] if error["message"] else ""
    told = f"{error['type']}: {first}" if first else error["type"]
    if error["type"] == "MemoryError" and data_bytes is not None:
        told += f" (a process may hold {data_bytes >> 20} MiB here; this host has no total for memory)"
        return Ending(State.FAILED, FailReason.MEMORY_LIMIT, 1, detail=told)
    reason = LIMIT_REASONS.get(limit, FailReason.EXCEPTION)
    return Ending(State.FAILED, reason, 1, detail=told, error_type=error["type"])


def _detail(
    run: Run, ending: Ending, verdict: Verdict | None, output_bytes: int
) -> dict[str, str | int | float | bool]:
    detail: dict[str, str | int | float | bool] = {"state": ending.state}
    for key, value in (("reason", ending.reason), ("exit_code", ending.exit_code), ("signal", ending.signal)):
        if value is not None:
            detail[key] = value
    if run.orders:
        order = run.orders[0]
        detail |= {"command": order.command, "by": order.by, "kill_reason": order.reason, "forced": run.forced}
    if verdict is not None:
        usage = verdict.usage
        detail |= {"wall_s": usage.wall_s, "cpu_s": round(usage.cpu_s, 6), "max_rss_bytes": usage.max_rss_bytes}
    if output_bytes:
        detail["output_bytes"] = output_bytes
    if verdict is not None and verdict.kill_ms:
        detail |= {"processes": verdict.usage.processes, "method": verdict.method, "kill_ms": round(verdict.kill_ms, 3)}
    return detail


def _failure(ending: Ending, known: Evidence) -> str:
    """RQ's readers show one text per failure: the reason first, then the evidence."""
    lines = [f"{ending.state}({ending.reason})" if ending.reason else str(ending.state)]
    if ending.detail:
        lines.append(ending.detail)
    if known.result is not None and known.result.error is not None:
        lines.append(known.result.error["traceback"])
    elif known.tail:
        lines.append(f"last output:\n{known.tail}")
    return "\n".join(lines)[:_TEXT_LIMIT]
