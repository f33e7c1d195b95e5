"""Every sequence of calls about files does what a plain model does: paths, descriptors, quotas, ends, attempts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs.mounts import WORKING
from node_agent.kernel.vfs.nodes import ENTRY_BYTES
from runner.wire.calls import MAX_DATA_BYTES
from tests.kernel import rig
from tests.kernel.disks import Answer, Disk, job
from tests.kernel.filemodel import Inode, Model, No, Open, Path
from tests.support.valkey import Valkey

STATE_BYTES = 4096
NAMES = ("a", "a", "b", "d", "d/x", "d/x", "d/e", "d/e/y", "d/e/y/z")
#: Mostly one of the open descriptors (see number), sometimes any.
FD = st.integers(0, 15)
FLAGS = (
    ("read",),
    ("write",),
    ("read", "write"),
    ("append", "create"),
    ("read", "append", "create"),
    ("write", "create"),
    ("read", "write", "create", "truncate"),
    ("write", "create", "excl"),
    ("write", "truncate"),
)


class Files(Model, RuleBasedStateMachine):
    """One volume against a dictionary. ``kept``: it is /state, and the store may refuse a publication."""

    root = "/mem/working"
    total, most = WORKING.total_bytes, WORKING.file_bytes
    redis: Redis

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        Model.__init__(self)
        self.loop = asyncio.new_event_loop()
        self.redis = self.connect()
        self.disk = Disk(self.redis)
        self.who = [job(state_bytes=STATE_BYTES)]
        self.who.append(rig.again(self.who[0]))

    def connect(self) -> Redis:
        """A client that is never used."""
        return Redis()

    def teardown(self) -> None:
        self.loop.run_until_complete(self.redis.aclose())
        self.loop.close()

    # Calls

    @rule(
        who=st.integers(0, 1),
        name=st.sampled_from(NAMES),
        flags=st.sampled_from(FLAGS),
        ttl=st.sampled_from((None, None, 5)),
    )
    def open(self, who: int, name: str, flags: tuple[str, ...], ttl: int | None) -> None:
        chosen = frozenset(flags)
        ttl_s = ttl if not self.kept and chosen & {"write", "append"} else None

        def model() -> int:
            path = self.path(name)
            found = self.look_for(path)
            if found == "nothing":
                if "create" not in chosen:
                    raise No("not_found")
                self.room(ENTRY_BYTES)
                self.tree[path] = Inode()
            elif "excl" in chosen:
                raise No("exists")
            inode = self.tree[path]
            if inode is None:
                raise No("is_a_directory")
            if "truncate" in chosen and inode.data:
                inode.data, inode.dirty = b"", True
            elif "truncate" in chosen:
                inode.dirty = True
            if ttl_s is not None:
                inode.ends_s = self.now_s + ttl_s
            number = min(set(range(64)) - set(self.fds[who]))
            inode.opens += 1
            self.fds[who][number] = Open(inode, chosen)
            return number

        fields = {} if ttl_s is None else {"ttl_s": ttl_s}
        self.same(who, "open", model, lambda answer: answer["fd"], path=self.spelled(name), flags=list(flags), **fields)

    @rule(who=st.integers(0, 1), fd=FD)
    def close(self, who: int, fd: int) -> None:
        fd = self.number(who, fd)

        def model() -> None:
            one = self.descriptor(who, fd)
            try:
                if one.writes:
                    self.publish(one.inode)
            finally:
                del self.fds[who][fd]
                self.closed(one.inode)

        self.same(who, "close", model, None, fd=fd)

    @rule(who=st.integers(0, 1), fd=FD, count=st.integers(0, 40), at=st.none() | st.integers(0, 30))
    def read(self, who: int, fd: int, count: int, at: int | None) -> None:
        fd = self.number(who, fd)

        def model() -> bytes:
            one = self.descriptor(who, fd)
            if not one.reads:
                raise No("bad_descriptor")
            start = one.offset if at is None else at
            found = one.inode.data[start : start + count]
            if at is None:
                one.offset += len(found)
            return found

        fields = {"count": count} if at is None else {"count": count, "at": at}
        self.same(who, "read", model, lambda answer: base64.b64decode(cast("str", answer["data"])), fd=fd, **fields)

    @rule(who=st.integers(0, 1), fd=FD, data=st.binary(max_size=40), at=st.none() | st.integers(0, 30))
    def write(self, who: int, fd: int, data: bytes, at: int | None) -> None:
        fd = self.number(who, fd)

        def model() -> int:
            one = self.descriptor(who, fd)
            if not one.writes:
                raise No("bad_descriptor")
            old = one.inode.data
            start = len(old) if "append" in one.flags else one.offset if at is None else at
            new = old + bytes(max(0, start - len(old)))
            new = new[:start] + data + new[start + len(data) :] if data else old
            self.change(one.inode, new, bool(data))
            if at is None:
                one.offset = len(new) if "append" in one.flags else one.offset + len(data)
            return len(new)

        fields = {} if at is None else {"at": at}
        self.same(who, "write", model, lambda answer: answer["size"], fd=fd, data=data, **fields)

    @rule(who=st.integers(0, 1), fd=FD, size=st.sampled_from((0, 1, 7, 1500, 400_000, 1 << 20, (1 << 20) + 1)))
    def truncate(self, who: int, fd: int, size: int) -> None:
        fd = self.number(who, fd)

        def model() -> int:
            one = self.descriptor(who, fd)
            if not one.writes:
                raise No("bad_descriptor")
            self.change(one.inode, one.inode.data[:size] + bytes(max(0, size - len(one.inode.data))), True)
            return size

        self.same(who, "truncate", model, lambda answer: answer["size"], fd=fd, size=size)

    @rule(who=st.integers(0, 1), fd=FD, offset=st.integers(-30, 30), whence=st.sampled_from(("start", "here", "end")))
    def seek(self, who: int, fd: int, offset: int, whence: str) -> None:
        fd = self.number(who, fd)

        def model() -> int:
            one = self.descriptor(who, fd)
            place = {"start": 0, "here": one.offset, "end": len(one.inode.data)}[whence] + offset
            if place < 0:
                raise No("bad_request")
            one.offset = place
            return place

        self.same(who, "seek", model, lambda answer: answer["offset"], fd=fd, offset=offset, whence=whence)

    @rule(who=st.integers(0, 1), fd=FD)
    def sync(self, who: int, fd: int) -> None:
        fd = self.number(who, fd)

        def model() -> None:
            one = self.descriptor(who, fd)
            if not one.writes:
                raise No("bad_descriptor")
            self.publish(one.inode)

        self.same(who, "sync", model, None, fd=fd)

    @rule(who=st.integers(0, 1), name=st.sampled_from(NAMES), data=st.binary(max_size=40), append=st.booleans())
    def put(self, who: int, name: str, data: bytes, append: bool) -> None:
        def model() -> int:
            path = self.path(name)
            if self.look_for(path) == "nothing":
                self.room(ENTRY_BYTES)
                self.tree[path] = inode = Inode()
                new = True
            else:
                found = self.tree[path]
                if found is None:
                    raise No("is_a_directory")
                inode, new = found, False
            inode.opens += 1
            try:
                self.change(inode, (inode.data if append else b"") + data, bool(data) or not append)
                if not append:
                    inode.ends_s = None
                self.publish(inode)
                return len(inode.data)
            except No:
                if new:
                    self.unlink(path)
                raise
            finally:
                self.closed(inode)

        self.same(who, "put", model, lambda answer: answer["size"], path=self.spelled(name), data=data, append=append)

    @rule(who=st.integers(0, 1), name=st.sampled_from(NAMES))
    def get(self, who: int, name: str) -> None:
        def model() -> bytes:
            path = self.path(name)
            if self.look_for(path) == "nothing":
                raise No("not_found")
            inode = self.tree[path]
            if inode is None:
                raise No("is_a_directory")
            if len(inode.data) > MAX_DATA_BYTES:
                raise No("too_large")
            return inode.data

        self.same(
            who, "get", model, lambda answer: base64.b64decode(cast("str", answer["data"])), path=self.spelled(name)
        )

    @rule(who=st.integers(0, 1), name=st.sampled_from(NAMES))
    def mkdir(self, who: int, name: str) -> None:
        def model() -> None:
            path = self.path(name)
            if self.look_for(path) != "nothing":
                raise No("exists")
            self.room(ENTRY_BYTES)
            self.store_room(ENTRY_BYTES)
            self.tree[path] = None

        self.same(who, "mkdir", model, None, path=self.spelled(name))

    @rule(who=st.integers(0, 1), name=st.sampled_from(NAMES), directory=st.booleans())
    def remove(self, who: int, name: str, directory: bool) -> None:
        def model() -> None:
            path = self.path(name)
            if self.look_for(path) == "nothing":
                raise No("not_found")
            if directory and self.tree[path] is not None:
                raise No("not_a_directory")
            if not directory and self.tree[path] is None:
                raise No("is_a_directory")
            if self.below(path):
                raise No("not_empty")
            self.unlink(path)

        self.same(who, "remove", model, None, path=self.spelled(name), directory=directory)

    @rule(who=st.integers(0, 1), name=st.sampled_from(NAMES), to=st.sampled_from(NAMES))
    def rename(self, who: int, name: str, to: str) -> None:
        def model() -> None:
            source, target = self.path(name), self.path(to)
            if not self.moves(source, target):
                return
            node, over = self.tree[source], self.tree.get(target)
            if node is not None and node.kept is None and over is not None:
                node.kept = over.kept
            if target in self.tree:
                self.unlink(target)
            for path in (source, *self.below(source)):
                self.tree[(*target, *path[len(source) :])] = self.tree.pop(path)

        self.same(who, "rename", model, None, path=self.spelled(name), to=self.spelled(to))

    @rule(who=st.integers(0, 1))
    def leave(self, who: int) -> None:
        """A session ends without a word, and another one begins."""
        self.disk.leave(self.who[who])
        self.who[who] = rig.again(self.who[1 - who])
        for one in self.fds[who].values():
            self.closed(one.inode)
        self.fds[who] = {}

    @precondition(lambda self: not self.kept)
    @rule(seconds=st.sampled_from((1, 4, 6)))
    def time_passes(self, seconds: int) -> None:
        self.disk.now_s = self.now_s = self.now_s + seconds

    @invariant()
    def looks_the_same(self) -> None:
        """Names, kinds and sizes of all are the model's, and so is what the volume counts."""
        self.tick()
        found: dict[Path, int | None] = {}
        self.walk((), found)
        assert found == {path: None if node is None else len(node.data) for path, node in self.tree.items() if path}
        tree = self.disk.files.place(self.who[0], self.root).mounted().tree
        assert tree.used_bytes == self.used()

    def walk(self, above: Path, found: dict[Path, int | None]) -> None:
        answer = self.call(0, "list", path="/".join((self.root, *above)))
        for entry in cast("list[Answer]", answer["entries"]):
            path = (*above, cast("str", entry["name"]))
            found[path] = None if entry["type"] == "directory" else cast("int", entry["size"])
            if entry["type"] == "directory":
                self.walk(path, found)

    def spelled(self, name: str) -> str:
        """The same path in other words."""
        return f"{self.root}/./{name.replace('/', '//')}/none/.."

    def call(self, who: int, op: str, **fields: object) -> Answer:
        return self.loop.run_until_complete(self.disk.ask(self.who[who], op, **fields))

    def same(
        self,
        who: int,
        op: str,
        model: Callable[[], object],
        part: Callable[[Answer], object] | None,
        **fields: object,
    ) -> None:
        """The call ends as the model says: with the same value, or refused for the same reason."""
        try:
            wanted: object = model()
        except No as refused:
            wanted = f"refused: {refused}"
        try:
            answer = self.call(who, op, **fields)
            found = part(answer) if part is not None else None
        except CallError as error:
            found = f"refused: {error.error.value}"
        assert found == wanted, (op, fields)


