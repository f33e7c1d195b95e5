"""Exit codes are part of the interface (DESIGN §9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner.cli import exitcode
from runner.wire.receipt import NodeReceipt, Outcome, Receipt

JOB = "main-01hzzzzzzzzzzzzzzzzzzzzzzz"
END = Outcome(job=JOB, attempt=1, state="finished", node="n", boot="b", ended_at_ms=1)
RECEIPT = Receipt(JOB, "c", "killed", "killed", "t", "t", "n", survivors=0)


@pytest.mark.parametrize(
    ("state", "reason", "code", "signal", "expected"),
    [
        ("finished", None, 0, None, 0),
        ("failed", "exit", 3, None, 3),
        ("failed", "signal", None, 9, 137),
        ("failed", "signal", None, 15, 143),
        ("failed", "exception", 1, None, 1),
        ("failed", "result_not_storable", None, None, 1),
        ("failed", "time_limit", None, 9, 124),
        ("failed", "memory_limit", None, 9, 137),
        ("failed", "output_limit", None, None, 137),
        ("failed", "worker_died", None, None, 125),
        ("failed", "node_fault", None, None, 125),
        ("killed", "killed", None, 9, 137),
        ("refused", "policy", None, None, 125),
        ("expired", None, None, None, 125),
        ("lost", None, None, None, 125),
        ("no-such-state", None, 0, None, 125),
    ],
)
def test_run_exits_as_the_job_did(
    state: str, reason: str | None, code: int | None, signal: int | None, expected: int
) -> None:
    """Each end has its code, and only `finished` has 0."""
    assert exitcode.of_job(replace(END, state=state, reason=reason, exit_code=code, signal=signal)) == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], 0),
        (["killed"], 0),
        (["killed", "killed_before_start"], 0),
        (["killed", "already_ended"], 5),
        (["already_ended", "unknown"], 4),
        (["unknown", "unconfirmed", "already_ended", "killed"], 3),
    ],
)
def test_kill_exits_with_the_most_alarming_receipt(outcomes: list[str], expected: int) -> None:
    """3 beats 4 beats 5 beats 0."""
    receipts = [replace(RECEIPT, outcome=outcome) for outcome in outcomes]  # type: ignore[arg-type]  # table of Literals
    assert exitcode.of_kill(receipts) == expected


@pytest.mark.parametrize("survivors", [None, 1])
def test_a_kill_with_survivors_is_no_success(survivors: int | None) -> None:
    """`killed` counts only with 0 survivors."""
    assert exitcode.of_kill([replace(RECEIPT, survivors=survivors)]) == exitcode.UNCONFIRMED


@pytest.mark.parametrize(
    ("receipts", "expected"),
    [
        ([("drain", "done", "drained")], 0),
        ([("drain", "done", "draining")], 3),
        ([("undrain", "done", "ready")], 0),
        ([("suspend", "done", "ready"), ("suspend", "unconfirmed", "")], 3),
        ([("drain", "unknown", "")], 4),
        ([("drain", "refused", "ready")], 3),
        ([], 0),
    ],
)
def test_orders_to_nodes_exit_0_only_when_all_hold(receipts: list[tuple[str, str, str]], expected: int) -> None:
    """A node that still drains, refuses or is silent is no success; an unknown one has a code of its own."""
    made = [NodeReceipt("c", op, outcome, state, "", "") for op, outcome, state in receipts]  # type: ignore[arg-type]  # tests name real ones
    assert exitcode.of_operate(made) == expected
