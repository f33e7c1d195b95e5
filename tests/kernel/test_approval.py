"""Calls that a person decides on: parked durably, decided by a signed word, a no when nobody answers in time."""

from __future__ import annotations

import asyncio
import json

import pytest

from node_agent.cancelling import end_all
from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from runner.signing import Signer
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.command import Command
from tests.agent import build
from tests.kernel import ledger
from tests.kernel.ledger import Node, decision, node, paper, question, run, say, until
from tests.support.valkey import Valkey
from tests.support.wait import apause

ASK = '[[call]]\neffect = "ask"\nactions = ["tool.call"]\nresources = ["deploy"]\n'
ENV: dict[str, Json] = {"args": {"env": "prod"}}


async def call(on: Node, who: Caller, facts: dict[str, Json] | None = None) -> None:
    """Do as the session does, with a handler that does nothing."""
    args = ENV if facts is None else facts
    verdict = on.deciding.decide(who, "tool.call", "deploy", args)
    (await on.deciding.permit(who, "tool.call", "deploy", args, verdict))()


async def refused(on: Node, who: Caller, facts: dict[str, Json] | None = None) -> CallError:
    """The call must be refused."""
    with pytest.raises(CallError) as caught:
        await call(on, who, facts)
    return caught.value


def test_e5_a_call_waits_for_a_signed_yes_and_is_carried_out_once(valkey: Valkey) -> None:
    """PENDING until an operator's word is there; the yes is used up by one call, and the next one asks anew."""

    async def main() -> None:
        async with node(valkey, policy=ASK, wait_s=0.05) as on:
            who = on.caller(tools=("deploy",))
            assert (await refused(on, who)).error is ErrorCode.PENDING
            ask, told = await question(on, who.job)
            assert (told["action"], told["resource"], told["rule"]) == ("tool.call", "deploy", "[[call]] rule 1 (ask)")
            assert "prod" not in json.dumps(told)
            assert (await say(on, decision("approve", job=who.job, ask=ask)))[0] == "stored"
            await call(on, who)
            assert (await refused(on, who)).error is ErrorCode.PENDING
            assert (await question(on, who.job))[0] != ask
            assert on.types() == ["job.asked", "job.answered", "job.asked"]
            assert [receipt.outcome for receipt in on.receipts] == ["approved"]
            assert on.recorder.kinds() == ["ask", "answer", "ask"]

    run(main())


def test_e5_only_the_same_call_may_use_the_yes(valkey: Valkey) -> None:
    """Another argument is another question, and so is the same call of another job."""

    async def main() -> None:
        async with node(valkey, policy=ASK, wait_s=0.05) as on:
            who, other = on.caller(tools=("deploy",)), on.caller(tools=("deploy",))
            await refused(on, who)
            ask, _ = await question(on, who.job)
            await say(on, decision("approve", job=who.job, ask=ask))
            assert (await refused(on, who, {"args": {"env": "test"}})).error is ErrorCode.PENDING
            assert (await refused(on, other)).error is ErrorCode.PENDING
            await call(on, who)

    run(main())


def test_e5_a_no_is_a_no_with_who_and_why(valkey: Valkey) -> None:
    """A denied call stays denied."""

    async def main() -> None:
        async with node(valkey, policy=ASK, wait_s=0.05) as on:
            who = on.caller(tools=("deploy",))
            await refused(on, who)
            ask, _ = await question(on, who.job)
            await say(on, decision("deny", job=who.job, ask=ask, reason="not on a Friday"))
            for _ in range(2):
                error = await refused(on, who)
                assert error.error is ErrorCode.DENIED
                assert "ann" in error.why
                assert "Friday" in error.why
            assert [receipt.outcome for receipt in on.receipts] == ["denied"]
            assert (await say(on, decision("approve", job=who.job, ask=ask)))[0] == "decided"

    run(main())


def test_e5_nobody_s_word_is_a_no_when_its_time_is_over(valkey: Valkey) -> None:
    """It times out to deny, and a late yes changes nothing."""

    async def main() -> None:
        async with node(valkey, policy=ASK + "timeout_s = 0.15\n", wait_s=5.0) as on:
            who = on.caller(tools=("deploy",))
            error = await refused(on, who)
            assert error.error is ErrorCode.DENIED
            assert "in time" in error.why
            ask, _ = await question(on, who.job)
            assert (await say(on, decision("approve", job=who.job, ask=ask)))[0] == "expired"
            assert (await refused(on, who)).error is ErrorCode.DENIED
            assert on.quiet == ["job.answered"]

    run(main())


