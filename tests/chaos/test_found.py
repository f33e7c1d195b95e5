"""What chaos runs found, one by one and without chance."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from node_agent.containment.errors import SpawnError
from node_agent.containment.plan import Verdict
from node_agent.dispatch import Dispatcher
from node_agent.endings import Evidence, finish_of
from node_agent.lifecycle import Ending
from node_agent.records import Notary
from node_agent.run import KillOrder, Proof, Run
from node_agent.spread import spread
from node_agent.supervisor import Supervisor, Tools
from node_agent.turns import Claim, Finish
from runner.wire import ids
from runner.wire.flow import RetryRule
from runner.wire.receipt import Receipt
from runner.wire.states import FailReason, State
from tests.agent import build

LAPSED = -1


@pytest.mark.parametrize(("at_claim", "now"), [(LAPSED, LAPSED), (0, LAPSED), (0, 1), (LAPSED, 1)])
def test_a_claim_whose_lease_is_over_before_its_start_is_given_back(at_claim: int, now: int) -> None:
    """No sandbox starts on a lease that has run out, and that is no fault of the job: it goes back, uncounted."""
    job = ids.new_job_id("main")

    async def scene() -> Finish:
        tools = cast("Tools", SimpleNamespace(era=lambda: now, notary=None, kernel=None))
        run = Run(job, 1, 0, 1, era=at_claim)
        supervisor = Supervisor(tools, cast("Dispatcher", None))
        return supervisor._unbuilt(Claim(job, 1, "agents", slot=0), run, SpawnError("the lease has run out"))

    assert asyncio.run(scene()).kind == "release"


@pytest.mark.parametrize(("retries", "state"), [(2, State.KILLED), (0, State.FAILED)])
def test_a_kill_beside_an_attempts_own_end_wins_over_its_retry(retries: int, state: State) -> None:
    """The job was killed, not failed, where it would have run again; where it would not, its own end stands."""
    spec = build.job(retry=RetryRule(retries))
    key = build.signer()
    failed, evidence = Ending(State.FAILED, FailReason.EXIT, 1), Evidence(Verdict("exit", code=1))

    async def scene() -> tuple[Finish, Receipt]:
        notary = Notary(key, "n", "b" * 12, "B")
        supervisor = Supervisor(cast("Tools", SimpleNamespace(notary=notary, kernel=None)), cast("Dispatcher", None))
        run = Run(spec.id, 1, 0, 1, spec=spec, started_at_ms=1)
        run.settle(Proof(failed, evidence.verdict, 1))
        order = KillOrder("c", 1)
        run.kill(order)
        finish = finish_of(
            Claim(spec.id, 1, "agents", slot=0), run, supervisor._overruled(run, failed, evidence), notary, evidence
        )
        run.acknowledged.set_result(True)
        return finish, notary.receipt(run, order, await run.answerable())

    finish, receipt = asyncio.run(scene())
    assert (finish.kind, finish.state) == ("end", state)
    assert (receipt.outcome, receipt.state) == (("killed" if state is State.KILLED else "already_ended"), state)


def test_agents_that_lost_the_store_together_ask_again_at_different_times() -> None:
    """A wait is half of what it may be to all of it, and not the same for two agents."""
    waits = [spread(2.0) for _ in range(50)]
    assert min(waits) >= 1.0
    assert max(waits) <= 2.0
    assert len(set(waits)) > 1
