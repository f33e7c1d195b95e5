"""Files that the store keeps: /state over attempts and nodes, an agent's memory between jobs (rows V4, V5)."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import AsyncExitStack
from typing import cast

import pytest
import redis as sync_redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs.nodes import ENTRY_BYTES
from runner.wire.calls import ErrorCode
from runner.wire.keys import Keys
from tests.kernel import rig
from tests.kernel.disks import Disk, disk, job, passed
from tests.support.valkey import Valkey

S, M = "/state", "/mem/semantic"
STATE = 1 << 20


def test_row_v5_state_follows_the_job_to_another_node(valkey: Valkey) -> None:
    """What was closed, synced or put is there for the next attempt on another node, and nothing half of the rest."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            who = job(state_bytes=STATE)
            await one.ask(who, "mkdir", path=f"{S}/d")
            fd = await one.open(who, f"{S}/d/a", "write", "create")
            await one.ask(who, "write", fd=fd, data=b"closed")
            await one.ask(who, "close", fd=fd)
            fd = await one.open(who, f"{S}/d/b", "write", "create")
            await one.ask(who, "write", fd=fd, data=b"synced")
            await one.ask(who, "sync", fd=fd)
            await one.ask(who, "write", fd=fd, data=b" and lost")
            lost = await one.open(who, f"{S}/lost", "write", "create")
            await one.ask(who, "write", fd=lost, data=b"x")
            await one.put(who, f"{S}/c", b"put")
            assert await one.get(rig.again(who), f"{S}/d/b") == b"synced and lost"
            later = job(2, like=who)
            assert await two.names(later, S) == ["c", "d"]
            contents = [await two.get(later, f"{S}/{name}") for name in ("c", "d/a", "d/b")]
            assert contents == [b"put", b"closed", b"synced"]

    asyncio.run(main())


def test_row_v5_a_late_write_of_an_older_attempt_is_refused(valkey: Valkey) -> None:
    """Once the next attempt has looked, the older one changes nothing more: by no op, and with no open descriptor."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            who = job(state_bytes=STATE)
            await one.put(who, f"{S}/a", b"1")
            fd = await one.open(who, f"{S}/a", "append")
            await one.ask(who, "write", fd=fd, data=b"late")
            later = job(2, like=who)
            assert await two.get(later, f"{S}/a") == b"1"
            assert await one.refused(who, "close", fd=fd) is ErrorCode.ENDED
            for op, fields in (
                ("put", {"data": b"late"}),
                ("remove", {}),
                ("rename", {"to": f"{S}/b"}),
            ):
                assert await one.refused(who, op, path=f"{S}/a", **fields) is ErrorCode.ENDED
            assert await one.refused(who, "mkdir", path=f"{S}/d") is ErrorCode.ENDED
            assert await one.refused(job(1, like=who), "get", path=f"{S}/a") is ErrorCode.ENDED
            await two.put(later, f"{S}/a", b"2")
            assert (await two.names(later, S), await two.get(later, f"{S}/a")) == (["a"], b"2")

    asyncio.run(main())


def test_row_v5_what_the_store_keeps_outlives_the_agent_and_ends_in_time(
    valkey: Valkey, valkey_keeper: sync_redis.Redis
) -> None:
    """Both trees are in the store with a time to live, below their tenant, and under no other key."""

    async def main() -> None:
        async with disk(valkey) as one:
            who = job(state_bytes=STATE, agent="ann", tenant="acme")
            await one.put(who, f"{S}/a", b"1")
            await one.put(who, f"{M}/a", b"1")
            keys = Keys()
            wanted = {keys.state(who.job), keys.state_data(who.job)}
            wanted |= {keys.memory("acme", "ann"), keys.memory_data("acme", "ann")}
            found = {str(key, "ascii") for key in cast("list[bytes]", valkey_keeper.keys("*"))}
            assert found == wanted
            assert all(valkey_keeper.ttl(key) > 7 * 86_400 - 60 for key in found)
            assert valkey_keeper.ttl(keys.memory_data("acme", "ann")) <= 90 * 86_400

    asyncio.run(main())


def test_row_v4_the_quota_of_state_is_the_grant(valkey: Valkey) -> None:
    """What is over state_bytes is refused on the node at once, and by the store whatever a node believes."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            who = job(state_bytes=2048)
            await one.put(who, f"{S}/a", bytes(1700))
            assert await one.refused(who, "put", path=f"{S}/b", data=b"") is ErrorCode.QUOTA
            fd = await one.open(who, f"{S}/a", "append")
            assert await one.refused(who, "write", fd=fd, data=bytes(100)) is ErrorCode.QUOTA
            await one.ask(who, "write", fd=fd, data=bytes(92))
            await one.ask(who, "close", fd=fd)
            ann, bob = (job(agent="ann") for _ in range(2))
            for name in "abcdefghijklmno":
                await one.put(ann, f"{M}/{name}", b"")
                fd = await one.open(ann, f"{M}/{name}", "write")
                await one.ask(ann, "truncate", fd=fd, size=1 << 20)
                one.now_s += 1
                await one.ask(ann, "close", fd=fd)
            await two.names(bob, M)
            fds = [await two.open(bob, f"{M}/p", "write", "create"), await two.open(bob, f"{M}/q", "write", "create")]
            await two.ask(bob, "truncate", fd=fds[0], size=900_000)
            await one.put(ann, f"{M}/z", b"")
            fd = await one.open(ann, f"{M}/z", "write")
            await one.ask(ann, "truncate", fd=fd, size=900_000)
            await one.ask(ann, "close", fd=fd)
            assert await two.refused(bob, "close", fd=fds[0]) is ErrorCode.QUOTA
            assert "p" not in await two.names(bob, M)

    asyncio.run(main())


