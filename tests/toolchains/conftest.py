"""The fleet that the toolchains run on, and what they are given: programs, a repository, package folders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support import fleet as fleets
from tests.support.fleet import Fleet
from tests.toolchains import goods


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """One node; the programs and goods lie below its granted path."""
    with fleets.running("--slots", "2") as found:
        goods.make(found.work)
        shutil.copytree(goods.PROGRAMS, found.work / "programs", ignore=shutil.ignore_patterns("__pycache__"))
        yield found
