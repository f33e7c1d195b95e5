"""Quotas of calls: atomic, in the whole fleet, given back at the end, lapsed with a node that dies."""

from __future__ import annotations

import asyncio

import pytest

from node_agent.cancelling import end_all
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.storecalls import StoreCalls
from node_agent.policycalls import Quota
from runner.wire.calls import ErrorCode
from tests.kernel.ledger import KEYS, Node, node, run
from tests.support.valkey import Valkey
from tests.support.wait import apause, await_until

DEPLOYS = '[[call]]\neffect = "allow"\nactions = ["tool.call"]\nresources = ["deploy"]\n'


async def _call(on: Node, who: Caller, resource: str = "deploy") -> object:
    """Do as the session does."""
    verdict = on.deciding.decide(who, "tool.call", resource, {})
    if verdict.plain:
        return None
    return await on.deciding.permit(who, "tool.call", resource, {}, verdict)


async def _passes(on: Node, who: Caller) -> bool:
    try:
        await _call(on, who)
    except CallError:
        return False
    return True


async def _refused(on: Node, who: Caller) -> CallError:
    with pytest.raises(CallError) as caught:
        await _call(on, who)
    return caught.value


def test_e4_a_rate_holds_for_the_whole_fleet(valkey: Valkey) -> None:
    """Two nodes together make three calls in a minute, not three each; the answer says when there is room."""

    async def main() -> None:
        policy = DEPLOYS + "per_minute = 3\n"
        async with node(valkey, "n1", policy=policy) as one, node(valkey, "n2", policy=policy) as other:
            first, second = one.caller(tools=("deploy",)), other.caller(tools=("deploy",))
            for on, who in ((one, first), (other, second), (one, first)):
                await _call(on, who)
            error = await _refused(other, second)
            assert error.error is ErrorCode.QUOTA
            assert "3 such calls in a minute" in error.why
            # Another tool has no rule, hence no quota: allowed.
            assert await _call(other, other.caller(tools=("search",)), "search") is None

    run(main())


def test_e4_the_last_place_is_taken_once(valkey: Valkey) -> None:
    """Of many calls at once exactly as many pass as there are places."""

    async def main() -> None:
        policy = DEPLOYS + "concurrent = 4\n"
        async with node(valkey, policy=policy) as on:
            callers = [on.caller(tools=("deploy",)) for _ in range(20)]
            found = await asyncio.gather(*(_call(on, who) for who in callers), return_exceptions=True)
            assert sum(isinstance(one, CallError) for one in found) == 16

    run(main())


def test_e4_places_at_a_time_are_given_back_by_the_call_and_by_the_end_of_the_attempt(valkey: Valkey) -> None:
    """The concurrency counter really counts: it trips, and goes down again."""

    async def main() -> None:
        policy = DEPLOYS + "concurrent = 1\n"
        async with node(valkey, policy=policy) as on:
            first, second = on.caller(tools=("deploy",)), on.caller(tools=("deploy",))
            release = await _call(on, first)
            assert (await _refused(on, second)).error is ErrorCode.QUOTA
            release()  # type: ignore[operator] # gives the place back
            await _until_free(on, second)
            on.quotas.ended(second.attempt)
            await _until_free(on, first)

    async def _until_free(on: Node, who: Caller) -> None:
        await await_until(lambda: _passes(on, who), "the place to be given back")

    run(main())


def test_e4_a_node_that_dies_keeps_no_place(valkey: Valkey) -> None:
    """Places lapse when nobody keeps them up; those of a live node do not."""

    async def main() -> None:
        policy = DEPLOYS + "concurrent = 1\n"
        times = {"life_ms": 300, "keep_s": 0.05}
        async with node(valkey, "n2", policy=policy) as other:
            async with node(valkey, "n1", policy=policy, **times) as one:  # type: ignore[arg-type] # numbers
                await _call(one, one.caller(tools=("deploy",)))
                await apause(0.45)
                assert (await _refused(other, other.caller(tools=("deploy",)))).error is ErrorCode.QUOTA
            # It is gone without having given anything back.
            who = other.caller(tools=("deploy",))
            await await_until(lambda: _passes(other, who), "the place to lapse")

    run(main())


def test_e4_a_call_that_one_quota_refuses_uses_up_no_other(valkey: Valkey) -> None:
    """All places or none."""

    async def main() -> None:
        async with node(valkey) as on:
            wide, narrow = Quota("wide", 5, 60.0), Quota("narrow", 1, 60.0)
            await on.quotas.take("main", "j.1", (wide, narrow))
            for _ in range(9):
                with pytest.raises(CallError):
                    await on.quotas.take("main", "j.1", (wide, narrow))
            for _ in range(4):
                await on.quotas.take("main", "j.1", (wide,))
            with pytest.raises(CallError):
                await on.quotas.take("main", "j.1", (wide,))

    run(main())


def test_attack_41_a_job_that_tries_without_end_waits_for_its_refusals(valkey: Valkey) -> None:
    """A hundred refused calls at once are not a hundred questions to the store a moment later."""

    async def main() -> None:
        async with node(valkey, policy=DEPLOYS + "per_minute = 1\n") as on:
            who, other = on.caller(tools=("deploy",)), on.caller(tools=("deploy",))
            await _call(on, who)
            tries = [asyncio.create_task(_passes(on, who)) for _ in range(100)]
            done, left = await asyncio.wait(tries, timeout=0.5)
            assert len(done) < 70
            assert not await asyncio.wait_for(_passes(on, other), 0.5)
            await end_all(left)

    run(main())


def test_e4_tenants_and_jobs_have_counts_of_their_own(valkey: Valkey) -> None:
    """`per = "job"` counts for each job; the same rule in another tenant is another count."""

    async def main() -> None:
        policy = DEPLOYS + 'per_hour = 1\nper = "job"\n'
        async with node(valkey, policy=policy) as on:
            first, second = on.caller(tools=("deploy",)), on.caller(tools=("deploy",))
            await _call(on, first)
            await _call(on, second)
            assert (await _refused(on, first)).error is ErrorCode.QUOTA
            one = Quota("x", 1, 60.0)
            await on.quotas.take("main", "j.1", (one,))
            await on.quotas.take("other", "j.1", (one,))

    run(main())


def test_a_store_that_is_away_is_an_answer(valkey: Valkey) -> None:
    """A quota that can't be counted lets nothing through, and nobody waits for ever."""

    async def main() -> None:
        async with node(valkey, policy=DEPLOYS + "per_minute = 3\n") as on:
            on.quotas._calls = StoreCalls(on.redis, KEYS, wait_s=0.0)
            assert (await _refused(on, on.caller(tools=("deploy",)))).error is ErrorCode.UNAVAILABLE

    run(main())
