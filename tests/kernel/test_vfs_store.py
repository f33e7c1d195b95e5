"""files.lua by itself: what the store refuses whatever a node believes, and what it counts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest
import redis as sync_redis
from redis.asyncio import Redis

from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs.index import Change, Index, Store, Where
from node_agent.kernel.vfs.nodes import ENTRY_BYTES, Bounds
from runner.wire.calls import ErrorCode
from runner.wire.keys import Keys
from tests.kernel.disks import passed
from tests.support.valkey import Valkey

BOUNDS = Bounds(8192, 1024, 8, 1 << 20)
SHARED = Where("rf:mem:main:ann", "rf:memdata:main:ann", "main-job", 600, BOUNDS, depth=1)


def on_store(valkey: Valkey, work: Callable[[Store], Awaitable[None]]) -> None:
    """Run ``work`` with a store of its own."""

    async def main() -> None:
        redis = Redis(unix_socket_path=str(valkey.socket))
        try:
            await work(Store(redis, Keys()))
        finally:
            await redis.aclose()

    asyncio.run(main())


async def refused(store: Store, *changes: Change, where: Where = SHARED) -> ErrorCode:
    """Make a change that must be refused; return why."""
    with pytest.raises(CallError) as caught:
        await store.change(where, changes)
    return caught.value.error


def put(path: str, data: bytes = b"1", base: int = 0, ttl_ms: int = 0) -> Change:
    """A put below /episodic."""
    return Change("put", ("episodic", *path.split("/")), base, data, ttl_ms)


def at(path: str) -> tuple[str, ...]:
    """A path below /episodic."""
    return ("episodic", *path.split("/"))


async def loaded(store: Store, where: Where = SHARED) -> Index:
    """The whole index."""
    found = await store.load(where, -1)
    assert found is not None
    return Index(found.version, found.entries())


def test_every_change_is_judged_by_the_version_that_was_seen(valkey: Valkey) -> None:
    """put, del and mov with an older version, or with none where there is one, change nothing."""

    async def work(store: Store) -> None:
        first = (await store.change(SHARED, [put("a"), put("b")])).version
        newer = (await store.change(SHARED, [put("a", b"2", first)])).version
        assert await refused(store, put("a", b"3", first)) is ErrorCode.CONFLICT
        assert await refused(store, put("a", b"3")) is ErrorCode.CONFLICT
        assert await refused(store, Change("del", at("a"), first)) is ErrorCode.CONFLICT
        assert await refused(store, Change("mov", at("a"), first, to=at("c"))) is ErrorCode.CONFLICT
        assert await refused(store, Change("mov", at("a"), newer, to=at("b"))) is ErrorCode.CONFLICT
        assert await refused(store, Change("mov", at("a"), newer, to=at("b"), over=newer)) is ErrorCode.CONFLICT
        assert await refused(store, put("c", b"3", first)) is ErrorCode.CONFLICT
        assert await refused(store, Change("add", at("c"), first, b"x")) is ErrorCode.CONFLICT
        assert await refused(store, put("new"), put("a", b"3", first)) is ErrorCode.CONFLICT
        index = await loaded(store)
        assert (index.version, set(index.entries)) == (newer, {at("a"), at("b")})
        assert await store.content(SHARED, at("a")) == b"2"

    on_store(valkey, work)


def test_names_have_their_directories(valkey: Valkey) -> None:
    """Nothing is made or moved to where there is no directory, and a full one is neither removed nor replaced."""

    async def work(store: Store) -> None:
        for change in (put("d/x"), Change("dir", at("d/e"))):
            assert await refused(store, change) is ErrorCode.NOT_FOUND
        first = (await store.change(SHARED, [Change("dir", at("d")), Change("dir", at("e")), put("f")])).version
        inside = (await store.change(SHARED, [put("d/x")])).version
        assert await refused(store, put("f/x")) is ErrorCode.NOT_FOUND
        assert await refused(store, put("d", base=first)) is ErrorCode.EXISTS
        assert await refused(store, Change("dir", at("d"))) is ErrorCode.EXISTS
        assert await refused(store, Change("del", at("d"), first)) is ErrorCode.NOT_EMPTY
        assert await refused(store, Change("mov", at("e"), first, to=at("d"), over=first)) is ErrorCode.NOT_EMPTY
        assert await refused(store, Change("mov", at("f"), first, to=at("n/f"))) is ErrorCode.NOT_FOUND
        assert await refused(store, Change("mov", at("n"), first, to=at("m"))) is ErrorCode.NOT_FOUND
        assert await refused(store, Change("del", at("n"), first)) is ErrorCode.NOT_FOUND
        await store.change(SHARED, [Change("mov", at("d"), first, to=at("e"), over=first)])
        await store.change(SHARED, [Change("mov", at("f"), first, to=at("e/x"), over=inside)])
        index = await loaded(store)
        assert {path: entry.size for path, entry in index.entries.items()} == {at("e"): 0, at("e/x"): 1}

    on_store(valkey, work)


def test_what_a_rename_replaces_leaves_nothing_behind(valkey: Valkey, valkey_keeper: sync_redis.Redis) -> None:
    """The old content goes, also where the new file is empty, and the counts are those of what is left."""

    async def work(store: Store) -> None:
        first = (await store.change(SHARED, [put("a", b"old" * 100), put("b", b"")])).version
        valkey_keeper.hdel(SHARED.contents, "/episodic/b")
        await store.change(SHARED, [Change("mov", at("b"), first, to=at("a"), over=first)])
        assert not await store.content(SHARED, at("a"))
        counts = valkey_keeper.hmget(SHARED.index, ".bytes", ".entries")
        assert counts == [str(ENTRY_BYTES).encode(), b"1"]

    on_store(valkey, work)


def test_the_store_counts_for_itself(valkey: Valkey, valkey_keeper: sync_redis.Redis) -> None:
    """Bytes, entries and a file's size are bounded, what has ended is not counted, and counts that were spoilt heal."""

    async def work(store: Store) -> None:
        assert await refused(store, put("a", bytes(1025))) is ErrorCode.TOO_LARGE
        first = (await store.change(SHARED, [put("a", bytes(1000))])).version
        assert await refused(store, Change("add", at("a"), first, bytes(25))) is ErrorCode.TOO_LARGE
        await store.change(SHARED, [put(f"n{number}", bytes(900), ttl_ms=30) for number in range(6)])
        assert await refused(store, put("b")) is ErrorCode.QUOTA
        await passed(valkey_keeper, 30)
        version = (await store.change(SHARED, [put("n0", bytes(1000))])).version
        assert set((await loaded(store)).entries) == {at("a"), at("n0")}
        assert await store.content(SHARED, at("n1")) is None
        more = [put(f"m{number}", bytes(1000)) for number in range(4)]
        await store.change(SHARED, more)
        assert await refused(store, put("x", bytes(1000))) is ErrorCode.QUOTA
        valkey_keeper.hset(SHARED.index, ".bytes", "999999")
        await store.change(SHARED, [put("n0", bytes(1001), version)])
        valkey_keeper.hset(SHARED.index, mapping={".bytes": "0", ".entries": "0"})
        await loaded(store)
        assert await refused(store, put("x", bytes(1000))) is ErrorCode.QUOTA
        few = dataclasses.replace(SHARED, index="rf:mem:main:bob", contents="rf:memdata:main:bob")
        few = dataclasses.replace(few, bounds=Bounds(1 << 20, 1024, 2, 1 << 20))
        await store.change(few, [put("a"), Change("dir", at("d"))])
        assert await refused(store, put("b"), where=few) is ErrorCode.QUOTA
        assert await refused(store, Change("dir", at("b")), where=few) is ErrorCode.QUOTA

    on_store(valkey, work)


