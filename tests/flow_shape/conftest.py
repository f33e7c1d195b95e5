"""Fixtures of these tests: the store's desk, and one fleet for all that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.client import disconnect_all
from runner.testing import PrivateFleet
from runner.testing import fleet as fleets
from tests.client.paper import Fleet, PaperNode, on_paper
from tests.flow_shape.jobs import flow_jobs
from tests.store.conftest import agent, agents, desk
from tests.support.valkey import Valkey

__all__ = ["agent", "agents", "desk", "fleet", "node", "paper", "private_fleet"]


@pytest.fixture
def paper(valkey: Valkey) -> Iterator[Fleet]:
    """A home with keys, an app and an empty store."""
    with on_paper(valkey) as made:
        yield made


@pytest.fixture
def node(paper: Fleet) -> PaperNode:
    """A node that may serve everything."""
    return paper.node("n1")


@pytest.fixture(scope="package")
def private_fleet() -> Iterator[PrivateFleet]:
    """The fleet of these tests. It names its home in the environment, so it must not outlive them."""
    # The module goes by the name under which the tests import it themselves.
    with fleets([f"{flow_jobs.__name__}:{Path(__file__).parents[2]}"]) as running:
        yield running


@pytest.fixture
def fleet(private_fleet: PrivateFleet) -> Iterator[PrivateFleet]:
    """The shared fleet for one test; no job of the test is left on it afterwards."""
    yield private_fleet
    receipts = private_fleet.app.kill(all=True)
    disconnect_all()
    assert all(receipt.outcome != "unconfirmed" for receipt in receipts)
