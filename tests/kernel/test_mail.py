"""Mailboxes: at least once, one receiver at a time, acknowledged; who may, and who wrote it (rows I1, I2)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import cast

from node_agent.kernel.caller import Caller
from node_agent.kernel.mail import BURST
from node_agent.kernel.mailstore import MOST_LETTERS, MOST_TIMES, Place
from node_agent.run import now_ms
from runner.wire import ids
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.grants import MailGrant
from runner.wire.letters import Letter
from tests.agent import build
from tests.kernel import rig
from tests.kernel.post import Node, fleet, texts
from tests.support.valkey import Valkey
from tests.support.wait import await_until

BOTH = (MailGrant("desk"),)
Answer = dict[str, Json]


def job(*grants: MailGrant, tenant: str = "main") -> Caller:
    """A job with these mail grants."""
    spec = build.job(id=ids.new_job_id(tenant), tenant=tenant)
    return rig.caller(spec, mail=grants or BOTH)


async def ask(node: Node, who: Caller, op: str, **fields: object) -> Answer:
    """Call one op on a node."""
    return cast("Answer", await rig.ask(node.mail.entries(), who, f"mail.{op}", **fields))


async def refused(node: Node, who: Caller, op: str, **fields: object) -> ErrorCode:
    """Call one op, which must be refused."""
    return await rig.refused(node.mail.entries(), who, f"mail.{op}", **fields)


async def one(node: Node, who: Caller, box: str = "desk", **fields: object) -> Answer:
    """Receive exactly one letter."""
    answer = await ask(node, who, "receive", box=box, **fields)
    (letter,) = cast("list[Answer]", answer["letters"])
    return letter


def test_row_i1_jobs_on_two_nodes_write_to_each_other(valkey: Valkey) -> None:
    """A letter reaches a waiting job of another node at once, named by the sender's node, and is gone once taken."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2") as nodes:
            ann, bob = job(), job()
            waiting = asyncio.create_task(one(nodes["n2"], bob, wait_s=5))
            await await_until(lambda: nodes["n2"].mail._stirred, "the receiver to wait")
            sent = await ask(nodes["n1"], ann, "send", box="desk", body={"from": "somebody else", "n": [1, None]})
            letter = await asyncio.wait_for(waiting, 2)
            assert (letter["body"], letter["from"], letter["letter"]) == (
                {"from": "somebody else", "n": [1, None]},
                ann.job,
                sent["id"],
            )
            await ask(nodes["n2"], bob, "ack", box="desk", id=letter["id"])
            (count,) = cast("list[Answer]", await rig.ask(nodes["n1"].mail.entries(), ann, "mail.boxes"))
            assert (count["letters"], count["held"], count["bytes"]) == (0, 0, 0)

    asyncio.run(main())


def test_row_i2_a_letter_is_confirmed_by_its_receiver_and_by_nothing_less(valkey: Valkey) -> None:
    """A sender hears who took its letter only after that job's own acknowledgement; handing out confirms nothing."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2") as nodes:
            ann, bob = job(), job()
            alone = await ask(nodes["n1"], ann, "send", box="desk", body=1, wait_s=0.05)
            assert (alone["confirmed"], alone["by"]) == (False, None)
            await ask(nodes["n2"], bob, "ack", box="desk", id=(await one(nodes["n2"], bob))["id"])
            sending = asyncio.create_task(ask(nodes["n1"], ann, "send", box="desk", body=2, wait_s=5))
            letter = await one(nodes["n2"], bob, wait_s=5)
            await ask(nodes["n2"], bob, "keep", box="desk", id=letter["id"])
            assert not sending.done()
            await ask(nodes["n2"], bob, "ack", box="desk", id=letter["id"])
            assert (await asyncio.wait_for(sending, 2))["by"] == bob.job

    asyncio.run(main())


def test_row_i2_a_letter_of_a_dead_receiver_comes_again_and_at_last_is_dead(valkey: Valkey) -> None:
    """What was not acknowledged in its time is given to the next who asks, and after some times to nobody."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2", hold_ms=20) as nodes:
            ann = job()
            await ask(nodes["n1"], ann, "send", box="desk", body="x")
            seen = []
            for turn in range(MOST_TIMES):
                node = nodes["n1" if turn % 2 else "n2"]
                seen.append((await one(node, job(), wait_s=5))["times"])
            assert seen == list(range(1, MOST_TIMES + 1))
            assert (await ask(nodes["n2"], job(), "receive", box="desk", wait_s=0.2))["letters"] == []
            (count,) = cast("list[Answer]", await rig.ask(nodes["n1"].mail.entries(), ann, "mail.boxes"))
            assert (count["letters"], count["dead"], count["bytes"]) == (0, 1, 0)

    asyncio.run(main())


