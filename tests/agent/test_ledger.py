"""The replay ledger survives restarts and forgets only what has lapsed."""

from __future__ import annotations

from pathlib import Path

from node_agent.ledger import Ledger


def test_attack_24_ended_attempts_stay_known_after_a_restart(tmp_path: Path) -> None:
    """A replay on the same node is found with nothing but the node's disk."""
    path = tmp_path / "ledger"
    ledger = Ledger(path, 0)
    ledger.started("n", 1, 1000)
    assert ledger.look("n", 1) == "started"
    ledger.ended("n", 1, 1000)
    ledger.close()
    again = Ledger(path, 500)
    assert (again.look("n", 1), again.look("n", 2), again.look("m", 1)) == ("ended", "new", "new")
    again.close()


def test_a_started_attempt_of_a_dead_agent_is_known_as_started(tmp_path: Path) -> None:
    """It ran, nobody heard of its end: it must count as lost, not run again under the same number."""
    ledger = Ledger(tmp_path / "ledger", 0)
    ledger.started("n", 2, 1000)
    ledger.close()
    again = Ledger(tmp_path / "ledger", 1)
    assert (again.look("n", 1), again.look("n", 2), again.look("n", 3)) == ("ended", "started", "new")
    again.close()


def test_lapsed_lines_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    """The file does not grow for ever, and half a line is no line."""
    path = tmp_path / "ledger"
    path.write_text("E old 1 10\nE new 1 9999\nE torn 1\nX bad 1 9999\n")
    ledger = Ledger(path, 100)
    assert (ledger.look("old", 1), ledger.look("new", 1), ledger.look("torn", 1)) == ("new", "ended", "new")
    ledger.close()
    assert path.read_text() == "E new 1 9999\n"
