"""Calls about open files: open, close, read, write, seek, truncate, sync; and what both kinds share.

Made by the desk. Must never open a path of the host, hold a descriptor longer than its session, or acknowledge as kept
what the store has not acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.seams import Around
from node_agent.kernel.table import Entry
from node_agent.kernel.vfs import asks, content, rows
from node_agent.kernel.vfs.descriptors import Descriptor, Descriptors
from node_agent.kernel.vfs.index import Store
from node_agent.kernel.vfs.mounts import Mounts, Place, Shown, ipc_of, policy_of
from node_agent.kernel.vfs.names import Names, life, writable
from node_agent.kernel.vfs.nodes import Directory, File
from node_agent.kernel.vfs.tree import Tree
from node_agent.kernel.vfs.volume import Volume
from runner.wire.calls import MAX_DATA_BYTES, ErrorCode
from runner.wire.codec import Json
from runner.wire.keys import Keys

__all__ = ["Files"]

#: Whole numbers beyond have no portable form in JSON.
_FARTHEST: Final = 2**53
_WRITING: Final = {"write", "append"}
_NONE: Final[Mapping[str, Json]] = {}


class Files:
    """The files of all jobs of a boot. ``tools``: what /tools shows; ``judge``: see Names; ``clock``: seconds."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        tools: Shown = lambda caller: _NONE,
        judge: Callable[[Caller, str, asks.Rename], None] = lambda caller, path, ask: None,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._store = store
        self._keys = keys
        self._shown: Mapping[str, Shown] = {"tools": tools, "policy": policy_of, "ipc": ipc_of}
        self._clock, self._now_ms = clock, now_ms
        self._mounts: dict[str, Mounts] = {}
        self._sessions: dict[Caller, Descriptors] = {}
        self._names = Names(self._mounts_of, self.descriptor, judge)

    @classmethod
    def on(cls, around: Around, tools: Shown = lambda caller: _NONE) -> Files:
        """Return the files of a node's kernel."""

        def judge(caller: Caller, path: str, ask: asks.Rename) -> None:
            verdict = around.decider.decide(caller, "file.rename", path, {"path": ask.path, "to": ask.to})
            if verdict.effect != "allow":
                raise CallError(ErrorCode.DENIED, verdict.reason or "policy keeps this where it is")

        made = cls(Store(around.redis, around.keys), around.keys, tools=tools, judge=judge)
        around.ending.append(made.ended)
        return made

    def entries(self) -> tuple[Entry, ...]:
        """Return every call about files."""
        opened = (self.open, self.close, self.read, self.write, self.seek, self.truncate, self.sync)
        names = self._names
        named = (names.stat, names.list, names.get, names.put, names.remove, names.rename, names.mkdir)
        return rows.entries({f"file.{handler.__name__}": handler for handler in (*opened, *named)})

    def ended(self, caller: Caller) -> None:
        """An attempt is over: its memory goes; what the store keeps stays there."""
        self._mounts.pop(caller.attempt, None)

    def place(self, caller: Caller, path: str) -> Place:
        """Return where a caller's path leads. Raises CallError."""
        return self._mounts_of(caller).place(path)

    def descriptor(self, caller: Caller, number: int) -> Descriptor:
        """Return a caller's open descriptor. Raises CallError."""
        return self._descriptors(caller).get(number)

    # Handlers

    async def open(self, caller: Caller, ask: asks.Open) -> Json:
        """file.open."""
        flags = set(ask.flags)
        writing = bool(flags & _WRITING)
        if not flags & {"read", *_WRITING} or ({"create", "truncate"} & flags and not writing):
            raise CallError(ErrorCode.BAD_REQUEST, "flags hold read, write or append; create and truncate need a write")
        if "excl" in flags and "create" not in flags:
            raise CallError(ErrorCode.BAD_REQUEST, "excl goes with create")
        ttl_s = life(ask.ttl_s, allowed=writing)
        descriptors = self._descriptors(caller)
        place = self.place(caller, ask.path)
        volume = writable(place) if writing else place.mounted()
        async with volume.turn() as tree:
            descriptors.check_room()
            file = self._found(tree, volume, place, flags)
            made = Descriptor(file, volume, "read" in flags, writing, "append" in flags)
            number = descriptors.add(made)
            try:
                await _prepare(volume, file, flags, ttl_s)
            except BaseException:
                descriptors.discard(number, made)
                raise
            descriptors.check_open(number, made)
        return {"fd": number, "size": file.size, "version": file.version}

    def close(self, caller: Caller, ask: asks.Close) -> Json | Awaitable[Json]:
        """file.close: what was written is published first."""
        descriptors = self._descriptors(caller)
        one = descriptors.get(ask.fd)
        if one.write and one.file.dirty:
            return self._close(descriptors, ask.fd, one)
        descriptors.close(ask.fd)
        return None

    def read(self, caller: Caller, ask: asks.Read) -> Json:
        """file.read: the place moves on by what was read."""
        one = self.descriptor(caller, ask.fd)
        file = one.for_reading()
        if not 0 <= ask.count <= MAX_DATA_BYTES or (ask.at is not None and ask.at < 0):
            raise CallError(ErrorCode.BAD_REQUEST, f"count is 0 to {MAX_DATA_BYTES}, at is not negative")
        data = content.read(file, one.offset if ask.at is None else ask.at, ask.count)
        if ask.at is None:
            one.offset += len(data)
        return {"data": asks.packed(data)}

    def write(self, caller: Caller, ask: asks.Write) -> Json | Awaitable[Json]:
        """file.write: all of the data or none of it; in append mode always at the end."""
        one = self.descriptor(caller, ask.fd)
        file, tree = one.for_writing(), one.volume.tree
        data = asks.unpacked(ask.data)
        if ask.at is not None and ask.at < 0:
            raise CallError(ErrorCode.BAD_REQUEST, "at is not negative")
        if one.append:
            content.append(tree, file, data)
        else:
            content.write(tree, file, one.offset if ask.at is None else ask.at, data)
        if ask.at is None:
            one.offset = file.size if one.append else one.offset + len(data)
        return {"wrote": len(data), "size": file.size}

    def seek(self, caller: Caller, ask: asks.Seek) -> Json:
        """file.seek: a place beyond the end is allowed, one before the beginning is not."""
        one = self.descriptor(caller, ask.fd)
        base = {"start": 0, "here": one.offset, "end": one.file.size}[ask.whence]
        if not 0 <= base + ask.offset <= _FARTHEST:
            raise CallError(ErrorCode.BAD_REQUEST, "the place would be before the beginning, or too far away")
        one.offset = base + ask.offset
        return {"offset": one.offset}

    async def truncate(self, caller: Caller, ask: asks.Truncate) -> Json:
        """file.truncate: cut, or filled up with zeros."""
        one = self.descriptor(caller, ask.fd)
        file = one.for_writing()
        if ask.size < 0:
            raise CallError(ErrorCode.BAD_REQUEST, "size is not negative")
        if file.content is None and ask.size:
            async with one.volume.turn():
                await one.volume.load(file)
        content.truncate(one.volume.tree, file, ask.size)
        return {"size": file.size}

    async def sync(self, caller: Caller, ask: asks.Sync) -> Json:
        """file.sync: the store has it when this is answered."""
        if (ask.fd is None) == (ask.path is None):
            raise CallError(ErrorCode.BAD_REQUEST, "give fd or path")
        if ask.fd is not None:
            one = self.descriptor(caller, ask.fd)
            file = one.for_writing()
            async with one.volume.turn():
                await one.volume.publish([file])
            return {"version": file.version}
        place = self.place(caller, ask.path or "")
        volume = writable(place)
        async with volume.turn() as tree:
            node = tree.find(place.inner)
            inside = [node] if isinstance(node, File) else [one for one in tree.below(node) if isinstance(one, File)]
            dirty = [one for one in inside if one.dirty]
            await volume.publish(dirty)
        return {"files": len(dirty)}

    async def _close(self, descriptors: Descriptors, number: int, one: Descriptor) -> Json:
        try:
            async with one.volume.turn():
                if descriptors.get(number) is one:
                    await one.volume.publish([one.file])
        except CallError as error:
            # The store may come back: what was written is still here, and the close can be asked for again.
            if error.error not in (ErrorCode.UNAVAILABLE, ErrorCode.SLOW_DOWN):
                descriptors.discard(number, one)
            raise
        descriptors.discard(number, one)
        return {"version": one.file.version}

    def _found(self, tree: Tree, volume: Volume, place: Place, flags: set[asks.Flag]) -> File:
        """Return the file to open, new if it may be made."""
        parent, name, found = tree.place(place.inner)
        if found is not None and "excl" in flags:
            raise CallError(ErrorCode.EXISTS, "it exists")
        if isinstance(found, Directory):
            raise CallError(ErrorCode.IS_A_DIRECTORY, "a directory can be listed, not opened")
        if found is None:
            if "create" not in flags:
                raise CallError(ErrorCode.NOT_FOUND, "there is no such file")
            tree.check_new(place.inner)
            found = tree.make_file(parent, name, volume.owner, bytearray())
            found.rewritten = tree.kept
        return found

    def _mounts_of(self, caller: Caller) -> Mounts:
        found = self._mounts.get(caller.attempt)
        if found is None:
            found = Mounts(caller, self._store, self._keys, self._shown, clock=self._clock, now_ms=self._now_ms)
            self._mounts[caller.attempt] = found
        return found

    def _descriptors(self, caller: Caller) -> Descriptors:
        found = self._sessions.get(caller)
        if found is None:
            found = self._sessions[caller] = Descriptors()
            caller.closing.append(lambda: self._sessions.pop(caller, found).end())
        return found


async def _prepare(volume: Volume, file: File, flags: set[asks.Flag], ttl_s: float | None) -> None:
    """Hold what the descriptor needs; an exclusive file is published at once where others could make it, too."""
    tree = volume.tree
    if "truncate" in flags:
        content.truncate(tree, file, 0)
    elif file.content is None and (flags & {"read", "write"} or ttl_s is not None):
        await volume.load(file)
    if ttl_s is not None:
        tree.ends(file, ttl_s)
        file.rewritten = tree.kept
    if "excl" in flags and volume.shared:
        await volume.publish([file])
