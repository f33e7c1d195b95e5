"""The fleet that most e2e tests share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fleet as fleets
from tests.support.fleet import Fleet

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def shared_fleet() -> Iterator[Fleet]:
    """Two nodes of three slots; the programs of this folder lie below its granted path."""
    with fleets.running("--nodes", "2", "--slots", "3", "--import", f"e2e_tasks:{PROGRAMS}") as found:
        shutil.copytree(PROGRAMS, found.work / "programs", ignore=shutil.ignore_patterns("__pycache__"))
        yield found


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    """The shared fleet for one test; no job of the test is left on it afterwards."""
    yield shared_fleet
    shared_fleet.clear()


@pytest.fixture
def programs(fleet: Fleet) -> Path:
    """The programs of this folder, where jobs may be granted them."""
    return fleet.work / "programs"
