"""Attacks by one node that is not the fleet's any more: it has its own key and card, and can write the store."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

from redis.asyncio import Redis

from node_agent.kernel.bell import Ring
from node_agent.run import now_ms
from runner.wire import codec, ids
from runner.wire.calls import MAX_DATA_BYTES
from runner.wire.envelope import Domain
from runner.wire.event import EventType
from runner.wire.keys import Keys
from runner.wire.letters import Letter, Taken
from runner.wire.signals import Answer, Signal, SignalName
from tests.kernel import test_mail as mails
from tests.kernel import test_signals as signals
from tests.kernel.post import Fleet, Node, fleet, texts
from tests.kernel.test_signals_watch import put, watch
from tests.support.valkey import Valkey
from tests.support.wait import await_until

KEYS = Keys()


def test_a_node_confirms_no_letter_of_a_tenant_that_it_does_not_serve(valkey: Valkey) -> None:
    """It knows the letter's id, and signs a word of a tenant that it serves, or of another box."""

    async def main() -> None:
        async with fleet(valkey, "n1", "n2", n2=("other",)) as nodes:
            here, bad = nodes["n1"], nodes["n2"]
            ann = mails.job()
            sending = asyncio.create_task(mails.ask(here, ann, "send", box="desk", body=1, wait_s=0.5))
            await await_until(lambda: here.mail._confirms, "the sender to wait")
            (letter,) = here.mail._confirms
            spy, own = ids.new_job_id("other"), ids.new_job_id("main")
            for word in (
                Taken(letter, "other", "desk", spy, 1, "n2"),
                Taken(letter, "main", "desk", own, 1, "n2"),
                Taken(letter, "other", "desk", own, 1, "n2"),
            ):
                await bad.bell.ring("n1", "taken", *bad.seals.seal(word))
            await here.bell.ring("n1", "taken", *here.seals.seal(Taken(letter, "main", "else", own, 1, "n1")))
            assert (await sending)["confirmed"] is False

    asyncio.run(main())


def test_a_letter_lives_as_long_as_its_node_signed_and_comes_of_its_own_tenant(valkey: Valkey) -> None:
    """Put into the store again with another time, or signed in the name of another tenant's job: put away."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node, bob = nodes["n1"], mails.job()
            store: Any = Redis(unix_socket_path=str(valkey.socket))
            sender, far = ids.new_job_id("main"), ids.new_job_id("other")
            now = now_ms()
            old = Letter("a" * 32, "main", "desk", sender, 1, "n1", now - 400_000, now - 300_000, "old")
            good = dataclasses.replace(old, id="b" * 32, until_ms=now + 300_000, body="good")
            words = [node.seals.seal(letter) for letter in (old, good)]
            fields = cast("dict[str, Any]", codec.load(words[1][0], limit_bytes=MAX_DATA_BYTES))
            lie = codec.dump({**fields, "sender": far})
            words.insert(1, (lie, node.around.notary.signer.sign(Domain.MAIL, lie)))
            for data, signature in words:
                facts = {"letter": data, "sig": signature, "until": str(now + 300_000), "size": len(data)}
                await store.xadd(KEYS.mail("main", "desk"), facts)
            found = await mails.ask(node, bob, "receive", box="desk", count=8)
            assert texts(found) == ["good"]
            assert await store.xlen(KEYS.dead("main", "desk")) == 2
            await store.aclose()

    asyncio.run(main())


def test_attack_03_a_node_speaks_for_no_job_that_it_may_not_serve(valkey: Valkey) -> None:
    """A node of the tenant signs KILL in the name of a job that is pinned to another node."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", "n2", "n3", known=known) as nodes:
            guard, _ = signals.start(nodes["n1"], watch=("all",))
            who, tree = signals.start(nodes["n2"])
            known.jobs |= {guard.job: dataclasses.replace(guard.spec, node="n1"), who.job: who.spec}
            words = [
                (nodes[name], Signal(ids.new_nonce(), "main", SignalName.USR1, who.job, guard.job, 1, name, now_ms()))
                for name in ("n3", "n1")
            ]
            for node, word in words:
                await node.bell.ring("n2", "signal", *node.seals.seal(word))
            await await_until(lambda: tree.done, "the one of its own node")
            await await_until(lambda: not nodes["n2"].signals._road._tasks, "both")
            assert tree.done == ["SIGUSR1"]

    asyncio.run(main())


def test_attack_03_an_answer_of_a_node_of_another_tenant_is_none(valkey: Valkey) -> None:
    """The store says that such a node holds the job: its word that the signal was applied is not passed on."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", "n2", known=known, n2=("other",)) as nodes:
            here, bad = nodes["n1"], nodes["n2"]
            guard, _ = signals.start(here, watch=("all",))
            who = mails.job()
            known.jobs |= {one.job: one.spec for one in (guard, who)}
            tasks: list[asyncio.Task[None]] = []

            def answer(ring: Ring) -> None:
                asked = cast("dict[str, str]", codec.load(ring["word"]))
                word = Answer(asked["id"], "other", who.job, "applied", "n2")
                tasks.append(asyncio.create_task(bad.bell.ring("n1", "answer", *bad.seals.seal(word))))

            bad.bell.on("signal", answer)
            store: Any = Redis(unix_socket_path=str(valkey.socket))
            await store.hset(KEYS.job(who.job), mapping={"rf_state": "running", "rf_claim": "n2/boot/1"})
            await store.expire(KEYS.job(who.job), 60)
            assert await signals.outcome(here, guard, "USR1", job=who.job) == "queued"
            assert tasks
            await store.aclose()

    asyncio.run(main())


def test_attack_03_a_node_tells_of_no_job_that_it_may_not_serve(valkey: Valkey) -> None:
    """Watchers hear the end of a pinned job from its node; that it was lost, from any that serves the queue."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", "n2", known=known) as nodes:
            store: Any = Redis(unix_socket_path=str(valkey.socket))
            guard, _ = signals.start(nodes["n1"], watch=("all",))
            who, _ = signals.start(nodes["n1"])
            known.jobs |= {who.job: dataclasses.replace(who.spec, node="n1")}
            for name, state in (("n2", "finished"), ("n1", "failed"), ("n2", "lost")):
                event = _end(nodes[name], who.job, state)
                await put(store, *event)
            events, _ = await watch(nodes["n1"], guard, after="0-0")
            assert [(one["node"], one["state"]) for one in events] == [("n1", "failed"), ("n2", "lost")]
            await store.aclose()

    asyncio.run(main())


def _end(node: Node, job: str, state: str) -> tuple[bytes, str]:
    event = node.around.notary.event(EventType.JOB_ENDED, job=job, attempt=1, detail={"state": state})
    return event.payload, event.signature
