"""The judges of a chaos run see what they are there for: each fault, put into a clean history, is complained of."""

from __future__ import annotations

from itertools import count

import pytest

from runner import request
from runner.request import JobOptions
from tests.chaos import verdict
from tests.chaos.crop import Planned
from tests.chaos.verdict import Told
from tests.scale.floor import Line


def history(*words: str) -> list[Told]:
    """Return events of ``kind attempt [detail]``, such as ``ended 1 finished``."""
    found = []
    for number, word in enumerate(words):
        kind, attempt, *detail = word.split()
        key = "state" if kind == "ended" else "reason"
        told: dict[str, object] = dict.fromkeys([key], detail[0]) if detail else {}
        found.append(Told(b"%d-0" % number, f"job.{kind}", int(attempt), number, "n", told))
    return found


def runs(*words: str) -> list[Line]:
    """Return lines of ``S|E attempt agent [how]``."""
    ticks = count(1)
    found = []
    for word in words:
        kind, attempt, agent, *how = word.split()
        found.append(Line(kind == "S", "job", int(attempt), agent, next(ticks), how[0] if how else "-"))
    return found


def planned(kind: str = "plain", fails: int = 0, **options: object) -> Planned:
    """Return a job as sown."""
    chosen = JobOptions()
    chosen.update(options)  # type: ignore[typeddict-item]  # tests name real options
    return Planned(request.build(chosen, argv=["true"]), kind, fails)


CLEAN = ("queued 0", "claimed 1", "started 1", "retried 1 node_lost", "claimed 2", "started 2", "ended 2 finished")
RAN = ("S 1 a", "E 1 a eof", "S 2 b", "E 2 b done")


def test_a_clean_history_has_no_complaints() -> None:
    """A job that lost a node and finished on the next one."""
    its, lines = history(*CLEAN), runs(*RAN)
    assert list(verdict._ended(planned(), its, "finished", 2)) == []
    assert list(verdict._order(its)) == []
    assert list(verdict._runs(planned(), its, lines, "finished")) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((*CLEAN, "claimed 3"), "job.claimed after the end"),
        (("claimed 1", "kill_requested 1", "retried 1 exit", "ended 1 killed"), "job.retried after the kill"),
        (("queued 0", "kill_requested 0", "claimed 1", "ended 1 killed"), "job.claimed after the kill"),
        (("claimed 1", "kill_requested 1", "ended 1 lost"), "lost although a kill had been accepted"),
        (("claimed 1", "kill_requested 1", "ended 1 failed"), "failed instead of killed"),
        (("claimed 1", "started 1", "claimed 1"), "attempt 1 was started and never retried"),
        (("claimed 1", "claimed 2"), "attempt 2 claimed after 1"),
        (("claimed 1", "retried 1 exit", "retried 1 exit"), "two retries of attempt 1"),
    ],
)
def test_events_out_of_order_are_seen(words: tuple[str, ...], complaint: str) -> None:
    """What the store wrote is not the life of one job."""
    assert complaint in " ".join(verdict._order(history(*words), retries=2))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("S 1 a", "S 2 b", "E 1 a lease", "E 2 b done"), "two attempts at a time"),
        (("S 1 a", "E 1 a eof", "S 2 b"), "no end"),
        (("S 1 a", "E 1 a done", "S 1 a", "E 1 a done"), "ran twice in one agent's life"),
        (("S 2 a", "E 2 a done", "S 3 b", "E 3 b done"), "without a retry"),
        (("S 1 a", "E 1 a killed"), "finished, but its last run did not"),
    ],
)
def test_runs_that_must_not_be_are_seen(words: tuple[str, ...], complaint: str) -> None:
    """What really ran is not what was signed."""
    assert complaint in " ".join(verdict._runs(planned(), history(*CLEAN), runs(*words), "finished"))


def test_a_second_run_of_an_at_most_once_job_is_seen() -> None:
    """However good its reason."""
    found = " ".join(verdict._runs(planned(at_most_once=True), history(*CLEAN), runs(*RAN), "finished"))
    assert "at most once" in found


@pytest.mark.parametrize(
    ("words", "state", "complaint"),
    [
        (("claimed 1",), "running", "has not ended"),
        (("ended 1 finished", "ended 1 finished"), "finished", "2 end events"),
        (("ended 1 finished",), "killed", "its end event says finished"),
        (("ended 1 killed",), "killed", "nobody asked"),
        (("ended 1 refused",), "refused", "refused"),
        (("ended 1 failed",), "failed", "failed("),
    ],
)
def test_ends_that_must_not_be_are_seen(words: tuple[str, ...], state: str, complaint: str) -> None:
    """One end, with one event that says the same, and a reason for it."""
    assert complaint in " ".join(verdict._ended(planned(), history(*words), state, 1))


def test_a_sleeping_nodes_runs_end_when_it_falls_asleep() -> None:
    """And only those: what it notes long after its waking ran until then."""
    lines = [Line(True, "job", 1, "7.1", 10), Line(False, "job", 1, "7.1", 900, "lease")]
    assert [line.at_ns for line in verdict.awake(lines, [(7, 50, 800)])] == [10, 51]
    assert [line.at_ns for line in verdict.awake(lines, [(8, 50, 800)])] == [10, 900]
    late = [lines[0], Line(False, "job", 1, "7.1", 800 + 2 * verdict.WAKING_NS, "lease")]
    assert verdict.awake(late, [(7, 50, 800)]) == late


def test_jobs_that_ran_at_a_time_are_counted() -> None:
    """An end and a start in the same moment are one after the other."""
    one = [Line(True, "x", 1, "a", 1), Line(False, "x", 1, "a", 5)]
    other = [Line(True, "y", 1, "a", 5), Line(False, "y", 1, "a", 9)]
    third = [Line(True, "z", 1, "a", 4), Line(False, "z", 1, "a", 6)]
    assert verdict._most([one, other]) == 1
    assert verdict._most([one, other, third]) == 2
