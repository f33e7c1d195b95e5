"""What chaos runs found, one by one and without chance."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from node_agent.containment.errors import SpawnError
from node_agent.dispatch import Dispatcher
from node_agent.run import Run
from node_agent.spread import spread
from node_agent.supervisor import Supervisor, Tools
from node_agent.turns import Claim, Finish
from runner.wire import ids

LAPSED = -1


@pytest.mark.parametrize(("at_claim", "now"), [(LAPSED, LAPSED), (0, LAPSED), (0, 1), (LAPSED, 1)])
def test_a_claim_whose_lease_is_over_before_its_start_is_given_back(at_claim: int, now: int) -> None:
    """No sandbox starts on a lease that has run out, and that is no fault of the job: it goes back, uncounted."""
    job = ids.new_job_id("main")

    async def scene() -> Finish:
        tools = cast("Tools", SimpleNamespace(era=lambda: now, notary=None))
        run = Run(job, 1, 0, 1, era=at_claim)
        supervisor = Supervisor(tools, cast("Dispatcher", None))
        return supervisor._unbuilt(Claim(job, 1, "agents", slot=0), run, SpawnError("the lease has run out"))

    assert asyncio.run(scene()).kind == "release"


def test_agents_that_lost_the_store_together_ask_again_at_different_times() -> None:
    """A wait is half of what it may be to all of it, and not the same for two agents."""
    waits = [spread(2.0) for _ in range(50)]
    assert min(waits) >= 1.0
    assert max(waits) <= 2.0
    assert len(set(waits)) > 1