def test_row_v4_kept_files_end_by_the_stores_clock(valkey: Valkey, valkey_keeper: sync_redis.Redis) -> None:
    """A file with a time ends for the attempt that has it, for the next one, and in the store."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            who = job(state_bytes=STATE)
            await one.put(who, f"{S}/short", b"1", ttl_s=0.05)
            await one.put(who, f"{S}/long", b"1", ttl_s=600)
            two.now_s = 1e6
            later = job(2, like=who)
            await passed(valkey_keeper, 50)
            assert await two.names(later, S) == ["long"]
            left = (await two.ask(later, "stat", path=f"{S}/long"))["expires_in_s"]
            assert isinstance(left, float)
            assert 590 < left <= 600
            assert valkey_keeper.hkeys(Keys().state_data(who.job)) == [b"/long"]
            two.now_s += 600
            assert await two.names(later, S) == []

    asyncio.run(main())


def test_row_v4_an_agents_memory_belongs_to_its_name_and_tenant(valkey: Valkey) -> None:
    """Jobs that hold the name share it on all nodes; another name or tenant sees nothing of it."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            ann, also = job(agent="ann"), job(agent="ann")
            await one.ask(ann, "mkdir", path="/mem/episodic/day")
            await one.put(ann, "/mem/episodic/day/log", b"1")
            assert await two.get(also, "/mem/episodic/day/log") == b"1"
            assert (await two.ask(also, "stat", path="/mem/episodic/day/log"))["owner"] == ann.job
            await two.ask(also, "rename", path="/mem/episodic/day", to="/mem/semantic/day")
            assert await one.names(ann, "/mem/episodic") == []
            assert await one.get(ann, "/mem/semantic/day/log") == b"1"
            for stranger in (job(agent="bob"), job(agent="ann", tenant="acme")):
                assert await one.names(stranger, "/mem/semantic") == []
            for root in ("/mem/episodic", "/mem/semantic"):
                assert await one.refused(ann, "remove", path=root, directory=True) is ErrorCode.READ_ONLY
            assert await one.refused(ann, "rename", path="/mem/semantic", to="/mem/episodic/x") is ErrorCode.READ_ONLY

    asyncio.run(main())


def test_who_saw_an_older_version_changes_nothing(valkey: Valkey) -> None:
    """Two nodes that write, remove or rename one file: the second is told of the conflict, by every way."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            ann, bob = job(agent="ann"), job(agent="ann")
            first = await one.put(ann, f"{M}/a", b"1")
            fd = await two.open(bob, f"{M}/a", "read", "write")
            await two.ask(bob, "write", fd=fd, data=b"bob")
            await one.put(ann, f"{M}/a", b"ann", if_version=first["version"])
            assert await two.refused(bob, "close", fd=fd) is ErrorCode.CONFLICT
            assert await two.refused(bob, "close", fd=fd) is ErrorCode.BAD_DESCRIPTOR
            assert await two.get(bob, f"{M}/a") == b"ann"
            assert (
                await two.refused(bob, "put", path=f"{M}/a", data=b"", if_version=first["version"])
                is ErrorCode.CONFLICT
            )
            assert await two.refused(bob, "put", path=f"{M}/a", data=b"", if_version=0) is ErrorCode.CONFLICT
            fd = await two.open(bob, f"{M}/a", "read", "write")
            await two.ask(bob, "write", fd=fd, data=b"bob")
            await one.ask(ann, "remove", path=f"{M}/a")
            assert await two.names(bob, M) == []
            assert await two.refused(bob, "close", fd=fd) is ErrorCode.CONFLICT
            new = await two.open(bob, f"{M}/n", "write", "create")
            await one.put(ann, f"{M}/n", b"ann's")
            await two.ask(bob, "write", fd=new, data=b"bob's")
            assert await two.refused(bob, "close", fd=new) is ErrorCode.CONFLICT
            assert await two.get(bob, f"{M}/n") == b"ann's"

    asyncio.run(main())


def test_only_one_makes_an_exclusive_file(valkey: Valkey) -> None:
    """Of many nodes that open with excl at the same moment, one makes the file and all others are told."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(disk(valkey)) for _ in range(4)]

            async def make(node: Disk) -> str:
                who = job(agent="ann")
                try:
                    await node.open(who, f"{M}/lock", "write", "create", "excl")
                except CallError as error:
                    return error.error.value
                return "made"

            got = sorted(await asyncio.gather(*(make(node) for node in nodes)))
            assert got.count("made") == 1
            assert set(got) <= {"made", "exists", "conflict"}

    asyncio.run(main())