class Kept(Files):
    """/state on a real store; attempts follow one another."""

    root = "/state"
    kept = True
    total = most = STATE_BYTES
    server: Valkey

    def connect(self) -> Redis:
        return Redis(unix_socket_path=str(self.server.socket))

    @rule()
    def next_attempt(self) -> None:
        """The next attempt, on another node, finds exactly what was published."""
        first = self.who[0]
        for node in {node for node in self.tree.values() if node is not None}:
            node.opens = 0
            node.data, node.dirty = node.kept if node.kept is not None else b"", False
        self.tree = {path: node for path, node in self.tree.items() if node is None or node.kept is not None}
        self.orphans = set()
        self.fds = [{}, {}]
        self.disk = Disk(self.redis)
        self.who = [job(first.run.attempt + 1, like=first)]
        self.who.append(rig.again(self.who[0]))

    def call(self, who: int, op: str, **fields: object) -> Answer:
        # How many changes there may be in a time is not what is tested here.
        self.disk.now_s += 1
        return super().call(who, op, **fields)


LIGHT = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_memory_is_what_a_model_says() -> None:
    """Files of /mem/working behave as a dictionary of POSIX files does."""
    run_state_machine_as_test(Files, settings=LIGHT)


def test_state_is_what_a_model_says(valkey: Valkey) -> None:
    """So do files of /state, whose next attempt finds what was published."""
    Kept.server = valkey
    run_state_machine_as_test(Kept, settings=LIGHT)
