"""Files of a job in memory: paths, modes, descriptors, bounds and ends (rows V1 to V4)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest
from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.seams import Verdict
from node_agent.kernel.vfs.files import Files
from node_agent.kernel.vfs.mounts import ROOTS, WORKING
from node_agent.kernel.vfs.paths import split
from runner.wire import record
from runner.wire.calls import MAX_CALL_BYTES, MAX_DATA_BYTES, ErrorCode
from runner.wire.codec import Json, dump
from runner.wire.grants import MailGrant
from tests.kernel import rig
from tests.kernel.disks import Answer, job, memory

W = "/mem/working"


def test_row_v1_mounts_match_by_component_and_list_from_the_root() -> None:
    """A name that only begins like a mount is none, `/` lists, and what is not granted is refused with its grant."""

    async def main() -> None:
        disk, who = memory(), job(tools=("web",), mail=(MailGrant("desk", "send"),))
        assert await disk.names(who, "/") == ["ipc", "mem", "policy", "tools"]
        assert await disk.names(who, "/mem") == ["working"]
        assert await disk.names(who, "/tools") == ["web"]
        assert await disk.names(who, "/ipc") == ["desk"]
        assert await disk.names(who, "/policy") == ["grants.json", "limits.json"]
        for path in ("/stateful/x", "/policyX", "/toolsX/a", "/mem/workingX/a", "/x"):
            assert await disk.refused(who, "get", path=path) is ErrorCode.NOT_FOUND
        for path in ("/state", "/mem/episodic/a", "/mem/semantic", "/mem/procedural/x/y"):
            assert await disk.refused(who, "stat", path=path) is ErrorCode.DENIED
        assert b'"state_bytes"' not in await disk.get(who, "/policy/grants.json")
        assert b'"tools":["web"]' in await disk.get(who, "/policy/grants.json")

    asyncio.run(main())


def test_row_v1_dots_do_not_leave_the_mount() -> None:
    """`..` is resolved inside a mount and refused at its root; odd paths are refused, none reaches another mount."""

    async def main() -> None:
        disk, who = memory(), job()
        await disk.ask(who, "mkdir", path=f"{W}/a")
        await disk.put(who, f"{W}/a/.././b", b"1")
        assert await disk.get(who, f"{W}//b/") == b"1"
        for path in (f"{W}/../../policy/grants.json", f"{W}/a/../../../policy", "/..", "/mem/working/..", "/policy/.."):
            assert await disk.refused(who, "get", path=path) is ErrorCode.BAD_REQUEST
        odd = (
            "",
            "a",
            "policy/grants.json",
            f"{W}/\0",
            f"{W}/\n",
            f"{W}/\x7f",
            f"{W}/" + "x" * 256,
            f"{W}" + "/a" * 16,
        )
        for path in odd:
            assert await disk.refused(who, "stat", path=path) is ErrorCode.BAD_REQUEST, path
        assert await disk.refused(who, "stat", path=f"{W}/" + "é" * 128) is ErrorCode.BAD_REQUEST
        assert await disk.refused(who, "stat", path="/mem/working" + "/x" * 600) is ErrorCode.BAD_REQUEST

    asyncio.run(main())


def test_row_v2_a_read_only_mount_refuses_every_change() -> None:
    """No op and no mode changes what is read-only, nor the directories above the mounts, nor a mount itself."""

    async def main() -> None:
        disk, who = memory(), job(tools=("web",))
        for path in ("/policy/grants.json", "/policy/new", "/tools/web", "/ipc/x", "/x", "/mem/x", "/"):
            for flags in (
                ["write"],
                ["append"],
                ["write", "create"],
                ["append", "create"],
                ["read", "write", "truncate"],
            ):
                answer = await disk.refused(who, "open", path=path, flags=flags)
                assert answer in (ErrorCode.READ_ONLY, ErrorCode.NOT_FOUND), (path, flags)
            for op, fields in (
                ("put", {"data": b""}),
                ("put", {"data": b"", "append": True}),
                ("remove", {}),
                ("remove", {"directory": True}),
                ("mkdir", {}),
                ("rename", {"to": f"{W}/y"}),
            ):
                answer = await disk.refused(who, op, path=path, **fields)
                assert answer in (ErrorCode.READ_ONLY, ErrorCode.NOT_FOUND), (path, op)
        await disk.put(who, f"{W}/a", b"1")
        assert await disk.refused(who, "rename", path=f"{W}/a", to="/policy/a") is ErrorCode.READ_ONLY
        assert await disk.refused(who, "remove", path=W, directory=True) is ErrorCode.READ_ONLY
        assert await disk.refused(who, "rename", path=W, to=f"{W}/b") is ErrorCode.READ_ONLY
        fd = await disk.open(who, "/policy/grants.json")
        assert await disk.refused(who, "write", fd=fd, data=b"x") is ErrorCode.BAD_DESCRIPTOR
        assert await disk.refused(who, "truncate", fd=fd, size=0) is ErrorCode.BAD_DESCRIPTOR

    asyncio.run(main())


def test_row_v2_flags_mean_what_open_says() -> None:
    """Each flag acts on its own, and a combination that means nothing is refused."""

    async def main() -> None:
        disk, who = memory(), job()
        for flags in ([], ["create"], ["read", "create"], ["read", "truncate"], ["write", "excl"]):
            assert await disk.refused(who, "open", path=f"{W}/a", flags=flags) is ErrorCode.BAD_REQUEST
        assert await disk.refused(who, "open", path=f"{W}/a", flags=["write"]) is ErrorCode.NOT_FOUND
        await disk.open(who, f"{W}/a", "write", "create", "excl")
        assert await disk.refused(who, "open", path=f"{W}/a", flags=["write", "create", "excl"]) is ErrorCode.EXISTS
        await disk.put(who, f"{W}/a", b"123456")
        fd = await disk.open(who, f"{W}/a", "write")
        await disk.ask(who, "write", fd=fd, data=b"xy")
        assert await disk.get(who, f"{W}/a") == b"xy3456"
        await disk.open(who, f"{W}/a", "write", "truncate")
        assert await disk.get(who, f"{W}/a") == b""

    asyncio.run(main())


def test_row_v3_descriptors_are_posix() -> None:
    """Reads advance, writes go on, the wrong mode fails, a bad close is an error, appends are at the end."""

    async def main() -> None:
        disk, who = memory(), job()
        assert await disk.refused(who, "open", path=f"{W}/none", flags=["read"]) is ErrorCode.NOT_FOUND
        fd = await disk.open(who, f"{W}/a", "write", "create")
        await disk.ask(who, "write", fd=fd, data=b"hello ")
        await disk.ask(who, "write", fd=fd, data=b"world")
        assert await disk.refused(who, "read", fd=fd) is ErrorCode.BAD_DESCRIPTOR
        reader = await disk.open(who, f"{W}/a")
        assert await disk.refused(who, "write", fd=reader, data=b"x") is ErrorCode.BAD_DESCRIPTOR
        assert [await disk.read(who, reader, count=4) for _ in range(4)] == [b"hell", b"o wo", b"rld", b""]
        assert await disk.read(who, reader, count=5, at=6) == b"world"
        assert await disk.read(who, reader) == b""
        assert await disk.ask(who, "seek", fd=reader, offset=-5, whence="end") == {"offset": 6}
        assert await disk.read(who, reader) == b"world"
        assert await disk.refused(who, "seek", fd=reader, offset=-1) is ErrorCode.BAD_REQUEST
        for count in (-1, MAX_DATA_BYTES + 1):
            assert await disk.refused(who, "read", fd=reader, count=count) is ErrorCode.BAD_REQUEST
        await disk.ask(who, "seek", fd=fd, offset=13)
        await disk.ask(who, "write", fd=fd, data=b"!")
        await disk.ask(who, "truncate", fd=fd, size=16)
        assert await disk.get(who, f"{W}/a") == b"hello world\0\0!\0\0"
        for op in ("close", "read", "write", "sync", "seek", "truncate"):
            more: dict[str, dict[str, object]] = {
                "write": {"data": b""},
                "seek": {"offset": 0},
                "truncate": {"size": 0},
            }
            assert await disk.refused(who, op, fd=63, **more.get(op, {})) is ErrorCode.BAD_DESCRIPTOR
        await disk.ask(who, "close", fd=fd)
        assert await disk.refused(who, "close", fd=fd) is ErrorCode.BAD_DESCRIPTOR
        assert await disk.open(who, f"{W}/a") == fd

    asyncio.run(main())


def test_row_v3_appends_of_two_sessions_never_overwrite_each_other() -> None:
    """Every append goes to the end of what is there then, whoever wrote it."""

    async def main() -> None:
        disk, who = memory(), job()
        other = rig.again(who)
        one = await disk.open(who, f"{W}/log", "append", "create", "read")
        two = await disk.open(other, f"{W}/log", "append")
        for fd, session in ((one, who), (two, other)) * 3:
            await disk.ask(session, "write", fd=fd, data=f"{session.number}\n".encode())
        await disk.ask(who, "seek", fd=one, offset=0)
        await disk.ask(who, "write", fd=one, data=b"end", at=0)
        assert await disk.read(who, one, count=4) == b"1\n2\n"
        await disk.ask(who, "write", fd=one, data=b"")
        assert await disk.read(who, one) == b""
        assert await disk.read(who, one, at=0) == b"1\n2\n" * 3 + b"end"

    asyncio.run(main())


def test_row_v3_an_open_file_outlives_its_name() -> None:
    """Removed or replaced files go on for who has them open, count until closed, and are not what has their name."""

    async def main() -> None:
        disk, who = memory(), job()
        fd = await disk.open(who, f"{W}/a", "read", "write", "create")
        await disk.ask(who, "write", fd=fd, data=b"old")
        await disk.ask(who, "remove", path=f"{W}/a")
        await disk.put(who, f"{W}/a", b"new")
        await disk.ask(who, "write", fd=fd, data=b"er")
        assert await disk.read(who, fd, at=0) == b"older"
        assert await disk.get(who, f"{W}/a") == b"new"
        assert (await disk.ask(who, "stat", fd=fd))["linked"] is False
        await disk.ask(who, "close", fd=fd)
        assert await disk.names(who, W) == ["a"]

    asyncio.run(main())


def test_row_v3_descriptors_belong_to_their_session() -> None:
    """Another session has other descriptors; a session has 64 at most; when it ends they are closed."""

    async def main() -> None:
        disk, who = memory(), job()
        other = rig.again(who)
        for _ in range(64):
            await disk.open(who, f"{W}/a", "write", "create")
        assert await disk.refused(who, "open", path=f"{W}/a", flags=["read"]) is ErrorCode.QUOTA
        assert await disk.refused(other, "close", fd=0) is ErrorCode.BAD_DESCRIPTOR
        await disk.ask(who, "remove", path=f"{W}/a")
        disk.leave(who)
        assert await disk.refused(who, "read", fd=0) is ErrorCode.BAD_DESCRIPTOR
        assert await disk.names(other, W) == []

    asyncio.run(main())


def test_row_v4_directories_have_their_rules() -> None:
    """A full directory stays, a file is no directory, a directory no file, and a rename replaces what it may."""

    async def main() -> None:
        disk, who = memory(), job()
        for path in ("d", "d/e", "f"):
            await disk.ask(who, "mkdir", path=f"{W}/{path}")
        await disk.put(who, f"{W}/d/e/x", b"1")
        await disk.put(who, f"{W}/y", b"2")
        expected = {
            ("remove", f"{W}/d", "directory"): ErrorCode.NOT_EMPTY,
            ("remove", f"{W}/d"): ErrorCode.IS_A_DIRECTORY,
            ("remove", f"{W}/y", "directory"): ErrorCode.NOT_A_DIRECTORY,
            ("remove", f"{W}/none"): ErrorCode.NOT_FOUND,
            ("mkdir", f"{W}/d"): ErrorCode.EXISTS,
            ("mkdir", f"{W}/y"): ErrorCode.EXISTS,
            ("mkdir", f"{W}/no/such"): ErrorCode.NOT_FOUND,
            ("mkdir", f"{W}/y/z"): ErrorCode.NOT_A_DIRECTORY,
            ("list", f"{W}/y"): ErrorCode.NOT_A_DIRECTORY,
            ("get", f"{W}/d"): ErrorCode.IS_A_DIRECTORY,
            ("open", f"{W}/d"): ErrorCode.IS_A_DIRECTORY,
            ("put", f"{W}/d"): ErrorCode.IS_A_DIRECTORY,
            ("get", f"{W}/y/z"): ErrorCode.NOT_A_DIRECTORY,
        }
        for (op, path, *more), code in expected.items():
            fields: dict[str, object] = {"directory": True} if more else {"data": b""} if op == "put" else {}
            assert await disk.refused(who, op, path=path, **fields) is code, (op, path)
        moves = {("d", "d/e/d"): ErrorCode.BAD_REQUEST, ("y", "d"): ErrorCode.IS_A_DIRECTORY}
        moves |= {
            ("d", "y"): ErrorCode.NOT_A_DIRECTORY,
            ("f", "d"): ErrorCode.NOT_EMPTY,
            ("n", "m"): ErrorCode.NOT_FOUND,
        }
        for (source, target), code in moves.items():
            assert await disk.refused(who, "rename", path=f"{W}/{source}", to=f"{W}/{target}") is code, (source, target)
        await disk.ask(who, "rename", path=f"{W}/d", to=f"{W}/f")
        await disk.ask(who, "rename", path=f"{W}/y", to=f"{W}/f/e/x")
        await disk.ask(who, "rename", path=f"{W}/f/e/x", to=f"{W}/f/e/x")
        assert await disk.get(who, f"{W}/f/e/x") == b"2"
        assert await disk.names(who, W) == ["f"]

    asyncio.run(main())


class Keeps(rig.FakePolicy):
    """Denies every call about one tree."""

    def decide(self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json]) -> Verdict:
        kept = resource == f"{W}/d/kept" or resource.startswith(f"{W}/d/kept/")
        return Verdict("deny" if kept else "allow", "fake", "kept")


def test_a_rename_takes_nothing_away_that_policy_keeps() -> None:
    """What a rule keeps from a job stays out of its reach under another name, too: itself, and with what it lies in."""

    async def main() -> None:
        files, who = Files.on(rig.around(Redis(), decider=Keeps())), job()
        rows = {entry.op: entry for entry in files.entries()}
        for path in ("d", "d/kept", "d/free"):
            await rig.ask(rows.values(), who, "file.mkdir", path=f"{W}/{path}")
        for source in ("d/kept", "d"):
            code = await rig.refused(rows.values(), who, "file.rename", path=f"{W}/{source}", to=f"{W}/x")
            assert code is ErrorCode.DENIED
        await rig.ask(rows.values(), who, "file.rename", path=f"{W}/d/free", to=f"{W}/x")
        for op, fields in (("rename", {"path": f"{W}/a", "to": f"{W}//b/"}), ("open", {"path": f"{W}/./b"})):
            entry = rows[f"file.{op}"]
            assert entry.resource is not None
            assert entry.resource(record.decode(entry.ask, fields)) == f"{W}/b"

    asyncio.run(main())


def test_a_rename_makes_nothing_where_policy_lets_nothing_be_made() -> None:
    """A directory that would bring something below a kept tree with it stays where it is; an empty one moves."""

    async def main() -> None:
        files, who = Files.on(rig.around(Redis(), decider=Keeps())), job()
        rows = {entry.op: entry for entry in files.entries()}
        for path in ("t", "t/kept", "e"):
            await rig.ask(rows.values(), who, "file.mkdir", path=f"{W}/{path}")
        code = await rig.refused(rows.values(), who, "file.rename", path=f"{W}/t", to=f"{W}/d")
        assert code is ErrorCode.DENIED
        await rig.ask(rows.values(), who, "file.rename", path=f"{W}/e", to=f"{W}/d")

    asyncio.run(main())


def test_a_rename_makes_no_path_that_could_not_be_opened() -> None:
    """A directory is not moved to where what is in it would have too many names or bytes."""

    async def main() -> None:
        disk, who = memory(), job()
        for path in ("d", "d/1", "d/1/2", "d/1/2/3", *("/".join("x" * number) for number in range(1, 12))):
            await disk.ask(who, "mkdir", path=f"{W}/{path}")
        deep = f"{W}/" + "/".join("x" * 11)
        assert await disk.refused(who, "rename", path=f"{W}/d", to=f"{deep}/d") is ErrorCode.BAD_REQUEST
        await disk.ask(who, "rename", path=f"{W}/d/1/2", to=f"{deep}/e")
        assert await disk.names(who, f"{deep}/e") == ["3"]

    asyncio.run(main())


def test_row_v4_a_file_ends_with_its_time() -> None:
    """After its time a file is gone for every op; who has it open keeps it; its bytes are free again."""

    async def main() -> None:
        disk, who = memory(), job()
        await disk.put(who, f"{W}/a", b"1", ttl_s=10)
        await disk.put(who, f"{W}/b", b"1", ttl_s=10)
        await disk.put(who, f"{W}/b", b"2")
        fd = await disk.open(who, f"{W}/a", "read")
        disk.now_s = 9.0
        stat = await disk.ask(who, "stat", path=f"{W}/a")
        assert (stat["expires_in_s"], stat["owner"]) == (1.0, who.job)
        disk.now_s = 10.0
        assert await disk.refused(who, "get", path=f"{W}/a") is ErrorCode.NOT_FOUND
        assert await disk.names(who, W) == ["b"]
        assert await disk.read(who, fd) == b"1"
        assert (await disk.put(who, f"{W}/a", b"new", if_version=0))["size"] == 3
        for ttl_s in (0, -1, 1e9):
            assert await disk.refused(who, "put", path=f"{W}/c", data=b"", ttl_s=ttl_s) is ErrorCode.BAD_REQUEST
        assert await disk.refused(who, "open", path=f"{W}/a", ttl_s=1) is ErrorCode.BAD_REQUEST

    asyncio.run(main())


def test_row_v4_the_quota_holds_for_every_way_to_grow() -> None:
    """Bytes, entries and a file's size are bounded by write, append, put, truncate and mkdir; nothing half is left."""

    async def main() -> None:
        disk, who = memory(), job()
        fd = await disk.open(who, f"{W}/a", "write", "create")
        assert await disk.refused(who, "truncate", fd=fd, size=WORKING.file_bytes + 1) is ErrorCode.TOO_LARGE
        assert await disk.refused(who, "write", fd=fd, data=b"x", at=2**62) is ErrorCode.TOO_LARGE
        for name in "abc":
            fd = await disk.open(who, f"{W}/{name}", "write", "create")
            await disk.ask(who, "truncate", fd=fd, size=WORKING.file_bytes)
        last = await disk.open(who, f"{W}/d", "append", "create")
        left = WORKING.total_bytes - 3 * WORKING.file_bytes - 4 * 256
        await disk.ask(who, "truncate", fd=last, size=left)
        for op, fields in (
            ("write", {"fd": last, "data": b"x"}),
            ("truncate", {"fd": last, "size": left + 1}),
            ("put", {"path": f"{W}/e", "data": b""}),
            ("mkdir", {"path": f"{W}/e"}),
            ("open", {"path": f"{W}/e", "flags": ["write", "create"]}),
        ):
            assert await disk.refused(who, op, **fields) is ErrorCode.QUOTA, op
        assert (await disk.ask(who, "stat", fd=last))["size"] == left
        assert await disk.names(who, W) == ["a", "b", "c", "d"]
        await disk.ask(who, "truncate", fd=last, size=left - 300)
        assert await disk.refused(who, "put", path=f"{W}/e", data=bytes(45)) is ErrorCode.QUOTA
        assert await disk.names(who, W) == ["a", "b", "c", "d"]
        await disk.ask(who, "truncate", fd=last, size=left)
        await disk.ask(who, "remove", path=f"{W}/c")
        assert await disk.refused(who, "put", path=f"{W}/e", data=b"x") is ErrorCode.QUOTA
        await disk.ask(who, "close", fd=fd)
        await disk.put(who, f"{W}/e", b"x")

    asyncio.run(main())