def test_appends_from_two_nodes_are_all_kept_each_in_one_piece(valkey: Valkey) -> None:
    """Appends never conflict and never mix, by put and by descriptor, whoever appended in between."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            ann, bob = job(agent="ann"), job(agent="ann")
            await one.put(ann, f"{M}/log", b"0\n")
            fd = await two.open(bob, f"{M}/log", "append")
            for number in range(5):
                await two.ask(bob, "write", fd=fd, data=f"b{number}\n".encode())
                await two.ask(bob, "sync", fd=fd)
                await one.put(ann, f"{M}/log", f"a{number}\n".encode(), append=True)
            await two.ask(bob, "write", fd=fd, data=b"b-end\n")
            await two.ask(bob, "close", fd=fd)
            wanted = ["0"] + [f"{who}{number}" for number in range(5) for who in "ba"] + ["b-end"]
            assert (await one.get(ann, f"{M}/log")).decode().split() == wanted

    asyncio.run(main())


def test_a_sync_of_a_path_publishes_all_or_nothing(valkey: Valkey) -> None:
    """Files that were changed together are there together for the next attempt, or none of them."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            who = job(state_bytes=4096)
            fds = [await one.open(who, f"{S}/{name}", "write", "create") for name in "ab"]
            for fd in fds:
                await one.ask(who, "write", fd=fd, data=b"1")
            assert await one.ask(who, "sync", path=S) == {"files": 2}
            later = job(2, like=who)
            assert [await two.get(later, f"{S}/{name}") for name in "ab"] == [b"1", b"1"]
            for fd in fds:
                await one.ask(who, "write", fd=fd, data=b"2")
            assert await one.refused(who, "sync", path=S) is ErrorCode.ENDED
            assert [await two.get(later, f"{S}/{name}") for name in "ab"] == [b"1", b"1"]

    asyncio.run(main())


def test_a_rename_replaces_a_published_file_only_when_its_own_content_is_published(valkey: Valkey) -> None:
    """Write aside and rename: whoever looks has the old content or the new one, never none and never a part."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            who = job(state_bytes=STATE)
            await one.put(who, f"{S}/a", b"old")
            fd = await one.open(who, f"{S}/a.new", "write", "create")
            await one.ask(who, "write", fd=fd, data=b"new")
            await one.ask(who, "rename", path=f"{S}/a.new", to=f"{S}/a")
            assert await one.get(who, f"{S}/a") == b"new"
            await one.ask(who, "close", fd=fd)
            await one.put(who, f"{S}/b", b"b")
            await one.ask(who, "rename", path=f"{S}/b", to=f"{S}/a")
            later = job(2, like=who)
            assert (await two.names(later, S), await two.get(later, f"{S}/a")) == (["a"], b"b")

    asyncio.run(main())


def test_appends_and_other_writes_of_one_file_go_together(valkey: Valkey) -> None:
    """Appended first and overwritten then, or the other way round: what the store has is what the job saw, once."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            who = job(state_bytes=STATE)
            for order in ("append", "write"), ("write", "append"):
                await one.put(who, f"{S}/a", b"0123")
                fds = [await one.open(who, f"{S}/a", flag) for flag in order]
                for fd in fds:
                    await one.ask(who, "write", fd=fd, data=b"xy")
                seen = await one.get(who, f"{S}/a")
                assert seen == b"xy23xy"
                for fd in fds:
                    await one.ask(who, "close", fd=fd)
                    assert await one.get(who, f"{S}/a") == seen
            assert await two.get(job(2, like=who), f"{S}/a") == b"xy23xy"

    asyncio.run(main())


