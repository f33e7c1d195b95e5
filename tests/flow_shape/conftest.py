"""Fixtures of these tests: the store's desk, and one fleet for all that needs one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runner.client import disconnect_all
from runner.testing import PrivateFleet
from runner.testing import fleet as fleets
from tests.flow_shape.jobs import flow_jobs
from tests.store.desk import Agent, Desk
from tests.support.valkey import Valkey


@pytest.fixture
def desk(valkey: Valkey) -> Iterator[Desk]:
    """A client of an empty store."""
    with Desk(valkey) as client:
        yield client


@pytest.fixture
def agents(valkey: Valkey) -> Iterator[Callable[..., Agent]]:
    """Makes agent starts; the first argument is the node's name."""
    with ExitStack() as stack:

        def make(node: str = "n1", boot: str = "b00t01234567", **options: object) -> Agent:
            return stack.enter_context(Agent(valkey, node, boot, **options))

        yield make


@pytest.fixture
def agent(agents: Callable[..., Agent]) -> Agent:
    """A registered agent start with two slots."""
    started = agents()
    started.register()
    return started


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