def test_entries_are_bounded_and_listed_by_pages_that_fit_one_record() -> None:
    """256 entries with the longest names are listed in pages, each once, each page in a record's bounds."""

    async def main() -> None:
        disk, who = memory(), job()
        names = [f"{number:03}".ljust(255, '"') for number in range(256)]
        for name in names:
            await disk.ask(who, "mkdir", path=f"{W}/{name}")
        assert await disk.refused(who, "mkdir", path=f"{W}/one-more") is ErrorCode.QUOTA
        found: list[str] = []
        more = True
        while more:
            page = await disk.ask(who, "list", path=W, after=found[-1] if found else "")
            assert len(dump(page)) < MAX_CALL_BYTES - 1024
            found += [cast("str", entry["name"]) for entry in cast("list[Answer]", page["entries"])]
            more = bool(page["more"])
        assert found == names

    asyncio.run(main())


def test_memory_of_an_attempt_is_its_own_and_ends_with_it() -> None:
    """No other job or attempt sees /mem/working, and nothing of it is held after the end."""

    async def main() -> None:
        disk, who = memory(), job()
        await disk.put(who, f"{W}/a", b"1")
        assert await disk.names(job(2, like=who), W) == []
        assert await disk.names(job(), W) == []
        disk.files.ended(who)
        assert await disk.names(who, W) == []

    asyncio.run(main())


