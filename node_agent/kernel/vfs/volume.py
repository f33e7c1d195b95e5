"""One volume of an attempt: a tree with its turn, in memory only or kept in the store.

Called by the files part. Must never show a half-done change of names, wait for the store longer than WAIT_S, or take a
change for done that the store has not acknowledged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from node_agent.errors import StoreAwayError
from node_agent.kernel.bucket import Bucket
from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs import content
from node_agent.kernel.vfs.index import Change, Done, Index, Lost, Store, Where
from node_agent.kernel.vfs.merge import merge
from node_agent.kernel.vfs.nodes import Directory, File, Node
from node_agent.kernel.vfs.tree import Tree
from node_agent.kernel.vfs.work import Work
from runner.wire.calls import ErrorCode

__all__ = ["WAIT_S", "Kept", "Volume"]

#: Longest wait for one's turn and the store together, in seconds.
WAIT_S: Final = 2.0
#: Changes and bytes that one volume sends to the store: per second, and at once.
_CHANGES: Final = (100.0, 200.0)
_BYTES: Final = (float(8 << 20), float(16 << 20))
#: How often it looks into the store, and how long the agent works on one volume, in seconds of a second and at once.
_LOOKS: Final = (200.0, 400.0)
_WORK: Final = (0.05, 0.1)


class Volume:
    """A volume in memory. ``owner``: whose its files are. ``writable``: False for what only shows something."""

    #: Whether others than this attempt may change it.
    shared = False

    def __init__(self, tree: Tree, owner: str, *, writable: bool = True) -> None:
        self.tree = tree
        self.owner = owner
        self.writable = writable
        #: What costs the agent more than a moment counts.
        self.work = Work(*_WORK, tree.clock)
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Tree]:
        """Nobody else changes names or sends to the store meanwhile. Raises CallError(UNAVAILABLE)."""
        async with self._lock:
            yield self.tree

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what may take the agent long. Raises CallError(SLOW_DOWN): it took too much time of late."""
        self.check_pace(self.work.allowed())
        with self.work:
            yield

    def check_pace(self, fits: bool) -> None:
        """Raise CallError(SLOW_DOWN) unless it fits."""
        if not fits:
            raise CallError(ErrorCode.SLOW_DOWN, "too much about files in a short time: wait a moment")

    async def publish(self, files: Iterable[File]) -> None:
        """Let the store have these files; nothing to do where there is none. In a turn."""

    async def load(self, file: File) -> None:
        """Hold a file's content. In a turn."""

    async def make_directory(self, parent: Directory, name: str) -> None:
        """Make a directory that tree.check_new allowed. In a turn."""
        self.tree.make_directory(parent, name, self.owner)

    async def remove(self, node: Node) -> None:
        """Remove what tree.check_remove allowed. In a turn."""
        self.tree.unlink(node)

    async def move(self, node: Node, parent: Directory, name: str, over: Node | None) -> None:
        """Move what tree.check_move allowed. In a turn."""
        self.tree.move(node, parent, name)

    def close(self, file: File) -> None:
        """A descriptor of it is closed; what was not published of a kept one is gone with the last."""
        self.tree.closed(file)