def test_a_late_receiver_does_not_take_a_letter_from_the_next_one(valkey: Valkey) -> None:
    """Whose time for a letter is over, and who has not asked for more, can't acknowledge it for another job."""

    async def main() -> None:
        async with fleet(valkey, "n1", hold_ms=20) as nodes:
            node, slow, quick = nodes["n1"], job(), job()
            await ask(node, slow, "send", box="desk", body="x")
            first = await one(node, slow)
            again = await one(node, quick, wait_s=5)
            assert (again["id"], again["times"]) == (first["id"], 2)
            assert await refused(node, slow, "ack", box="desk", id=first["id"]) is ErrorCode.CONFLICT
            await ask(node, quick, "keep", box="desk", id=again["id"])
            await ask(node, quick, "ack", box="desk", id=again["id"])
            assert await refused(node, quick, "ack", box="desk", id=again["id"]) is ErrorCode.NOT_FOUND

    asyncio.run(main())


def test_what_an_attempt_held_at_its_end_goes_to_the_next_at_once(valkey: Valkey) -> None:
    """A receiver's end gives its letters to whoever waits, long before their time is over."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2") as nodes:
            ann, bob, eve = job(), job(), job()
            await ask(nodes["n1"], ann, "send", box="desk", body="x")
            await one(nodes["n1"], bob)
            waiting = asyncio.create_task(one(nodes["n2"], eve, wait_s=5))
            await await_until(lambda: nodes["n2"].mail._stirred, "the receiver to wait")
            nodes["n1"].mail.ended(bob)
            letter = await asyncio.wait_for(waiting, 2)
            assert (letter["body"], letter["times"]) == ("x", 2)
            await ask(nodes["n2"], eve, "back", box="desk", id=letter["id"])
            assert (await one(nodes["n1"], ann))["times"] == 3

    asyncio.run(main())


def test_a_question_is_answered_by_who_holds_it_and_nobody_else(valkey: Valkey) -> None:
    """An answer reaches the job that asked, on its node; without one in time the asker is told so."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2") as nodes:
            ann, bob = job(), job()
            asking = asyncio.create_task(ask(nodes["n1"], ann, "ask", box="desk", body="why?", wait_s=5))
            letter = await one(nodes["n2"], bob, wait_s=5)
            assert letter["answer"] is True
            assert await refused(nodes["n1"], ann, "reply", box="desk", id=letter["id"], body=0) is ErrorCode.NOT_FOUND
            await ask(nodes["n2"], bob, "reply", box="desk", id=letter["id"], body={"because": 1})
            got = await asyncio.wait_for(asking, 2)
            assert (got["from"], got["body"]) == (bob.job, {"because": 1})
            assert await refused(nodes["n1"], ann, "ask", box="desk", body="?", wait_s=0.05) is ErrorCode.TIMEOUT
            await ask(nodes["n1"], ann, "send", box="desk", body="no question")
            plain = await one(nodes["n2"], bob)
            assert await refused(nodes["n2"], bob, "reply", box="desk", id=plain["id"], body=0) is ErrorCode.BAD_REQUEST

    asyncio.run(main())


def test_a_late_answer_lies_in_the_job_s_own_box(valkey: Valkey) -> None:
    """An answer that came too late is not lost: the job finds it in `@`, with the id of its question."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node, ann, bob = nodes["n1"], job(), job()
            asking = asyncio.create_task(ask(node, ann, "ask", box="desk", body="?", wait_s=0.5))
            letter = await one(node, bob, wait_s=2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await ask(node, bob, "reply", box="desk", id=letter["id"], body="late")
            answer = await one(node, ann, box="@")
            assert (answer["body"], answer["corr"]) == ("late", letter["letter"])
            assert (await ask(node, bob, "receive", box="@"))["letters"] == []

    asyncio.run(main())


def test_a_job_reaches_only_what_it_was_granted(valkey: Valkey) -> None:
    """Without a grant of that name and way nothing is sent, received or counted; another job's answers are nobody's."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node, bare = nodes["n1"], rig.caller()
            sender, receiver = job(MailGrant("desk", "send")), job(MailGrant("desk", "receive"))
            for who, op in ((bare, "send"), (receiver, "send"), (job(MailGrant("other")), "send")):
                assert await refused(node, who, op, box="desk", body=1) is ErrorCode.DENIED
            for box in ("desk", "@", f"@{sender.job}"):
                assert await refused(node, bare, "receive", box=box) is ErrorCode.DENIED
            assert await refused(node, sender, "receive", box="desk") is ErrorCode.DENIED
            assert await refused(node, receiver, "receive", box=f"@{sender.job}") is ErrorCode.DENIED
            assert await refused(node, sender, "send", box="@", body=1) is ErrorCode.DENIED
            assert await refused(node, bare, "boxes") is ErrorCode.DENIED

    asyncio.run(main())


