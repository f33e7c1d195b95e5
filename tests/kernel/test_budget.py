"""Budgets: one counter for the whole fleet; who passes it stands still, until a signed word adds to it or ends it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from node_agent.containment.plan import Usage
from node_agent.doornews import Metered
from node_agent.errors import PolicyError
from node_agent.kernel import prices
from node_agent.kernel.account import Account
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from runner.wire import derived
from runner.wire.calls import ErrorCode
from runner.wire.flow import Budget
from runner.wire.spec import JobSpec
from tests.agent import build
from tests.kernel import ledger, rig
from tests.kernel.ledger import KEYS, Node, decision, looks, node, paper, put, run, say, until
from tests.support.valkey import Valkey

PRICES = prices.parse('version = 1\n[models."small-*"]\nin = 1.0\nout = 4.0\n')


def told(
    attempt: str,
    model: str = "small-1",
    *,
    requests: int = 1,
    tokens_in: int = 0,
    tokens_out: int = 0,
    unknown_bytes: int = 0,
) -> Metered:
    """What the egress process tells."""
    return Metered(attempt, model, requests, tokens_in, tokens_out, min(1, unknown_bytes), unknown_bytes)


async def started(on: Node, spec: JobSpec, *, attempt: int = 1) -> Caller:
    """A job whose budget let it start."""
    who = on.caller(spec, attempt=attempt)
    await asyncio.wait_for(on.budgets.begin(who.run), 5)
    return who


def frozen(who: Caller) -> bool:
    """Whether the budget holds a job."""
    return "budget" in who.run.holders


def test_e4_one_budget_stops_the_jobs_of_two_nodes(valkey: Valkey) -> None:
    """Both nodes' jobs stand still within a step of each other, the event is told once, and one yes lets both go on."""

    async def main() -> None:
        key, budget = build.signer(), Budget("team", tokens=1000)
        async with node(valkey, "n1", operator=key) as one, node(valkey, "n2", operator=key) as other:
            first, second = await started(one, ledger.job_of(budget)), await started(other, ledger.job_of(budget))
            one.budgets.metered(told(first.attempt, tokens_in=400, tokens_out=300))
            other.budgets.metered(told(second.attempt, tokens_in=300))
            await looks(one, first)
            await looks(other, second)
            assert not frozen(first)
            assert not frozen(second)
            one.budgets.metered(told(first.attempt, tokens_out=1))
            await until(lambda: frozen(first) and frozen(second), "both frozen")
            hits = [event for _, event in (*one.events, *other.events) if event.type == "budget.hit"]
            assert len(hits) == 1
            assert (hits[0].detail["unit"], hits[0].detail["used"], hits[0].detail["bound"]) == ("tokens", 1001, 1000)
            await say(one, decision("approve", budget="team", add={"tokens": 500}))
            await until(lambda: not frozen(first) and not frozen(second), "both go on")
            assert paper(first).told == paper(second).told == ["freeze", "thaw"]
            await until(lambda: bool(one.receipts and other.receipts), "answers")
            assert {receipt.outcome for receipt in (*one.receipts, *other.receipts)} == {"approved"}
            other.budgets.metered(told(second.attempt, tokens_out=500))
            await until(lambda: frozen(first) and frozen(second), "frozen again")

    run(main())


def test_e4_a_no_kills_every_job_of_the_key(valkey: Valkey) -> None:
    """Denied: the jobs die with the budget as their reason, and so does one that starts later."""

    async def main() -> None:
        async with node(valkey) as on:
            budget = Budget("team", calls=1)
            who = await started(on, ledger.job_of(budget))
            await on.budgets.spend(who, "calls")
            over = asyncio.create_task(on.budgets.spend(who, "calls"))
            await until(lambda: frozen(who), "frozen")
            assert not over.done()
            await say(on, decision("deny", budget="team"))
            with pytest.raises(CallError) as caught:
                await asyncio.wait_for(over, 5)
            assert caught.value.error is ErrorCode.ENDED
            assert "budget team: calls: 2 of 1 used" in who.run.orders[0].reason
            assert [receipt.outcome for receipt in on.receipts] == ["denied"]
            assert who.run.orders[0].by == "ann"
            late = on.caller(ledger.job_of(budget))
            await asyncio.wait_for(on.budgets.begin(late.run), 5)
            assert late.run.orders

    run(main())