class Kept(Volume):
    """A volume that the store keeps: looked at anew in each turn where others may change it."""

    def __init__(
        self, tree: Tree, owner: str, store: Store, where: Where, clock: Callable[[], float], *, shared: bool
    ) -> None:
        super().__init__(tree, owner)
        self.shared = shared
        self._store = store
        self._where = where
        #: The version of the index that the tree shows; -1: none that is sure.
        self._known = -1
        self._changes = Bucket(*_CHANGES, clock)
        self._bytes = Bucket(*_BYTES, clock)
        self._looks = Bucket(*_LOOKS, clock)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Tree]:
        try:
            async with asyncio.timeout(WAIT_S), self._lock:
                if self.shared or self._known < 0:
                    await self._look()
                yield self.tree
        except (TimeoutError, StoreAwayError, OSError) as error:
            raise CallError(ErrorCode.UNAVAILABLE, "the store does not answer: ask again") from error
        except Lost:
            self._known = -1
            raise CallError(ErrorCode.UNAVAILABLE, "the store lost these files: ask again") from None

    async def publish(self, files: Iterable[File]) -> None:
        chosen = [file for file in files if file.dirty]
        if any(file.lost for file in chosen):
            raise CallError(ErrorCode.CONFLICT, "the file was removed elsewhere")
        # What was sent once without an answer goes first, as it was; what came since follows.
        for _ in range(2 if any(file.token for file in chosen) else 1):
            sent = [_Sent(file, self.tree) for file in chosen if file.dirty and file.linked]
            if not sent:
                return
            try:
                done = await self._send([one.change for one in sent])
            except CallError:
                for one in sent:
                    one.refused()
                raise
            for one, (_, matched) in zip(sent, done.files, strict=True):
                one.stored(self.tree, done.version, matched=matched)

    async def load(self, file: File) -> None:
        if file.content is not None:
            return
        self.check_pace(self._looks.take())
        found = await self._store.content(self._where, file.path)
        if found is None and file.size > len(file.tail):
            self._known = -1
            raise CallError(ErrorCode.NOT_FOUND, "the file is not there any more")
        content.fill(self.tree, file, found or b"")

    async def make_directory(self, parent: Directory, name: str) -> None:
        done = await self._send([Change("dir", (*parent.path, name))])
        self.tree.make_directory(parent, name, self.owner).version = done.version

    async def remove(self, node: Node) -> None:
        if node.version:
            await self._send([Change("del", node.path, node.version)])
        self.tree.unlink(node)

    async def move(self, node: Node, parent: Directory, name: str, over: Node | None) -> None:
        if node is over:
            return
        replaced = over.version if over is not None else 0
        if node.version:
            await self._send([Change("mov", node.path, node.version, to=(*parent.path, name), over=replaced)])
        elif replaced:
            # The store has nothing of it yet: it keeps what is replaced until this is published over it.
            node.version = replaced
        self.tree.move(node, parent, name)

    def close(self, file: File) -> None:
        if file.opens == 1 and (file.dirty or file.outdated):
            self._known = -1
        super().close(file)

    async def _look(self) -> None:
        """See what others changed, and own the tree from here on if it has an owner."""
        self.check_pace(self._looks.take() and self.work.allowed())
        found = await self._store.load(self._where, self._known)
        if found is not None:
            with self.work:
                merge(self.tree, Index(found.version, found.entries()))
            self._known = found.version

    async def _send(self, changes: list[Change]) -> Done:
        size = sum(len(change.data or b"") for change in changes)
        self.check_pace(self._changes.take() and self._bytes.take(size))
        before, self._known = self._known, -1
        done = await self._store.change(self._where, changes)
        # What others changed in between is not in the tree yet.
        self._known = done.version if done.before == before else -1
        return done


class _Sent:
    """One file on its way to the store, and what of it went."""

    def __init__(self, file: File, tree: Tree) -> None:
        self.file = file
        self._changes = file.changes
        skip = file.sent if file.token else 0
        file.token = file.token or os.urandom(8).hex()
        left_s = tree.expires_in_s(file)
        ttl_ms = max(1, round(left_s * 1000)) if left_s is not None else 0
        self._tail = 0
        if file.rewritten:
            data = bytes(content.loaded(file))
            self.change = Change("put", file.path, file.version, data, ttl_ms, file.token)
            return
        self._tail = file.sent = skip or len(file.tail)
        data = bytes(file.tail[: self._tail])
        self.change = Change("add", file.path, file.version, data, ttl_ms, file.token, skip)

    def refused(self) -> None:
        """The store has it not, for certain."""
        self.file.token, self.file.sent = "", 0

    def stored(self, tree: Tree, version: int, *, matched: bool) -> None:
        """The store has it."""
        file = self.file
        file.token, file.sent = "", 0
        if matched:
            file.version = version
        else:
            file.outdated = True
        if self._changes == file.changes:
            file.rewritten = False
        with tree.counted(file):
            del file.tail[: self._tail]
