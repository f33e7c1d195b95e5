"""What the tests on real nodes share: the nodes of a module, clean again after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner.client import disconnect_all
from tests.support.rig import Rig


@pytest.fixture
def rig(agents: Rig) -> Iterator[Rig]:
    """The module's nodes (its fixture `agents`) for one test; nothing of the test runs on them afterwards."""
    yield agents
    agents.app.kill(all=True)
    agents.wait_idle()
    disconnect_all()
    agents.redis.connection_pool.disconnect()
