"""Settings come from flags and variables, and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from node_agent.settings import AgentSettings


def test_variables_carry_lists_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues, tasks and task paths are words between commas; labels are JSON."""
    monkeypatch.setenv("RINGFENCE_QUEUES", "agents, batch")
    monkeypatch.setenv("RINGFENCE_TASKS", "app.jobs")
    monkeypatch.setenv("RINGFENCE_TASK_PATH", "/srv/app")
    monkeypatch.setenv("RINGFENCE_LABELS", '{"gpu": "yes"}')
    settings = AgentSettings(home=Path("/srv/rf"), name="n1")
    assert settings.queues == ("agents", "batch")
    assert (settings.tasks, settings.task_path) == (("app.jobs",), ("/srv/app",))
    assert settings.labels == {"gpu": "yes"}


def test_lease_and_margin_follow_the_heartbeat() -> None:
    """Lease two heartbeats, margin half of one: taken over after at most three."""
    settings = AgentSettings(home=Path("/srv/rf"), name="n1", heartbeat_s=2.0)
    assert (settings.lease_s, settings.margin_s) == (4.0, 1.0)


def test_attack_55_nothing_is_read_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .env in the working folder changes nothing."""
    (tmp_path / ".env").write_text("RINGFENCE_SLOTS=77\n")
    monkeypatch.chdir(tmp_path)
    assert AgentSettings(home=Path("/srv/rf"), name="n1").slots == 4
