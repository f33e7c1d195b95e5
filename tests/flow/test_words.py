"""From what a caller writes to rules and commands: what is meant, and what is refused."""

from __future__ import annotations

import pytest

from runner import Backoff, Concurrency, Rate, Retry, Unique, UsageError, request
from runner.cli.commands import run_words
from runner.cli.retry import seconds_of
from runner.limits import concurrency_of, rate_of, retry_rule, unique_of
from runner.request import JobOptions
from runner.wire.errors import RecordError
from runner.wire.flow import RetryRule


def test_a_number_of_seconds_is_a_backoff_that_doubles_with_jitter() -> None:
    """backoff=2 means 2, 4, 8… s, less up to a quarter; a Backoff says it exactly."""
    assert retry_rule(3, 2, None, None) == RetryRule(3, Backoff(2.0, 2.0, 3600.0, 0.25))
    exact = Backoff(1.0, 3.0, 9.0)
    assert retry_rule(3, exact, ["exit"], ("lost",)) == RetryRule(3, exact, ("exit",), ("lost",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (JobOptions(backoff=1.0), "retries=N"),
        (JobOptions(retries=1, never_on="exit"), "lists of reasons"),
        (JobOptions(retries=1, retry_on=["Exit"]), "a reason is"),
        (JobOptions(retries=1001), "0 to 1000"),
        (JobOptions(retries=1, backoff=-1.0), "a delay is"),
        (JobOptions(on_duplicate="return"), "give one with unique"),
        (JobOptions(unique="k", on_duplicate="ignore"), "error or return"),  # type: ignore[typeddict-item]  # a typo
        (JobOptions(unique="a b"), "without spaces"),
        (JobOptions(priority=1001), "-1000 to 1000"),
        (JobOptions(labels={"priority": "1"}), "have options"),
    ],
)
def test_rules_that_mean_nothing_are_refused(options: JobOptions, words: str) -> None:
    """An option that would be ignored, or has no such value, is an error at the call."""
    with pytest.raises(UsageError, match=words):
        request.build(options, argv=["true"])


def test_texts_of_the_command_line() -> None:
    """KEY=N/S, KEY=N and spans of time; a key may hold = and /."""
    assert rate_of("a=b/c=10/0.5") == Rate("a=b/c", 10, 0.5)
    assert concurrency_of("licence=2") == Concurrency("licence", 2)
    assert unique_of("k") == Unique("k", "end")
    assert [seconds_of(text) for text in ("90", "90s", "1.5m", "1h", "2d")] == [90, 90, 90, 3600, 172_800]


@pytest.mark.parametrize("text", ["", "k", "k=", "k=1/", "k=/60", "=1/60", "k k=1/60", "k=1/60s", "k=-1/60"])
def test_a_rate_in_another_form_is_refused(text: str) -> None:
    """The message says how a rate is written."""
    with pytest.raises(UsageError, match="KEY=COUNT/SECONDS"):
        rate_of(text)


@pytest.mark.parametrize("in_s", [-1, float("nan"), float("inf"), 1e9])
def test_retry_takes_a_wait(in_s: float) -> None:
    """A wait that is none fails where it is written, inside the task."""
    with pytest.raises(UsageError, match="in_s"):
        Retry(in_s=in_s)


def test_limits_have_bounds() -> None:
    """No rule without a number that can be kept."""
    for broken in (lambda: Rate("k", 0, 1), lambda: Rate("k", 1, 0), lambda: Concurrency("k", 0), lambda: Unique("")):
        with pytest.raises(RecordError):
            broken()
    with pytest.raises(RecordError, match="ttl_s"):
        Unique("k", "ttl")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--priority", "x", "--", "true"],
        ["run", "--priority", "1001", "--", "true"],
        ["run", "--rate", "k", "--", "true"],
        ["run", "--backoff", "1", "--", "true"],
        ["retry"],
        ["retry", "main-01m8nz26cyrcb2h2mm73g5wppq", "--all-failed"],
        ["retry", "main-01m8nz26cyrcb2h2mm73g5wppq", "--since", "1h"],
        ["retry", "--all-failed", "--since", "yesterday"],
    ],
)
def test_a_f05_wrong_words_exit_2(words: list[str]) -> None:
    """Bad values are refused before anything is asked of the store (scenario A-F05)."""
    assert run_words(words) == 2
