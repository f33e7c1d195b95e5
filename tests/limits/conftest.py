"""One fleet of two nodes for the tests of this folder that need agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fleet as fleets
from tests.support.fleet import Fleet

JOBS = Path(__file__).parent / "jobs"


@pytest.fixture(scope="session")
def shared_fleet() -> Iterator[Fleet]:
    """Two nodes of three slots that serve the tasks of jobs/."""
    with fleets.running("--nodes", "2", "--slots", "3", "--import", f"limit_tasks:{JOBS}") as found:
        yield found


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """The shared fleet for one test; no job of the test is left on it afterwards."""
    yield shared_fleet
    shared_fleet.clear()
