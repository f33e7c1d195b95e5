"""Parked jobs: an operator's word allows one attempt more, nothing else does; and it uses up no retry."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import cast

import pytest

from node_agent import endings
from node_agent.admission import Admitted, Denial, admit
from node_agent.containment.plan import Verdict
from node_agent.dispatch import Dispatcher
from node_agent.kernel.errors import CallError
from node_agent.kernel.parking import Parking
from node_agent.kernel.storecalls import StoreCalls
from node_agent.kernel.words import Words
from node_agent.lifecycle import Ending, conclude
from node_agent.policy import parse
from node_agent.run import Run, now_ms
from node_agent.supervisor import Supervisor, Tools
from node_agent.turns import Claim
from runner.scripts import payload
from runner.wire import spec as specs
from runner.wire.calls import ErrorCode
from runner.wire.card import TrustedKey
from runner.wire.flow import Budget, RetryRule
from runner.wire.grants import Grants
from runner.wire.states import FailReason, State
from tests.agent import build
from tests.agent.test_admission import new, offer, reason, rules
from tests.kernel import rig
from tests.kernel.ledger import KEYS, decision, node, put, run, worded
from tests.support.valkey import Valkey


def test_e5_admission_lets_in_one_attempt_for_each_word_and_no_more() -> None:
    """Attempt 2 of a job without retries needs a word; attempt 3 needs two; who waited in vain is told so."""
    spec = build.job()
    assert reason(offer(spec, attempt=2)) == "replayed"
    assert isinstance(admit(offer(spec, attempt=2, parks=1), rules(), new, 1), Admitted)
    assert reason(offer(spec, attempt=3, parks=1)) == "replayed"
    late = admit(offer(spec, attempt=2, undecided=True), rules(), new, 1)
    assert isinstance(late, Denial)
    assert (late.reason, "nobody decided in time" in late.message) == ("policy", True)
    assert reason(offer(spec, attempt=3, undecided=True)) == "replayed"


def test_a_store_that_refuses_the_question_holds_up_no_attempt(valkey: Valkey) -> None:
    """What passes by itself is waited for; what does not, such as a missing right, knows of no words."""

    async def main() -> None:
        async with node(valkey) as on:
            run_ = on.caller().run
            asked: list[ErrorCode] = []

            class Refusing(StoreCalls):
                async def run(self, *_: object) -> list[object]:
                    asked.append(ErrorCode.FAULT if asked else ErrorCode.UNAVAILABLE)
                    raise CallError(asked[-1])

            await asyncio.wait_for(Parking(Refusing(on.redis, KEYS), Words("n1", {})).parks(run_), 5)
            assert asked == [ErrorCode.UNAVAILABLE, ErrorCode.FAULT]
            with pytest.raises(CallError) as caught:
                await StoreCalls(on.redis, KEYS).run("ask", ("rf:ask:x",), {"op": "park"})
            assert caught.value.error is ErrorCode.FAULT

    run(main())


def test_e5_only_signed_words_for_parked_questions_of_this_job_count(valkey: Valkey) -> None:
    """A word of a stranger, for another question, or for one that did not park allows nothing."""

    async def main() -> None:
        async with node(valkey) as on:
            who = on.caller()
            key, other = KEYS.ask(who.job), build.job().id
            trust = {on.operator.key_id: TrustedKey(on.operator.key_id, on.operator.public, ("operate",), ("main",))}
            parking = Parking(StoreCalls(on.redis, KEYS), Words("n1", trust))
            rows = {
                "a.0": ("requeue", worded(decision("approve", job=who.job, ask="a.0"), on.operator)),
                "b.0": ("requeue", worded(decision("deny", job=who.job, ask="b.0"), on.operator)),
                "c.0": ("requeue", worded(decision("approve", job=who.job, ask="c.0"), on.stranger)),
                "d.0": ("requeue", worded(decision("approve", job=who.job, ask="a.0"), on.operator)),
                "e.0": ("requeue", worded(decision("approve", job=other, ask="e.0"), on.operator)),
                "f.0": ("wait", worded(decision("approve", job=who.job, ask="f.0"), on.operator)),
                "g.0": ("requeue", "nonsense"),
            }
            for ask, (how, word) in rows.items():
                await put(on, key, f"a:{ask}", json.dumps({"how": how}))
                await put(on, key, f"w:{ask}", word)
            await on.redis.expire(key, 60)
            await parking.parks(who.run)
            assert (who.run.parks, who.run.undecided) == (2, True)

    run(main())


def test_e5_a_parked_attempt_comes_back_and_uses_up_no_retry() -> None:
    """It waits for its time, never past the job's own; and afterwards the retries are what they were."""
    spec = build.job(retry=RetryRule(count=1), not_after_ms=now_ms() + 60_000)
    who = rig.caller(spec, attempt=2)
    held, known = who.run, endings.Evidence()
    held.cause, held.parked_ms = "parked", 10_000
    ending = conclude(Verdict(kind="signal", signal=15, forced=False), held.cause)
    assert (ending.state, ending.reason) == (State.LOST, "parked")
    assert endings.retry_ms(held, ending, 2, known) == 10_000
    held.parked_ms = 10**9
    assert 50_000 < (endings.retry_ms(held, ending, 2, known) or 0) < 60_000
    failed = Ending(State.FAILED, FailReason.EXIT, 1)
    held.cause, held.parks = "", 1
    assert endings.retry_ms(held, failed, 2, known) == 0
    assert endings.retry_ms(held, failed, 3, known) is None


def test_a_job_with_a_budget_shares_no_worker() -> None:
    """What is left is looked at before each start, which a reused worker would skip."""
    spec = build.job(task="app:f", profile="reuse=3", budget=Budget("k", requests=1))
    assert reason(offer(spec), rules(policy=parse(ALL))) == "unenforceable"


ALL = 'version = 1\n[[allow]]\ntasks = ["*"]\nreuse = true\n'


def test_a_kill_by_selector_finds_an_attempt_that_waits_for_the_store() -> None:
    """What was signed is read before the store is asked for words: it may be away for long."""
    spec = build.job(grants=Grants(), retry=RetryRule(3))
    offered = offer(spec, attempt=2)
    seen: list[tuple[str, ...]] = []

    async def parks(run_: Run) -> None:
        seen.append(run_.selectors)

    async def scene() -> None:
        tools = SimpleNamespace(
            kernel=SimpleNamespace(parks=parks),
            rules=rules(),
            ledger=SimpleNamespace(look=new),
            notary=SimpleNamespace(node="n1"),
        )
        supervisor = Supervisor(cast("Tools", tools), cast("Dispatcher", None))
        data = payload.pack(offered.envelope, offered.signature)
        claim = Claim(spec.id, 2, offered.lane, slot=0, data=data, flow=offered.flow)
        await supervisor._parked(claim, Run(spec.id, 2, 0, 1))

    asyncio.run(scene())
    assert seen == [specs.selectors_of(spec, "n1")]
