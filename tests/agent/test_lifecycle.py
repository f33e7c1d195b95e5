"""From verdict to end state."""

from __future__ import annotations

import pytest

from node_agent.containment.plan import Verdict
from node_agent.lifecycle import Ending, conclude, may_retry
from runner.wire.flow import RetryRule
from runner.wire.states import END_STATES, FailReason, State, may_move, retryable
from tests.agent.build import job


@pytest.mark.parametrize(
    ("verdict", "state", "reason", "code"),
    [
        (Verdict("exit", 0), "finished", None, 0),
        (Verdict("exit", 3), "failed", "exit", 3),
        (Verdict("signal", signal=9), "failed", "signal", 137),
        (Verdict("signal", signal=9, limit="memory"), "failed", "memory_limit", 137),
        (Verdict("exit", 1, limit="pids"), "failed", "pids_limit", 1),
        (Verdict("exit", 0, limit="pids"), "finished", None, 0),
        (Verdict("exit", 1, limit="disk"), "failed", "disk_limit", 1),
        (Verdict("exit", 0, limit="disk"), "finished", None, 0),
        (Verdict("signal", signal=7, limit="disk"), "failed", "disk_limit", 135),
        (Verdict("signal", signal=31), "failed", "seccomp", 159),
        (Verdict("signal", signal=25), "failed", "signal", 153),
        (Verdict("worker_died"), "failed", "worker_died", None),
        (Verdict("worker_died", limit="memory"), "failed", "memory_limit", None),
        (Verdict("killed"), "failed", "worker_died", None),
        (Verdict("setup_error", step="view"), "refused", "unenforceable", None),
    ],
)
def test_ends_without_our_kill(verdict: Verdict, state: str, reason: str | None, code: int | None) -> None:
    """Each kind of end has its own state, reason and exit code."""
    ending = conclude(verdict, "")
    assert (ending.state, ending.reason, ending.exit_code) == (state, reason, code)


def test_a_kill_is_killed_whatever_the_process_returned() -> None:
    """A job that returns 0 on SIGTERM was killed, not finished."""
    for verdict in (Verdict("exit", 0), Verdict("exit", 1), Verdict("signal", signal=15), Verdict("killed")):
        assert conclude(verdict, "kill").state == State.KILLED


@pytest.mark.parametrize(
    ("cause", "state", "reason"),
    [
        ("time_limit", "failed", "time_limit"),
        ("pause_limit", "failed", "time_limit"),
        ("output_limit", "failed", "output_limit"),
        ("lease", "lost", "lease"),
        ("shutdown", "lost", "shutdown"),
    ],
)
def test_the_nodes_own_reasons(cause: str, state: str, reason: str) -> None:
    """What the node ended says so."""
    ending = conclude(Verdict("killed"), cause)  # type: ignore[arg-type]  # the parametrised literals
    assert (ending.state, ending.reason) == (state, reason)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict("signal", signal=11), "ended by SIGSEGV"),
        (Verdict("signal", signal=64), "ended by SIGRTMAX"),
        (Verdict("exit", 7), "exit code 7"),
        (Verdict("exit", 137), "exit code 137 (as after SIGKILL)"),
        (Verdict("exit", 255), "exit code 255"),
        (Verdict("exit", 1, limit="pids"), "--pids"),
        (Verdict("exit", 1, limit="disk"), "--disk"),
        (Verdict("exit", 137, limit="memory"), "exit code 137 (as after SIGKILL)"),
    ],
)
def test_the_detail_says_what_happened(verdict: Verdict, words: str) -> None:
    """Signals by name, also those that a shell passes on as a code; limits with the option that raises them."""
    assert words in (conclude(verdict, "").detail or "")


def test_a_retry_needs_a_retryable_end_and_attempts_left() -> None:
    """Never after a kill or a refusal, never beyond the signed count, never at most once."""
    failed = Ending(State.FAILED, FailReason.EXIT)
    spec = job(retry=RetryRule(1))
    assert may_retry(failed, spec, 1)
    assert not may_retry(failed, spec, 2)
    assert not may_retry(failed, job(retry=RetryRule(1), at_most_once=True), 1)
    assert not may_retry(Ending(State.KILLED, "kill"), spec, 1)
    assert not may_retry(Ending(State.REFUSED, "policy"), spec, 1)
    assert may_retry(Ending(State.LOST, "lease"), spec, 1)


def test_end_states_are_final() -> None:
    """No move leads out of an end state, and only ends are retryable."""
    for old in END_STATES:
        assert not any(may_move(old, new) for new in State)
    assert not retryable(State.RUNNING, None)