def test_a_file_stays_as_it_was_opened_and_is_new_when_opened_again(valkey: Valkey) -> None:
    """While it is open another node's change is not seen; afterwards it is, with its size; an append tells it, too."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            ann, bob = job(agent="ann"), job(agent="ann")
            await one.put(ann, f"{M}/a", b"old")
            fd = await two.open(bob, f"{M}/a")
            await one.put(ann, f"{M}/a", b"newer")
            await two.names(bob, M)
            assert await two.read(bob, fd) == b"old"
            await two.ask(bob, "close", fd=fd)
            assert (await two.ask(bob, "stat", path=f"{M}/a"))["size"] == 5
            assert await two.get(bob, f"{M}/a") == b"newer"
            log = await two.open(bob, f"{M}/a", "append")
            pen = await two.open(bob, f"{M}/a", "read", "write")
            await one.put(ann, f"{M}/a", b" ann", append=True)
            await two.ask(bob, "write", fd=log, data=b" bob")
            await two.ask(bob, "close", fd=log)
            await two.ask(bob, "write", fd=pen, data=b"!")
            assert await two.refused(bob, "close", fd=pen) is ErrorCode.CONFLICT
            assert await two.get(bob, f"{M}/a") == b"newer ann bob"

    asyncio.run(main())


def test_a_change_between_a_look_and_a_change_is_seen_next(valkey: Valkey) -> None:
    """Another node changes another file in the middle of a call: the next look shows it."""

    async def main() -> None:
        async with disk(valkey) as one, disk(valkey) as two:
            ann, bob = job(agent="ann"), job(agent="ann")
            await one.put(ann, f"{M}/a", b"1")
            real = two.files._store.change

            async def slow(*words: object) -> object:
                await one.put(ann, f"{M}/b", b"2", append=True)
                return await real(*words)  # type: ignore[arg-type] # what it was called with

            two.files._store.change = slow  # type: ignore[method-assign, assignment]  # a faulty store
            await two.put(bob, f"{M}/c", b"3")
            assert await two.names(bob, M) == ["a", "b", "c"]
            # Whoever appended besides others does not know the version of it all.
            assert await two.put(bob, f"{M}/b", b"3", append=True) == {"size": None, "version": None}
            assert await two.get(bob, f"{M}/b") == b"223"

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_many_nodes_at_once_leave_a_tree_that_adds_up(
    valkey: Valkey, valkey_keeper: sync_redis.Redis, seed: int
) -> None:
    """Whatever they do to one memory at the same time: counts are right, contents have names, and all see the same."""
    keys, chance = (Keys().memory("main", "ann"), Keys().memory_data("main", "ann")), random.Random(seed)
    paths = [f"{M}/{name}" for name in ("a", "b", "d", "d/a", "d/b", "d/e", "d/e/a")]

    async def main() -> None:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(disk(valkey)) for _ in range(3)]
            jobs = [job(agent="ann") for _ in nodes]

            async def work(node: Disk, who: Caller) -> None:
                for _ in range(60):
                    node.now_s += 1
                    path, to = chance.choice(paths), chance.choice(paths)
                    asked = chance.choice(
                        (
                            ("put", {"path": path, "data": bytes(chance.randrange(40))}),
                            ("put", {"path": path, "data": b"x", "append": True}),
                            ("put", {"path": path, "data": b"y", "ttl_s": 0.002}),
                            ("mkdir", {"path": path}),
                            ("remove", {"path": path, "directory": chance.random() < 0.5}),
                            ("rename", {"path": path, "to": to}),
                            ("get", {"path": path}),
                        )
                    )
                    with contextlib.suppress(CallError):
                        await node.ask(who, asked[0], **asked[1])

            await asyncio.gather(*(work(*one) for one in zip(nodes, jobs, strict=True)))
            await passed(valkey_keeper, 3)
            late = await stack.enter_async_context(disk(valkey))
            await late.put(job(agent="ann"), "/mem/episodic/last", b"1")
            for node in nodes:
                node.now_s += 3600
            seen = [await _tree(*one, M) for one in (*zip(nodes, jobs, strict=True), (late, job(agent="ann")))]
            assert all(one == seen[0] for one in seen)

    asyncio.run(main())
    index, contents = (cast("dict[bytes, bytes]", valkey_keeper.hgetall(key)) for key in keys)
    files = {path: int(entry.split()[2]) for path, entry in index.items() if entry[:2] == b"f "}
    assert files == {path: len(content) for path, content in contents.items()}
    entries = sum(path[:1] == b"/" for path in index)
    counted = (int(index[b".bytes"]), int(index[b".entries"]))
    assert counted == (sum(files.values()) + entries * ENTRY_BYTES, entries)


async def _tree(node: Disk, who: Caller, top: str) -> dict[str, object]:
    """Everything below a directory."""
    found: dict[str, object] = {}
    for name in await node.names(who, top):
        stat = await node.ask(who, "stat", path=f"{top}/{name}")
        found[name] = await _tree(node, who, f"{top}/{name}") if stat["type"] == "directory" else stat["size"]
    return found
