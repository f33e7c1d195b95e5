"""Kept files when something is wrong: no answer from the store, nonsense in it, too much at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any, cast

import pytest
import redis as sync_redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.table import Entry
from node_agent.kernel.vfs import volume
from runner.wire import codec
from runner.wire.calls import MAX_CALL_BYTES, ErrorCode
from runner.wire.errors import RecordError
from runner.wire.keys import Keys
from tests.kernel.disks import Disk, disk, job, memory
from tests.support.valkey import Valkey

S, M = "/state", "/mem/semantic"
STATE = 1 << 20


def test_without_the_store_calls_are_answered_in_time_and_a_close_can_be_repeated(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that does not answer costs `unavailable`, in time; nothing written is lost, nothing is there twice."""
    monkeypatch.setattr(volume, "WAIT_S", 0.2)

    async def main() -> None:
        redis = Redis(unix_socket_path=str(valkey.socket))
        pauser = valkey.client()
        one = Disk(redis)
        try:
            ann = job(agent="ann", state_bytes=STATE)
            await one.put(ann, f"{M}/log", b"0\n")
            fd = await one.open(ann, f"{M}/log", "append")
            await one.ask(ann, "write", fd=fd, data=b"1\n")
            pauser.client_pause(600)
            assert await one.refused(ann, "close", fd=fd) is ErrorCode.UNAVAILABLE
            assert await one.refused(ann, "put", path=f"{S}/a", data=b"") is ErrorCode.UNAVAILABLE
            await one.put(ann, "/mem/working/a", b"no store needed")
            pauser.ping()
            await one.ask(ann, "write", fd=fd, data=b"2\n")
            await one.ask(ann, "close", fd=fd)
            assert await one.get(ann, f"{M}/log") == b"0\n1\n2\n"
            await one.put(ann, f"{S}/a", b"1")
        finally:
            pauser.close()
            await redis.aclose()

    asyncio.run(main())


def test_a_change_whose_answer_was_lost_is_not_made_twice(valkey: Valkey) -> None:
    """The store carried an append out, the answer got lost: asked again, it is there once, and the rest follows."""

    async def main() -> None:
        async with disk(valkey) as one:
            ann = job(agent="ann")
            await one.put(ann, f"{M}/log", b"0\n")
            fd = await one.open(ann, f"{M}/log", "append")
            await one.ask(ann, "write", fd=fd, data=b"1\n")
            real = one.files._store.change

            async def deaf(*words: object) -> object:
                await real(*words)  # type: ignore[arg-type] # what it was called with
                raise TimeoutError

            one.files._store.change = deaf  # type: ignore[method-assign, assignment]  # a faulty store
            assert await one.refused(ann, "close", fd=fd) is ErrorCode.UNAVAILABLE
            one.files._store.change = real  # type: ignore[method-assign]  # a faulty store
            await one.ask(ann, "write", fd=fd, data=b"2\n")
            await one.ask(ann, "close", fd=fd)
            assert await one.get(ann, f"{M}/log") == b"0\n1\n2\n"

    asyncio.run(main())


def test_after_a_lost_answer_what_came_since_is_not_taken_for_sent(valkey: Valkey) -> None:
    """Carried out without an answer, then not carried out at all: the third try adds what is missing and no more."""

    async def main() -> None:
        async with disk(valkey) as one:
            ann = job(agent="ann")
            await one.put(ann, f"{M}/log", b"0\n")
            fd = await one.open(ann, f"{M}/log", "append")
            real = one.files._store.change

            async def late(*words: object) -> object:
                await real(*words)  # type: ignore[arg-type] # what it was called with
                raise TimeoutError

            async def never(*_: object) -> object:
                raise TimeoutError

            for number, broken in ((1, late), (2, never)):
                await one.ask(ann, "write", fd=fd, data=f"{number}\n".encode())
                one.files._store.change = broken  # type: ignore[method-assign, assignment]  # a faulty store
                assert await one.refused(ann, "sync", fd=fd) is ErrorCode.UNAVAILABLE
            one.files._store.change = real  # type: ignore[method-assign]  # a faulty store
            await one.ask(ann, "close", fd=fd)
            assert await one.get(ann, f"{M}/log") == b"0\n1\n2\n"

    asyncio.run(main())


def test_nonsense_in_the_store_is_no_file_and_stops_nothing(valkey: Valkey, valkey_keeper: sync_redis.Redis) -> None:
    """Whoever may write the store can spoil an index: what is none is passed over, other types are replaced."""

    async def main() -> None:
        async with disk(valkey) as one:
            who = job(state_bytes=STATE)
            keys = Keys()
            valkey_keeper.hset(
                keys.state(who.job), mapping={"/a": "f x", "/b/c": "d 1 0 0 0 - j", b"/\xff": b"\xff", "q": ""}
            )
            valkey_keeper.hset(keys.state(who.job), mapping={".fence": "-", ".version": "x", ".bytes": "1e99"})
            valkey_keeper.set(keys.state_data(who.job), "a text")
            assert await one.names(who, S) == []
            await one.put(who, f"{S}/a", b"1")
            assert await one.get(who, f"{S}/a") == b"1"

    asyncio.run(main())