def test_e4_on_hit_kill_needs_nobody(valkey: Valkey) -> None:
    """A job that asked to be killed at its bound is."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=2, on_hit="kill")))
            for _ in range(3):
                on.budgets.metered(told(who.attempt))
            await until(lambda: "kill" in paper(who).told, "killed")

    run(main())


def test_e4_an_approval_without_amounts_gives_the_bound_once_more(valkey: Valkey) -> None:
    """Approved once: as much again as was given, and no more."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=2)))
            on.budgets.metered(told(who.attempt, requests=3))
            await until(lambda: frozen(who), "frozen")
            await say(on, decision("approve", budget="k"))
            await until(lambda: not frozen(who), "goes on")
            on.budgets.metered(told(who.attempt, requests=1))
            await looks(on, who)
            assert not frozen(who)
            on.budgets.metered(told(who.attempt, requests=1))
            await until(lambda: frozen(who), "frozen again")

    run(main())


def test_e4_no_word_counts_but_a_signed_one(valkey: Valkey) -> None:
    """A word of a key that may not operate, or for another budget, adds nothing."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=1)))
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: frozen(who), "frozen")
            await say(on, decision("approve", budget="k"), on.stranger)
            other = decision("approve", budget="other")
            await put(on, KEYS.budget("main", "k"), f"w:{other.id}", ledger.worded(other, on.operator))
            await looks(on, who)
            assert frozen(who)

    run(main())


def test_e4_a_job_starts_only_while_there_is_room(valkey: Valkey) -> None:
    """A used-up budget holds a job before anything of it runs, and lets it start once there is more."""

    async def main() -> None:
        async with node(valkey) as on:
            budget = Budget("k", requests=1)
            who = await started(on, ledger.job_of(budget))
            on.budgets.metered(told(who.attempt, requests=5))
            await until(lambda: frozen(who), "frozen")
            late = on.caller(ledger.job_of(budget))
            begins = asyncio.create_task(on.budgets.begin(late.run))
            await looks(on, who)
            assert not begins.done()
            await say(on, decision("approve", budget="k", add={"requests": 10}))
            await asyncio.wait_for(begins, 5)
            assert not late.run.stopping

    run(main())


async def _used_s(on: Node, who: Caller) -> float:
    shown = await rig.ask(on.budgets.entries(), who, "budget.show")
    return cast("dict[str, dict[str, dict[str, float]]]", shown)["units"]["wall_s"]["used"]


def test_e4_wall_and_cpu_time_are_charged_while_the_job_runs_and_at_its_end(valkey: Valkey) -> None:
    """Time that a job stands still is not charged; what its end shows more of, is."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("w", wall_s=0.2)))
            await until(lambda: frozen(who), "frozen by wall time")
            stood = await _used_s(on, who)
            assert stood > 0.2
            await looks(on, who)
            assert await _used_s(on, who) == stood
            busy = await started(on, ledger.job_of(Budget("c", cpu_s=1.0)))
            paper(busy).used_s = 0.9
            await looks(on, busy)
            assert not frozen(busy)
            paper(busy).used_s = 1.1
            await until(lambda: frozen(busy), "frozen by cpu time")
            short = await started(on, ledger.job_of(Budget("e", cpu_s=1.0)))
            on.budgets.ended(short.run, Usage(0.1, 3.0, 0, 1))
            late = on.caller(ledger.job_of(Budget("e", cpu_s=1.0)))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(on.budgets.begin(late.run), 0.2)

    run(main())


def test_e4_cost_goes_by_the_price_table_and_a_model_without_a_price_uses_it_up(valkey: Valkey) -> None:
    """A cost bound is never passed because nobody knows a price; answers without an account count by their size."""

    async def main() -> None:
        async with node(valkey, prices=PRICES) as on:
            who = await started(on, ledger.job_of(Budget("k", cost_usd=0.01)))
            on.budgets.metered(told(who.attempt, tokens_in=1000, tokens_out=2000))
            await looks(on, who)
            assert not frozen(who)
            on.budgets.metered(told(who.attempt, unknown_bytes=300))
            await until(lambda: frozen(who), "frozen by cost")
            other = await started(on, ledger.job_of(Budget("u", cost_usd=100.0)))
            on.budgets.metered(told(other.attempt, "", requests=1))
            await looks(on, other)
            assert not frozen(other)
            on.budgets.metered(told(other.attempt, "unheard-of", tokens_in=1))
            await until(lambda: frozen(other), "frozen by an unknown model")
            third = await started(on, ledger.job_of(Budget("v", cost_usd=0.01)))
            left = Metered(third.attempt, "", 1, 0, 0, 1, 0, 0, 9000)
            on.budgets.metered(left)
            await looks(on, third)
            assert not frozen(third)  # nobody named a model, but none of ours is dearer
            on.budgets.metered(left)
            await until(lambda: frozen(third), "frozen by questions without an answer")

    run(main())