def test_e5_no_word_counts_but_one_that_a_key_with_the_right_signed_for_this_question(valkey: Valkey) -> None:
    """A key that may not operate, a changed word, a word for another question or job: each is as good as none."""

    async def main() -> None:
        async with node(valkey, policy=ASK, wait_s=0.05) as on:
            forged = []
            for number in range(5):
                who = on.caller(tools=("deploy",))
                await refused(on, who)
                ask, _ = await question(on, who.job)
                other = build.job()
                words = [
                    (decision("approve", job=who.job, ask=ask), on.stranger),
                    (decision("approve", job=who.job, ask=ask), build.signer()),
                    (decision("approve", job=who.job, ask=f"{ask}1"), on.operator),
                    (decision("approve", job=other.id, ask=ask), on.operator),
                ]
                if number < len(words):
                    command, signer = words[number]
                    await say_as(on, command, who.job, ask, signer)
                else:
                    field = f"w:{ask}"
                    good = decision("approve", job=who.job, ask=ask)
                    await say(on, good)
                    key = ledger.KEYS.ask(who.job)
                    text = await ledger.raw(on, key, field)
                    await ledger.put(on, key, field, text.replace('"ann"', '"bob"'))
                forged.append(who)
            for who in forged:
                assert (await refused(on, who)).error is ErrorCode.PENDING

    async def say_as(on: Node, command: Command, job: str, ask: str, signer: Signer) -> None:
        await ledger.put(on, ledger.KEYS.ask(job), f"w:{ask}", ledger.worded(command, signer))

    run(main())


def test_e5_freeze_stands_still_until_the_word_and_then_goes_on(valkey: Valkey) -> None:
    """With on_ask = freeze nothing of the job runs while a person decides."""

    async def main() -> None:
        async with node(valkey, policy=ASK + 'on_ask = "freeze"\n', wait_s=0.01) as on:
            who = on.caller(tools=("deploy",))
            under_way = asyncio.create_task(call(on, who))
            await until(lambda: "approval" in who.run.holders, "frozen")
            await apause(0.1)
            assert not under_way.done()
            assert "approval" in who.run.holders
            ask, told = await question(on, who.job)
            assert told["how"] == "freeze"
            await say(on, decision("approve", job=who.job, ask=ask))
            await under_way
            assert paper(who).told == ["freeze", "thaw"]
            assert not who.run.holders

    run(main())


def test_e5_a_call_that_is_given_up_leaves_no_job_frozen(valkey: Valkey) -> None:
    """A session that ends while its question stands lifts its own hold."""

    async def main() -> None:
        async with node(valkey, policy=ASK + 'on_ask = "freeze"\n') as on:
            who = on.caller(tools=("deploy",))
            under_way = asyncio.create_task(call(on, who))
            await until(lambda: "approval" in who.run.holders, "frozen")
            for give_back in tuple(who.closing):
                give_back()
            await until(lambda: not who.run.holders, "thawed")
            await end_all((under_way,))
            assert not who.closing

    run(main())


def test_e5_the_decision_survives_the_agent_and_the_next_attempt_goes_on(valkey: Valkey) -> None:
    """A job that stood still when its agent ended is started again elsewhere, and its question is answered already."""

    async def main() -> None:
        key = build.signer()
        spec = ledger.job_of(tools=("deploy",))
        async with node(valkey, "n1", policy=ASK + 'on_ask = "freeze"\n', operator=key) as one:
            first = one.caller(spec)
            under_way = asyncio.create_task(call(one, first))
            await until(lambda: "approval" in first.run.holders, "frozen")
            await end_all((under_way,))
            ask, _ = await question(one, spec.id)
        async with node(valkey, "n2", policy=ASK + 'on_ask = "freeze"\n', operator=key) as other:
            await say(other, decision("approve", job=spec.id, ask=ask))
            second = other.caller(spec, attempt=2)
            await call(other, second)
            assert paper(second).told == []
            assert "job.asked" not in other.types()

    run(main())


def test_attack_32_e5_questions_of_one_job_are_bounded(valkey: Valkey) -> None:
    """A job that asks without end gets QUOTA, and fills neither the store nor the operators' list."""

    async def main() -> None:
        async with node(valkey, policy=ASK, wait_s=0.0) as on:
            who = on.caller(tools=("deploy",))
            found = [(await refused(on, who, {"args": {"n": number}})).error for number in range(70)]
            assert found.count(ErrorCode.PENDING) == 64
            assert found[-1] is ErrorCode.QUOTA
            # Attack 32: what a job can cause at will goes to a stream of its own.
            assert (on.types().count("job.asked"), on.quiet.count("job.asked")) == (4, 60)

    run(main())


def test_e5_of_calls_that_use_one_yes_at_once_one_is_carried_out(valkey: Valkey) -> None:
    """An approval lets one call through, however many come together."""

    async def main() -> None:
        async with node(valkey, policy=ASK, wait_s=0.2) as on:
            who = on.caller(tools=("deploy",))
            calls = [asyncio.create_task(call(on, who)) for _ in range(6)]
            await until(lambda: "job.asked" in on.types(), "asked")
            ask, _ = await question(on, who.job)
            await say(on, decision("approve", job=who.job, ask=ask))
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(not isinstance(one, CallError) for one in found) == 1

    run(main())