def test_a_store_that_lost_everything_is_told_and_begun_anew(valkey: Valkey, valkey_keeper: sync_redis.Redis) -> None:
    """After the store was emptied an attempt is told once, then its state is what the store has: nothing."""

    async def main() -> None:
        async with disk(valkey) as one:
            who = job(state_bytes=STATE)
            await one.put(who, f"{S}/a", b"1")
            valkey_keeper.flushall()
            assert await one.refused(who, "put", path=f"{S}/b", data=b"") is ErrorCode.UNAVAILABLE
            await one.put(who, f"{S}/b", b"2")
            assert await one.names(who, S) == ["b"]

    asyncio.run(main())


def test_a_flood_of_kept_changes_is_slowed_down(valkey: Valkey) -> None:
    """A job that publishes without a pause is told to wait; an open file is still open then, and closes later."""

    async def main() -> None:
        async with disk(valkey) as one:
            who = job(state_bytes=STATE)
            fd = await one.open(who, f"{S}/a", "write", "create")
            await one.ask(who, "write", fd=fd, data=b"1")
            assert await _until_slow(one, who) is ErrorCode.SLOW_DOWN
            assert await one.refused(who, "close", fd=fd) is ErrorCode.SLOW_DOWN
            one.now_s += 1
            await one.ask(who, "close", fd=fd)

    asyncio.run(main())


def test_looks_into_the_store_are_bounded(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that only looks has neither the store nor the agent for itself."""
    monkeypatch.setattr(volume, "_LOOKS", (200.0, 20.0))

    async def main() -> None:
        async with disk(valkey) as one:
            ann = job(agent="ann")
            for _ in range(20):
                await one.names(ann, M)
            assert await one.refused(ann, "list", path=M) is ErrorCode.SLOW_DOWN
            one.now_s += 0.01
            await one.names(ann, M)

    asyncio.run(main())


def test_what_others_change_costs_the_agent_a_bounded_time(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose files another one changes all the time is slowed down, not the jobs beside it."""
    monkeypatch.setattr(volume, "_LOOKS", (1e6, 1e6))
    monkeypatch.setattr(volume, "_WORK", (0.05, 0.002))

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            ann, bob = job(agent="ann"), job(agent="ann")
            code = None
            for number in range(200):
                one.now_s += 1
                await one.put(ann, f"{M}/{number % 50}", b"")
                if (code := await _refusal(two, bob)) is not None:
                    break
            assert code is ErrorCode.SLOW_DOWN
            two.now_s += 1
            await two.names(bob, M)

    asyncio.run(main())


def test_renames_of_full_directories_have_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that renames what holds much, again and again, is slowed down; everything else goes on."""
    monkeypatch.setattr(volume, "_WORK", (0.05, 0.002))

    async def main() -> None:
        node, who = memory(), job()
        await node.ask(who, "mkdir", path="/mem/working/d0")
        for number in range(100):
            await node.ask(who, "mkdir", path=f"/mem/working/d0/{number}")
        code, number = None, 0
        while code is None and number < 200:
            try:
                await node.ask(who, "rename", path=f"/mem/working/d{number}", to=f"/mem/working/d{number + 1}")
                number += 1
            except CallError as error:
                code = error.error
        assert code is ErrorCode.SLOW_DOWN
        await node.put(who, "/mem/working/a", b"1")
        node.now_s += 1
        await node.ask(who, "rename", path=f"/mem/working/d{number}", to="/mem/working/e")

    asyncio.run(main())


async def _refusal(node: Disk, who: Caller) -> ErrorCode | None:
    try:
        await node.names(who, M)
    except CallError as error:
        return error.error
    return None


async def _until_slow(one: Disk, who: Caller) -> ErrorCode:
    for _ in range(300):
        try:
            await one.put(who, f"{S}/x", b"1")
        except CallError as error:
            return error.error
    return ErrorCode.FAULT


VALUES: dict[str, st.SearchStrategy[object]] = {
    "str": st.sampled_from(("/state/a", "/mem/working/a", "/mem", "/", "", "/tools/x", "YQ==", "start", ".."))
    | st.text(max_size=20),
    "int": st.sampled_from((0, 1, -1, 63, 2**31, 2**53, 2**63 - 1, -(2**63))) | st.integers(-3, 70),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "tuple": st.lists(st.sampled_from(("read", "write", "append", "create", "excl", "truncate")), max_size=6),
}


def test_whatever_the_fields_hold_a_call_is_answered_or_refused(valkey: Valkey) -> None:
    """No value of any field of any call is a fault of the node; what is answered fits into a record."""
    loop = asyncio.new_event_loop()
    redis = Redis(unix_socket_path=str(valkey.socket))
    node, who = Disk(redis), job(state_bytes=1 << 16, agent="ann", tools=("x",))
    try:

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(entry=st.sampled_from(node.files.entries()), data=st.data())
        def calls(entry: Entry, data: st.DataObject) -> None:
            node.now_s += 1
            fields = {}
            for one in dataclasses.fields(cast("Any", entry.ask)):
                kind = next(name for name in ("tuple", "bool", "float", "int", "str") if name in str(one.type) + "str")
                if one.default is dataclasses.MISSING or data.draw(st.booleans()):
                    fields[one.name] = data.draw(VALUES[kind])
            with contextlib.suppress(CallError, RecordError):
                answer = loop.run_until_complete(node.ask(who, entry.op.partition(".")[2], **fields))
                assert codec.load(codec.dump(answer), limit_bytes=MAX_CALL_BYTES) == answer

        calls()
    finally:
        loop.run_until_complete(redis.aclose())
        loop.close()
