"""A record's heads in the store: added by the node's own user alone, compared at the start, missed when cut."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import redis
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from node_agent.kernel import recordcheck, segments
from node_agent.kernel.anchors import Anchors
from node_agent.kernel.recordcheck import Anchor, Known, Report
from node_agent.kernel.recorder import Recorder
from node_agent.records import Notary, Signed
from runner.signing import Signer
from runner.wire import access, flight, record
from runner.wire.access import Role
from runner.wire.envelope import Domain
from runner.wire.event import Event
from runner.wire.flight import FlightHead
from runner.wire.keys import Keys
from tests.support.valkey import Valkey

SIGNER = Signer(bytes(range(32)))
KEY = "rf:anchor:n1"
PASSWORD = "not-a-secret"
DIGEST = hashlib.sha256(PASSWORD.encode()).hexdigest()


class Stand:
    """Anchors of node n1 over a real store, as a user of it; ``told`` holds what the node's events say."""

    def __init__(self, folder: Path, store: Valkey, user: str | None = None, store_s: float = 2.0) -> None:
        self.recorder = Recorder(folder, node="n1", signer=SIGNER, fleet=None, reserve_bytes=0)
        self.redis = Redis(
            unix_socket_path=str(store.socket), username=user, password=PASSWORD if user is not None else None
        )
        self.told: list[str] = []
        self.now_s = 0.0
        notary = Notary(SIGNER, "n1", "b00t01234567", "B")
        self.anchors = Anchors(self.recorder, self.redis, Keys(), notary, self._emit, clock=lambda: self.now_s)
        self.anchors._store_s = store_s

    def _emit(self, tenant: str | None, event: Signed) -> None:
        assert tenant is None
        self.told.append(str(record.loads(Event, event.payload).detail["what"]))

    async def close(self) -> None:
        self.recorder.close()
        await self.redis.aclose()


def set_user(client: redis.Redis, role: Role) -> None:
    """Make a role's user; a selector is one word."""
    head, *selectors = role.line(password_sha256=DIGEST).removeprefix("user ").split(" (")
    words = ["ACL", "SETUSER", *head.split(), *(f"({selector}" for selector in selectors)]
    client.execute_command(*words)  # type: ignore[no-untyped-call]  # untyped in redis


def ids_of(client: redis.Redis) -> list[str]:
    """Return the ids of the anchors, the oldest first."""
    rows = cast("list[tuple[bytes, object]]", client.xrange(KEY))
    return [entry.decode() for entry, _ in rows]


def signed(file: Path, count: int) -> tuple[bytes, str]:
    """Return a head of the record's first lines, rightly signed."""
    link = flight.GENESIS
    for line in file.read_bytes().splitlines(keepends=True)[:count]:
        link = flight.linked(link, flight.body_of(line)[0])
    head = record.dumps(FlightHead("n1", "b00t01234567", count, link.hex(), 5))
    return head, SIGNER.sign(Domain.HEAD, head)


def looked(folder: Path, client: redis.Redis) -> Report:
    """Check the record with what the store holds, as `audit verify` does."""
    stream = []
    for entry, fields in cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(KEY)):
        head = record.loads(FlightHead, fields[b"head"])
        stream.append(Anchor(head.count, head.hash, "an anchor", entry.decode()))
    added = cast("dict[str, int]", client.xinfo_stream(KEY))["entries-added"]
    fd = os.open(folder, os.O_RDONLY)
    try:
        known = Known("n1", SIGNER.public, SIGNER, tuple(stream), added)
        return recordcheck.check(recordcheck.read(fd, segments.found(fd)), known)
    finally:
        os.close(fd)


@pytest.fixture
def admin(valkey: Valkey) -> Iterator[redis.Redis]:
    """The store's own operator, who may do everything; the node's user stands."""
    client = valkey.client()
    set_user(client, access.agent("n1"))
    yield client
    client.execute_command("ACL", "DELUSER", "agent-n1")  # type: ignore[no-untyped-call]  # untyped in redis
    client.close()


def test_a_changed_head_is_anchored_at_its_time_and_once(tmp_path: Path, valkey: Valkey) -> None:
    """A head goes to the store when it has changed and its time has come; an idle node adds nothing."""

    async def main() -> None:
        stand = Stand(tmp_path / "flight", valkey)
        stand.recorder.note("call")
        await stand.anchors.look()
        assert await stand.redis.xlen(KEY) == 0
        stand.now_s += 31
        await stand.anchors.look()
        assert await stand.redis.xlen(KEY) == 1
        for _ in range(3):
            stand.now_s += 31
            await stand.anchors.look()
        assert await stand.redis.xlen(KEY) == 1, "its own line changes the head, and is no reason for another"
        stand.recorder.note("call")
        await stand.anchors.stop()
        assert await stand.redis.xlen(KEY) == 2
        await stand.close()

    asyncio.run(main())


