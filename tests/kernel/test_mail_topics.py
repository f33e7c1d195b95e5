"""Topics, and boxes in a store that somebody spoils or takes away."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.mailstore import MOST_LETTERS
from node_agent.kernel.talk import Talk
from runner.wire import ids
from runner.wire.calls import ErrorCode
from runner.wire.codec import Json
from runner.wire.grants import MailGrant
from runner.wire.keys import Keys
from tests.agent import build
from tests.kernel import rig
from tests.kernel.post import Node, fleet, texts
from tests.support.valkey import Valkey
from tests.support.wait import await_until

NEWS = "topic/news"
Answer = dict[str, Json]


def job(box: str = NEWS) -> Caller:
    """A job with one mail grant."""
    return rig.caller(build.job(), mail=(MailGrant(box),))


async def ask(node: Node, who: Caller, op: str, **fields: object) -> Answer:
    """Call one op on a node."""
    return cast("Answer", await rig.ask(node.mail.entries(), who, f"mail.{op}", **fields))


def test_row_i2_every_subscriber_gets_each_letter_and_acknowledges_for_itself(valkey: Valkey) -> None:
    """A topic fans out; who joins later sees what comes later; the sender only hears how many there were."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2") as nodes:
            ann, bob, eve = job(), job(), job()
            assert (await ask(nodes["n1"], ann, "send", box=NEWS, body=0))["subscribers"] == 0
            for node, who in ((nodes["n1"], bob), (nodes["n2"], eve)):
                assert texts(await ask(node, who, "receive", box=NEWS)) == []
            waiting = asyncio.create_task(ask(nodes["n2"], eve, "receive", box=NEWS, wait_s=5))
            for number in (1, 2):
                assert (await ask(nodes["n1"], ann, "send", box=NEWS, body=number))["subscribers"] == 2
            first = await asyncio.wait_for(waiting, 2)
            assert texts(first) == [1]
            assert texts(await ask(nodes["n1"], bob, "receive", box=NEWS, count=5)) == [1, 2]
            (letter,) = cast("list[Answer]", first["letters"])
            await ask(nodes["n2"], eve, "ack", box=NEWS, id=letter["id"])
            assert texts(await ask(nodes["n2"], eve, "receive", box=NEWS, count=5)) == [2]

    asyncio.run(main())


def test_a_slow_subscriber_is_told_what_it_missed(valkey: Valkey) -> None:
    """A topic never blocks its senders: the oldest letters go, and who did not see them learns how many."""

    async def main() -> None:
        async with fleet(valkey, "n1", clock=lambda: 0.0) as nodes:
            node, slow = nodes["n1"], job()
            await ask(node, slow, "receive", box=NEWS)
            for number in range(MOST_LETTERS + 3):
                await ask(node, job(), "send", box=NEWS, body=number)
            found = await ask(node, slow, "receive", box=NEWS)
            assert (texts(found), found["missed"]) == ([3], 3)

    asyncio.run(main())


def test_ended_subscribers_make_room_for_new_ones(valkey: Valkey) -> None:
    """A topic has so many subscribers; those whose jobs ended, or are forgotten, do not keep others out."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node = nodes["n1"]
            store = Redis(unix_socket_path=str(valkey.socket))
            live = [job() for _ in range(63)]
            for who in live:
                await store.hset(Keys().job(who.job), "rf_state", "running")
                await ask(node, who, "receive", box=NEWS)
            await ask(node, job(), "receive", box=NEWS)
            last = job()
            await ask(node, last, "receive", box=NEWS)
            await store.hset(Keys().job(last.job), "rf_state", "running")
            code = await rig.refused(node.mail.entries(), job(), "mail.receive", box=NEWS)
            assert code is ErrorCode.QUOTA
            await ask(node, live[0], "receive", box=NEWS)
            for who in (*live, last):
                await store.delete(Keys().job(who.job))
            await store.aclose()

    asyncio.run(main())


def test_a_topic_gives_no_confirmation_and_answers_no_question(valkey: Valkey) -> None:
    """What nobody can promise is refused, not ignored."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            entries = nodes["n1"].mail.entries()
            for op in ("send", "ask"):
                code = await rig.refused(entries, job(), f"mail.{op}", box=NEWS, body=1, wait_s=1.0)
                assert code is ErrorCode.BAD_REQUEST

    asyncio.run(main())


@pytest.mark.parametrize("spoil", ["text", "last id", "gone", "hash"])
def test_a_spoilt_box_is_made_anew_and_no_call_hangs_or_fails_for_ever(valkey: Valkey, spoil: str) -> None:
    """Whoever can write the store can lose letters, not keep a box or the node's bell from working again."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2") as nodes:
            store = Redis(unix_socket_path=str(valkey.socket))
            ann, bob = job("desk"), job("desk")
            await ask(nodes["n1"], ann, "send", box="desk", body="lost")
            keys = Keys()
            for key in (
                keys.mail("main", "desk"),
                keys.box("main", "desk"),
                keys.dead("main", "desk"),
                keys.bell("n2"),
            ):
                await store.delete(key)
                if spoil == "text":
                    await store.set(key, "x", ex=60)
                elif spoil == "hash":
                    await store.hset(key, "bytes", "-1e99")
                    await store.expire(key, 60)
                elif spoil == "last id":
                    await store.xadd(key, {"kind": "box"}, id=f"{2**64 - 1}-{2**64 - 1}")
                    await store.expire(key, 60)
            # A letter that lies at the last id is none that a node signed; it is put away, or went with the stream.
            while (await ask(nodes["n2"], bob, "receive", box="desk"))["letters"]:
                pass
            waiting = asyncio.create_task(ask(nodes["n2"], bob, "receive", box="desk", wait_s=8))
            await await_until(lambda: nodes["n2"].mail._stirred, "the receiver to wait")
            await ask(nodes["n1"], ann, "send", box="desk", body="new")
            assert texts(await asyncio.wait_for(waiting, 8)) == ["new"]
            await store.aclose()

    asyncio.run(main())


def test_without_the_store_mail_is_unavailable_and_nobody_hangs() -> None:
    """A store that is away is an answer within its bound."""

    async def main() -> None:
        around = rig.around(Redis(unix_socket_path="/nonexistent/s", retry=Retry(NoBackoff(), 0)))
        talk = Talk.on(around)
        who = job("desk")
        for op, fields in (("send", {"body": 1}), ("receive", {"wait_s": 5.0})):
            code = await asyncio.wait_for(rig.refused(talk.mail.entries(), who, f"mail.{op}", box="desk", **fields), 5)
            assert code is ErrorCode.UNAVAILABLE
        with pytest.raises(CallError):
            await rig.ask(talk.signals.entries(), who, "signal.send", signal="TERM", job=ids.new_job_id("main"))

    asyncio.run(main())