def test_attack_56_a_name_is_the_tenant_s_own(valkey: Valkey) -> None:
    """Two tenants that use one name never see each other's letters."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node, ours, theirs = nodes["n1"], job(tenant="main"), job(tenant="other")
            await ask(node, ours, "send", box="desk", body="ours")
            assert (await ask(node, theirs, "receive", box="desk"))["letters"] == []
            await ask(node, theirs, "send", box="desk", body="theirs")
            assert [(await one(node, who))["body"] for who in (ours, theirs)] == ["ours", "theirs"]

    asyncio.run(main())


def test_attack_20_a_letter_that_no_node_signed_is_put_away(valkey: Valkey) -> None:
    """Who may write the store can't write letters: forged, moved, or by a node of another tenant, nobody gets them."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2", n2=("other",)) as nodes:
            node, ann = nodes["n1"], job(MailGrant("desk"), MailGrant("till"))
            letter = Letter("a" * 32, "main", "desk", ann.job, 1, "n1", 1, build.FAR_MS, "pay me")
            data, signature = node.seals.seal(letter)
            place = Place("main", "desk", ann.job)
            theirs = nodes["n2"].seals.seal(dataclasses.replace(letter, node="n2"))
            lies = nodes["n2"].seals.seal(letter)
            for body, sig in ((data.replace(b"pay me", b"pay us"), signature), theirs, lies):
                await node.store.send(place, letter, body, sig)
            await node.store.send(Place("main", "till", ann.job), letter, data, signature)
            for box in ("desk", "till"):
                assert texts(await ask(node, ann, "receive", box=box, count=4)) == []
            await node.store.send(place, letter, data, signature)
            assert texts(await ask(node, ann, "receive", box="desk", count=3)) == ["pay me"]
            desk, till = cast("list[Answer]", await rig.ask(node.mail.entries(), ann, "mail.boxes"))
            assert (desk["dead"], till["dead"]) == (3, 1)

    asyncio.run(main())


def test_what_a_job_can_cause_is_bounded(valkey: Valkey) -> None:
    """A box takes so many letters and no more, a body and a wait have bounds, and a letter's time runs out."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node, ann = nodes["n1"], job()
            assert await refused(node, ann, "send", box="desk", body="x" * 32768) is ErrorCode.TOO_LARGE
            deep: Json = []
            for _ in range(40):
                deep = [deep]
            assert await refused(node, ann, "send", box="desk", body=deep) is ErrorCode.BAD_REQUEST
            for fields in ({"wait_s": 1e9}, {"wait_s": float("nan")}, {"count": 0}, {"count": 10**9}):
                assert await refused(node, ann, "receive", box="desk", **fields) is ErrorCode.BAD_REQUEST
            await ask(node, ann, "send", box="desk", body="brief", life_s=0.001)
            over_ms = now_ms() + 5
            await await_until(lambda: now_ms() > over_ms, "the letter's time to be over")
            assert (await ask(node, ann, "receive", box="desk"))["letters"] == []
            for number in range(MOST_LETTERS):
                await ask(node, job(), "send", box="desk", body=number)
            assert await refused(node, job(), "send", box="desk", body="one more") is ErrorCode.QUOTA
            found = texts(await ask(node, ann, "receive", box="desk", count=16))
            assert found == list(range(16))

    asyncio.run(main())


def test_a_flood_of_one_job_is_told_to_slow_down(valkey: Valkey) -> None:
    """A job that sends as fast as it can is refused; another one does not notice."""

    async def main() -> None:
        async with fleet(valkey, "n1", clock=lambda: 0.0) as nodes:
            node, flood = nodes["n1"], job(MailGrant("topic/flood"))
            for _ in range(int(BURST)):
                await ask(node, flood, "send", box="topic/flood", body=1)
            assert await refused(node, flood, "send", box="topic/flood", body=1) is ErrorCode.SLOW_DOWN
            await ask(node, job(), "send", box="desk", body=1)

    asyncio.run(main())