def test_a_file_that_has_ended_is_none(valkey: Valkey, valkey_keeper: sync_redis.Redis) -> None:
    """Whoever changes it sees nothing there: it can be made anew, not appended to, moved or removed."""

    async def work(store: Store) -> None:
        done = await store.change(SHARED, [put("a", ttl_ms=20), put("b", ttl_ms=20), Change("dir", at("d"))])
        inside = await store.change(SHARED, [put("d/x", ttl_ms=20)])
        await passed(valkey_keeper, 20)
        assert await refused(store, Change("add", at("a"), done.version, b"x")) is ErrorCode.CONFLICT
        assert await refused(store, Change("mov", at("b"), done.version, to=at("c"))) is ErrorCode.NOT_FOUND
        assert await refused(store, Change("del", at("d/x"), inside.version)) is ErrorCode.NOT_FOUND
        await store.change(SHARED, [put("a", b"new"), Change("del", at("d"), done.version)])
        index = await loaded(store)
        assert (set(index.entries), index.entries[at("a")].ends_in_ms) == ({at("a")}, 0)

    on_store(valkey, work)


def test_only_the_newest_attempt_owns_a_state(valkey: Valkey) -> None:
    """An older attempt neither reads nor writes, and versions go on from attempt to attempt."""

    async def work(store: Store) -> None:
        keys = ("rf:state:main-j", "rf:statedata:main-j", "main-j", 600, BOUNDS)
        old, new = Where(*keys, fence=1), Where(*keys, fence=2)
        await store.load(old, -1)
        first = await store.change(old, [Change("put", ("a",), 0, b"1")])
        found = await store.load(new, -1)
        assert found is not None
        assert found.version == first.version
        assert await refused(store, Change("put", ("a",), first.version, b"2"), where=old) is ErrorCode.ENDED
        with pytest.raises(CallError):
            await store.load(old, -1)
        second = await store.change(new, [Change("put", ("a",), first.version, b"2")])
        assert second.version > first.version

    on_store(valkey, work)