@pytest.mark.parametrize("data", ["=", "a", "a===", "é", "YQ==\n", "A" * 50_000])
def test_data_is_strict_base64_within_bounds(data: str) -> None:
    """What is no base64, or too much of it, changes nothing."""

    async def main() -> None:
        disk, who = memory(), job()
        assert await disk.refused(who, "put", path=f"{W}/a", data=data) is ErrorCode.BAD_REQUEST
        assert await disk.names(who, W) == []

    asyncio.run(main())


def test_attack_10_no_path_of_a_job_is_opened_on_the_host(tmp_path: object) -> None:
    """Names of real files of the host lead nowhere: files are objects of the agent, whatever they are called."""

    async def main() -> None:
        disk, who = memory(), job()
        for path in ("/etc/passwd", "/proc/self/environ", f"{W}/etc/passwd", f"{tmp_path}"):
            assert await disk.refused(who, "get", path=path) is ErrorCode.NOT_FOUND
        await disk.put(who, f"{W}/passwd", b"mine")
        assert await disk.get(who, f"{W}/passwd") == b"mine"

    asyncio.run(main())


def test_normalised_paths_are_stable() -> None:
    """A path that was normalised once is the same when it is normalised again."""
    for path in ("/state/a/../b", "//mem///working/./x", "/state/é"):
        parts = split(path, ROOTS)
        assert split("/" + "/".join(parts), ROOTS) == parts
