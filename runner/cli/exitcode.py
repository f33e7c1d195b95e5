"""Exit codes as DESIGN §9 fixes them: pure functions of how things ended.

Called by the commands. Must never turn an end that nobody confirmed into a 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from runner.wire.receipt import NodeReceipt, Outcome, PauseReceipt, Receipt
from runner.wire.states import FailReason, State

__all__ = [
    "ALREADY_ENDED",
    "INFRASTRUCTURE",
    "KILLED",
    "TIME_LIMIT",
    "UNCONFIRMED",
    "UNKNOWN",
    "of_job",
    "of_kill",
    "of_operate",
    "of_pause",
]

KILLED: Final = 137
TIME_LIMIT: Final = 124
INFRASTRUCTURE: Final = 125
UNCONFIRMED: Final = 3
UNKNOWN: Final = 4
ALREADY_ENDED: Final = 5
_SIGNAL_BASE: Final = 128
_LIMITS: Final = frozenset(
    {FailReason.MEMORY_LIMIT, FailReason.PIDS_LIMIT, FailReason.DISK_LIMIT, FailReason.OUTPUT_LIMIT}
    | {FailReason.SECCOMP, FailReason.SECRET_LEAKED}
)
_OF_THE_JOB: Final = frozenset({FailReason.EXCEPTION, FailReason.EXIT, FailReason.RESULT_NOT_STORABLE})


def of_job(end: Outcome) -> int:
    """Return the exit code of `run` and `call` for how a job ended."""
    if end.state == State.FINISHED:
        return 0
    if end.state == State.KILLED:
        return KILLED
    if end.state != State.FAILED:
        return INFRASTRUCTURE
    if end.reason == FailReason.TIME_LIMIT:
        return TIME_LIMIT
    if end.reason in _OF_THE_JOB:
        return end.exit_code or 1
    if end.signal:
        return _SIGNAL_BASE + end.signal
    if end.reason in _LIMITS:
        return end.exit_code or KILLED
    return INFRASTRUCTURE


def of_kill(receipts: Iterable[Receipt]) -> int:
    """Return the exit code of `kill`: the most alarming receipt decides (3 beats 4 beats 5 beats 0)."""
    codes = {_of_receipt(receipt) for receipt in receipts}
    return next((code for code in (UNCONFIRMED, UNKNOWN, ALREADY_ENDED) if code in codes), 0)


def of_pause(receipts: Iterable[PauseReceipt]) -> int:
    """Return the exit code of `pause`, `resume` and decisions: 3 beats 4 beats 5 (ended, or not running) beats 0."""
    known = {
        "paused": 0,
        "resumed": 0,
        "approved": 0,
        "denied": 0,
        "stored": 0,
        "delivered": 0,
        "queued": 0,
        "applied": 0,
        "already_ended": ALREADY_ENDED,
        "not_running": ALREADY_ENDED,
        "unknown": UNKNOWN,
    }
    codes = {known.get(receipt.outcome, UNCONFIRMED) for receipt in receipts}
    return next((code for code in (UNCONFIRMED, UNKNOWN, ALREADY_ENDED) if code in codes), 0)


def of_operate(receipts: Iterable[NodeReceipt]) -> int:
    """Return the exit code of `drain`, `undrain`, `suspend` and `unsuspend`: 3 beats 4 beats 0."""
    codes = {_of_node(receipt) for receipt in receipts}
    return next((code for code in (UNCONFIRMED, UNKNOWN) if code in codes), 0)


def _of_node(receipt: NodeReceipt) -> int:
    if receipt.outcome == "unknown":
        return UNKNOWN
    done = receipt.outcome == "done" and (receipt.op != "drain" or receipt.state == "drained")
    return 0 if done else UNCONFIRMED


def _of_receipt(receipt: Receipt) -> int:
    if receipt.outcome == "killed":
        return 0 if receipt.survivors == 0 else UNCONFIRMED
    known = {"killed_before_start": 0, "already_ended": ALREADY_ENDED, "unknown": UNKNOWN}
    return known.get(receipt.outcome, UNCONFIRMED)