def test_attack_31_the_node_s_user_can_only_add_anchors(tmp_path: Path, valkey: Valkey, admin: redis.Redis) -> None:
    """Every command that takes an anchor away or puts something in its place is refused to the node's own user."""

    async def main() -> None:
        stand = Stand(tmp_path / "flight", valkey, user="agent-n1")
        stand.recorder.note("call")
        assert await stand.anchors.anchor()
        await stand.anchors.compare()
        entry = ids_of(admin)[0]
        for words in (
            *(("XTRIM", KEY, "MAXLEN", "0"), ("XDEL", KEY, entry), ("DEL", KEY), ("UNLINK", KEY)),
            *(("SET", KEY, "x"), ("RENAME", KEY, "rf:seq"), ("COPY", "rf:seq", KEY), ("RESTORE", KEY, "0", "x")),
            *(("EXPIRE", KEY, "1"), ("PEXPIRE", KEY, "1"), ("XSETID", KEY, "9999999999999-0"), ("FLUSHALL",)),
            *(("XADD", "rf:anchor:n2", "*", "head", "x"), ("XGROUP", "CREATE", KEY, "g", "0")),
            ("EVAL", "return redis.call('XTRIM', KEYS[1], 'MAXLEN', 0)", "1", KEY),
        ):
            with pytest.raises((NoPermissionError, ResponseError)) as caught:
                await stand.redis.execute_command(*words)  # type: ignore[no-untyped-call]  # untyped in redis
            assert "permission" in str(caught.value) or "NOPERM" in str(caught.value), words
        assert admin.xlen(KEY) == 1
        await stand.close()

    asyncio.run(main())


def test_attack_31_a_cut_by_adding_is_counted_by_the_store(tmp_path: Path, valkey: Valkey, admin: redis.Redis) -> None:
    """XADD can cut, too: who cuts the record back and the stream to match is told by the store's own count."""

    async def main() -> None:
        stand = Stand(tmp_path / "flight", valkey, user="agent-n1")
        cuts = []
        for _ in range(4):
            stand.recorder.note("call")
            assert await stand.anchors.anchor()
            cuts.append((stand.recorder.count, stand.recorder._size))
        await stand.anchors.stop()
        await stand.close()
        assert looked(tmp_path / "flight", admin).faults == []
        # As who has the node's key and its user: the record as it was, and nothing in the store but a head of that.
        (file,) = (tmp_path / "flight").glob("*.rec")
        count, size = cuts[1]
        file.write_bytes(file.read_bytes()[:size])
        rolled = Stand(tmp_path / "rolled", valkey, user="agent-n1")
        head, signature = signed(file, count)
        await rolled.redis.xadd(KEY, {"head": head, "sig": signature}, maxlen=1, approximate=False)
        assert len(ids_of(admin)) == 1
        faults = looked(tmp_path / "flight", admin).faults
        assert any("does not know" in fault for fault in faults), faults
        await rolled.close()

    asyncio.run(main())


def test_f2_a_start_after_a_rollback_says_so(tmp_path: Path, valkey: Valkey) -> None:
    """An agent that finds its record shorter than its last anchor tells at once, and notes it."""

    async def main() -> None:
        stand = Stand(tmp_path / "flight", valkey)
        for _ in range(9):
            stand.recorder.note("call")
        assert await stand.anchors.anchor()
        await stand.close()
        (file,) = (tmp_path / "flight").glob("*.rec")
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:4]))
        again = Stand(tmp_path / "flight", valkey)
        await again.anchors.compare()
        assert ["line 10 was anchored" in told for told in again.told] == [True]
        await again.close()

    asyncio.run(main())


def test_a_store_that_is_away_holds_nothing_up(tmp_path: Path, valkey: Valkey) -> None:
    """Without the store the head is signed in the record alone, and anchored when the store is back."""

    async def main() -> None:
        stand = Stand(tmp_path / "flight", valkey, store_s=0.1)
        good, stand.anchors._redis = stand.anchors._redis, Redis(unix_socket_path=str(tmp_path / "nobody"))
        stand.recorder.note("call")
        assert not await stand.anchors.anchor()
        await stand.anchors.compare()
        assert b'"entry":""' in next((tmp_path / "flight").glob("*.rec")).read_bytes()
        away, stand.anchors._redis = stand.anchors._redis, good
        assert await stand.anchors.anchor()
        await away.aclose()
        await stand.close()

    asyncio.run(main())


def test_attack_40_a_record_that_can_t_be_written_is_told_and_heals(tmp_path: Path, valkey: Valkey) -> None:
    """The node says once that it can't record, and once that it can again."""

    async def main() -> None:
        stand = Stand(tmp_path / "flight", valkey)
        stand.recorder._write = lambda fd, data: 0
        assert not stand.recorder.note("call")
        for _ in range(3):
            await stand.anchors.look()
        assert len(stand.told) == 1
        assert "takes no jobs" in stand.told[0]
        stand.recorder._write = os.write
        for _ in range(3):
            await stand.anchors.look()
        assert len(stand.told) == 2
        assert "written again" in stand.told[1]
        await stand.close()

    asyncio.run(main())


def test_attack_40_a_disk_that_gets_full_is_warned_of(
    tmp_path: Path, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a tenth of the disk the node warns, once."""

    async def main() -> None:
        stand = Stand(tmp_path / "flight", valkey)
        real = os.statvfs(tmp_path)
        fields = list(real)
        fields[4] = real.f_blocks // 11
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
        for _ in range(3):
            await stand.anchors.look()
        assert ["less than 10%" in told for told in stand.told] == [True]
        await stand.close()

    asyncio.run(main())
