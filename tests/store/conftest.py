"""Fixtures of the store's tests: a client and agent starts on an empty store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

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
