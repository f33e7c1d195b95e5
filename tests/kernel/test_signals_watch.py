"""What a service job sees of others: only what it watches, only what nodes signed, bounded."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.records import Signed
from runner.wire import codec, ids
from runner.wire.calls import MAX_CALL_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.event import EventType
from runner.wire.keys import Keys
from tests.agent import build
from tests.kernel import rig
from tests.kernel.post import Fleet, Node, fleet
from tests.support.valkey import Valkey
from tests.support.wait import await_until

Answer = dict[str, Json]


async def watch(node: Node, who: Caller, **fields: object) -> tuple[list[Answer], str]:
    """One look: the events, and where the next one goes on."""
    found = cast("Answer", await rig.ask(node.watch.entries(), who, "job.watch", **fields))
    return cast("list[Answer]", found["events"]), str(found["after"])


def ended(node: Node, job: str, state: str = "finished") -> Signed:
    """The end of a job, as a node signs it."""
    return node.around.notary.event(EventType.JOB_ENDED, job=job, attempt=1, detail={"state": state, "secret": "x"})


async def put(store: Redis, event: bytes, signature: str) -> None:
    """Add an event to the tenant's stream."""
    key = Keys().events("main")
    await store.xadd(key, {"event": event, "sig": signature})
    await store.expire(key, 60)


async def refusal(call: asyncio.Task[tuple[list[Answer], str]]) -> ErrorCode:
    """Why a call was refused."""
    with pytest.raises(CallError) as caught:
        await call
    return caught.value.error


def test_a_service_job_sees_what_it_watches_as_nodes_signed_it(valkey: Valkey) -> None:
    """Others' jobs, other tenants', forged and unreadable events are not told, nor what a detail need not say."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", "n2", known=known, n2=("other",)) as nodes:
            node, store = nodes["n1"], Redis(unix_socket_path=str(valkey.socket))
            mine, stranger = build.job(tags={"team": "a"}), build.job(tags={"team": "b"})
            far = build.job(id=ids.new_job_id("other"), tenant="other", tags={"team": "a"})
            known.jobs |= {spec.id: spec for spec in (mine, stranger, far)}
            guard = rig.caller(watch=("tag:team=a",))
            assert (await watch(node, guard))[0] == []
            _, after = await watch(node, guard)
            good = ended(node, mine.id)
            for event in (ended(node, stranger.id), ended(node, far.id), ended(node, "nobody")):
                await put(store, event.payload, event.signature)
            await put(store, good.payload, ended(node, mine.id, "failed").signature)
            wrong = ended(nodes["n2"], mine.id)
            await put(store, wrong.payload, wrong.signature)
            await put(store, b"{}", "")
            await put(store, b"\xff", good.signature)
            await put(
                store, codec.dump({"type": "job.queued", "job": mine.id, "attempt": 0, "at_ms": 7, "lane": "l"}), ""
            )
            await put(store, good.payload, good.signature)
            events, after = await watch(node, guard, after=after)
            assert [(one["type"], one["signed"]) for one in events] == [("job.queued", False), ("job.ended", True)]
            assert (events[1]["job"], events[1]["state"], events[1]["node"]) == (mine.id, "finished", "n1")
            assert "secret" not in events[1]
            assert await watch(node, guard, after=after) == ([], after)
            await store.aclose()

    asyncio.run(main())


def test_a_watcher_waits_for_news_and_hears_them_soon(valkey: Valkey) -> None:
    """A look that waits answers with the first event, not with the end of its time."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", known=known) as nodes:
            node, store = nodes["n1"], Redis(unix_socket_path=str(valkey.socket))
            spec = build.job()
            known.jobs[spec.id] = spec
            guard = rig.caller(watch=("all",))
            # From here on: a watcher that has not yet found where the news end would take the first one for old.
            _, after = await watch(node, guard)
            waiting = asyncio.create_task(watch(node, guard, after=after, wait_s=10))
            await await_until(lambda: node.watch._waiting, "the watcher to wait")
            event = ended(node, spec.id)
            await put(store, event.payload, event.signature)
            events, _ = await asyncio.wait_for(waiting, 3)
            assert [one["job"] for one in events] == [spec.id]
            await store.aclose()

    asyncio.run(main())


def test_an_answer_fits_one_record_whatever_the_events_hold(valkey: Valkey) -> None:
    """Many events with long and odd texts are told in several answers, none too large to be sent."""

    async def main() -> None:
        known = Fleet()
        async with fleet(valkey, "n1", known=known) as nodes:
            node, store = nodes["n1"], Redis(unix_socket_path=str(valkey.socket))
            spec, guard = build.job(), rig.caller(watch=("all",))
            known.jobs[spec.id] = spec
            _, after = await watch(node, guard)
            detail: dict[str, str | int | float | bool] = dict.fromkeys(("by", "reason"), "\0\U0001f511" * 500)
            event = node.around.notary.event(EventType.JOB_PAUSED, job=spec.id, attempt=1, detail=detail)
            for _ in range(40):
                await put(store, event.payload, event.signature)
            count = 0
            while (found := await watch(node, guard, after=after))[0]:
                events, after = found
                assert len(codec.dump(events)) < MAX_CALL_BYTES - 4096
                count += len(events)
            assert count == 40
            await store.aclose()

    asyncio.run(main())


def test_watching_is_granted_and_bounded(valkey: Valkey) -> None:
    """Without the grant nothing is told; odd places and times, and too many watchers of one job, are refused."""

    async def main() -> None:
        async with fleet(valkey, "n1") as nodes:
            node, guard = nodes["n1"], rig.caller(watch=("all",))
            entries = node.watch.entries()
            assert await rig.refused(entries, rig.caller(), "job.watch") is ErrorCode.DENIED
            for fields in ({"after": "x"}, {"after": "1"}, {"after": "1-2-3"}, {"after": "\u0661-1"}, {"wait_s": 61.0}):
                assert await rig.refused(entries, guard, "job.watch", **fields) is ErrorCode.BAD_REQUEST
            waiting = [asyncio.create_task(watch(node, guard, wait_s=10)) for _ in range(2)]
            await await_until(lambda: node.watch._waiting.get(guard.attempt) == 2, "both to wait")
            assert await rig.refused(entries, guard, "job.watch") is ErrorCode.QUOTA
            node.watch.ended(guard)
            assert [await refusal(one) for one in waiting] == [ErrorCode.ENDED] * 2
            assert (await watch(node, guard))[0] == []

    asyncio.run(main())
