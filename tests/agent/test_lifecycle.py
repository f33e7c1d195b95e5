"""From verdict to end state."""

from __future__ import annotations

import dataclasses

import pytest

from node_agent.containment.plan import Verdict
from node_agent.lifecycle import Ending, conclude, next_attempt_ms
from runner.wire.flow import Backoff, RetryRule
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


def again(ending: Ending, attempt: int = 1, rule: RetryRule = RetryRule(1), **more: object) -> int | None:  # noqa: B008 - frozen
    """In how many ms the next attempt is due; ``more``: fields of the job, and what next_attempt_ms takes."""
    named = {name: more.pop(name) for name in ("now_ms", "share", "asked_s") if name in more}
    how = {"now_ms": 0, "share": 0.0, **named}
    return next_attempt_ms(ending, job(retry=rule, **more), attempt, **how)  # type: ignore[arg-type]  # as above


def test_a_retry_needs_a_retryable_end_and_attempts_left() -> None:
    """Never after a kill or a refusal, never beyond the signed count, never at most once, never after poison."""
    failed = Ending(State.FAILED, FailReason.EXIT)
    assert again(failed) == 0
    assert again(failed, 2) is None
    assert again(failed, at_most_once=True) is None
    assert again(Ending(State.KILLED, "kill")) is None
    assert again(Ending(State.REFUSED, "policy")) is None
    assert again(Ending(State.FAILED, FailReason.MEMORY_LIMIT)) is None
    assert again(Ending(State.LOST, "lease")) == 0
    assert again(Ending(State.LOST, "poison")) is None


def test_reasons_can_be_named() -> None:
    """retry_on allows the named reasons alone, never_on wins; an exception by its class, every loss by `lost`."""
    failed, lost = Ending(State.FAILED, FailReason.EXIT), Ending(State.LOST, "node_lost")
    raised = Ending(State.FAILED, FailReason.EXCEPTION, error_type="ValueError")
    some = RetryRule(1, retry_on=("exception:ValueError", "lost"))
    assert [again(each, rule=some) for each in (failed, lost, raised)] == [None, 0, 0]
    none = RetryRule(1, retry_on=("exception",), never_on=("exception:ValueError",))
    assert again(raised, rule=none) is None
    assert again(dataclasses.replace(raised, error_type="OSError"), rule=none) == 0


def test_backoff_grows_to_its_cap_and_jitter_takes_off() -> None:
    """delay * factor ** (n - 1), at most the cap, less a random share; never an overflow."""
    failed = Ending(State.FAILED, FailReason.EXIT)
    rule = RetryRule(1000, Backoff(2.0, factor=3.0, max_delay_s=15.0, jitter=0.5))
    assert [again(failed, n, rule) for n in (1, 2, 3, 1000)] == [2000, 6000, 15000, 15000]
    assert again(failed, 1, rule, share=1.0) == 1000
    assert again(failed, 1000, RetryRule(1000, Backoff(0.0, factor=100.0))) == 0


def test_a_retry_that_would_come_too_late_is_none() -> None:
    """An attempt after not_after could never start: the end that there is, is the job's last."""
    failed, rule = Ending(State.FAILED, FailReason.EXIT), RetryRule(1, Backoff(10.0))
    assert again(failed, 1, rule, not_after_ms=10_001) == 10_000
    assert again(failed, 1, rule, not_after_ms=10_000) is None


def test_a_task_may_ask_for_its_next_attempt() -> None:
    """Retry(in_s=...) says when, whatever the reasons say, within the signed count; a kill still wins."""
    raised = Ending(State.FAILED, FailReason.EXCEPTION, error_type="Retry")
    rule = RetryRule(1, Backoff(10.0), never_on=("exception",))
    assert again(raised, 1, rule) is None
    assert again(raised, 1, rule, asked_s=2.5) == 2500
    assert again(raised, 2, rule, asked_s=2.5) is None
    assert again(Ending(State.KILLED, "kill"), 1, rule, asked_s=2.5) is None


def test_end_states_are_final() -> None:
    """No move leads out of an end state, and only ends are retryable."""
    for old in END_STATES:
        assert not any(may_move(old, new) for new in State)
    assert not retryable(State.RUNNING, None)