def test_e4_what_comes_after_the_end_is_charged_too(valkey: Valkey) -> None:
    """The egress process tells the last of an attempt when its door closes."""

    async def main() -> None:
        async with node(valkey) as on:
            budget = Budget("k", tokens=10)
            who, other = await started(on, ledger.job_of(budget)), await started(on, ledger.job_of(budget))
            on.budgets.ended(who.run, Usage())
            on.budgets.metered(told(who.attempt, tokens_in=11))
            await until(lambda: frozen(other), "frozen")

    run(main())


def test_e4_a_batch_whose_answer_was_lost_is_added_once(valkey: Valkey) -> None:
    """The same batch sent twice counts once."""

    async def main() -> None:
        async with node(valkey) as on:
            account = Account("main", "k")
            account.charge("tokens", 5)
            store = on.budgets._store
            await store.tell(account)
            account.sending, account.used = {"tokens": 5.0}, {}
            await store.tell(account)
            assert account.used == {"tokens": 5.0}

    run(main())


def test_e4_a_counter_that_was_spoilt_counts_as_used_up(valkey: Valkey) -> None:
    """Who writes nonsense into the store buys nothing with it."""

    async def main() -> None:
        async with node(valkey) as on:
            for number, odd in enumerate(("nan", "-", "1e9999", "")):
                key = f"k{number}"
                await put(on, KEYS.budget("main", key), "tokens", odd)
                who = on.caller(ledger.job_of(Budget(key, tokens=10)))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(on.budgets.begin(who.run), 0.15)

    run(main())


def test_e4_what_can_not_be_recorded_is_held_all_the_same(valkey: Valkey) -> None:
    """A full disk must not let a job spend on: it stands still, and the word of it comes later."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=1)))
            on.recorder.broken = True
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: frozen(who), "frozen")
            await say(on, decision("deny", budget="k"))
            await until(lambda: "kill" in paper(who).told, "killed")

    run(main())


def test_attack_04_a_child_job_spends_from_its_parent_s_budget() -> None:
    """A job that starts others starts none that its budget does not bound."""
    spec = ledger.job_of(Budget("k", requests=1), spawn=1)
    child = derived.child_of(derived.origin_of(spec), derived.Child(spec.id, 1, "n1", 0, argv=("sh",)))
    assert child.spec.budget == spec.budget


def test_e4_a_job_that_can_not_stand_still_is_killed(valkey: Valkey) -> None:
    """Where nothing can freeze it, it would spend on."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=1)))
            paper(who).cannot = True
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: "kill" in paper(who).told, "killed")

    run(main())


def test_e4_an_operator_s_resume_does_not_lift_a_budget(valkey: Valkey) -> None:
    """It is held again at once: a budget is lifted by an approval alone."""

    async def main() -> None:
        async with node(valkey) as on:
            who = await started(on, ledger.job_of(Budget("k", requests=1)))
            on.budgets.metered(told(who.attempt, requests=2))
            await until(lambda: frozen(who), "frozen")
            who.run.holders.clear()
            await until(lambda: frozen(who), "frozen again")

    run(main())


@pytest.mark.parametrize(
    "text",
    ["", "version = 1\n[models.a]\nin = 1\n", "version = 1\n[models.a]\nin = -1\nout = 1\n", "version = 1\nx = 1\n"],
)
def test_a_price_table_that_is_not_understood_does_not_load(text: str) -> None:
    """Fail closed."""
    with pytest.raises(PolicyError):
        prices.parse(text)


def test_attack_41_one_job_s_reports_have_no_other_budget_looked_at(valkey: Valkey) -> None:
    """Whatever a door reports, as often as it may: another budget is asked for in the store once a step."""

    async def main() -> None:
        async with node(valkey, prices=PRICES, step_s=30.0) as on:
            quiet = await started(on, ledger.job_of(Budget("quiet", tokens=10**6)))
            busy = await started(on, ledger.job_of(Budget("busy", tokens=10**6)))
            mine, other = (on.budgets._by_attempt[who.attempt][0] for who in (busy, quiet))
            before = other.batch
            for _ in range(5):
                at = mine.batch
                on.budgets.metered(told(busy.attempt, tokens_in=1))
                await until(lambda at=at: mine.batch > at, "the report in the store")  # type: ignore[misc] # bound now
            assert other.batch == before
            assert mine.total("tokens") == 5

    run(main())
