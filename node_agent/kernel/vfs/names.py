"""Calls about names: stat, list, get, put, remove, rename, mkdir.

Made by files.py. Must never tell of a change that the store of a kept volume has not acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable

from node_agent.kernel.caller import Caller
from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs import asks, content
from node_agent.kernel.vfs.descriptors import Descriptor
from node_agent.kernel.vfs.mounts import Mounts, Place
from node_agent.kernel.vfs.nodes import Directory, File, Node
from node_agent.kernel.vfs.paths import shown
from node_agent.kernel.vfs.tree import Tree
from node_agent.kernel.vfs.volume import Volume
from runner.wire.calls import MAX_CALL_BYTES, MAX_DATA_BYTES, ErrorCode
from runner.wire.codec import Json

__all__ = ["Names", "life", "writable"]

#: Room that a page of names takes in its answer: a name may need twice its bytes, its numbers this much.
_PAGE_BYTES = MAX_CALL_BYTES * 3 // 4
_ROW_BYTES = 96


class Names:
    """Handlers. ``mounts``: the volumes of a caller; ``descriptor``: its open descriptor by number.

    ``judge``: raises CallError unless policy lets a rename take a path away, or make one below where it goes;
    that place itself was judged before.
    """

    def __init__(
        self,
        mounts: Callable[[Caller], Mounts],
        descriptor: Callable[[Caller, int], Descriptor],
        judge: Callable[[Caller, str, asks.Rename], None],
    ) -> None:
        self._mounts = mounts
        self._descriptor = descriptor
        self._judge = judge

    async def stat(self, caller: Caller, ask: asks.Stat) -> Json:
        """file.stat."""
        if (ask.fd is None) == (ask.path is None):
            raise CallError(ErrorCode.BAD_REQUEST, "give path or fd")
        if ask.fd is not None:
            one = self._descriptor(caller, ask.fd)
            return _told(one.volume, one.file)
        place = self._mounts(caller).place(ask.path or "")
        if place.volume is None:
            return {"type": "directory", "writable": False}
        async with place.volume.turn() as tree:
            return _told(place.volume, tree.find(place.inner))

    async def list(self, caller: Caller, ask: asks.Page) -> Json:
        """file.list: sorted, a page at a time."""
        if not 1 <= ask.limit <= asks.MAX_PAGE:
            raise CallError(ErrorCode.BAD_REQUEST, f"limit is 1 to {asks.MAX_PAGE}")
        mounts = self._mounts(caller)
        place = mounts.place(ask.path)
        if place.volume is None:
            above: list[Json] = [{"name": name, "type": "directory"} for name in mounts.below(place.path)]
            return {"entries": above, "more": False}
        async with place.volume.turn() as tree:
            children = tree.directory(place.inner).children
            names = sorted(name for name in children if name > ask.after)
            rows: list[Json] = []
            room = _PAGE_BYTES
            for name in names[: ask.limit]:
                room -= 2 * len(name.encode()) + _ROW_BYTES
                if room < 0:
                    break
                node = children[name]
                kind = "directory" if isinstance(node, Directory) else "file"
                rows.append({"name": name, "type": kind, "size": 0 if isinstance(node, Directory) else node.size})
            return {"entries": rows, "more": len(rows) < len(names)}

    async def get(self, caller: Caller, ask: asks.Get) -> Json:
        """file.get: a whole small file."""
        volume, inner = _mounted(self._mounts(caller).place(ask.path))
        async with volume.turn() as tree:
            file = tree.file(inner)
            tree.opened(file)
            try:
                if file.size <= MAX_DATA_BYTES:
                    await volume.load(file)
                if file.size > MAX_DATA_BYTES:
                    raise CallError(ErrorCode.TOO_LARGE, f"over {MAX_DATA_BYTES} bytes: open it and read it in parts")
                return {"data": asks.packed(content.read(file, 0, file.size)), "version": file.version}
            finally:
                volume.close(file)

    async def put(self, caller: Caller, ask: asks.Put) -> Json:
        """file.put: a whole small file, or one more piece of one, published at once."""
        data, ttl_s = asks.unpacked(ask.data), life(ask.ttl_s, allowed=not ask.append)
        place = self._mounts(caller).place(ask.path)
        volume = writable(place)
        async with volume.turn() as tree:
            parent, name, found = tree.place(place.inner)
            if isinstance(found, Directory):
                raise CallError(ErrorCode.IS_A_DIRECTORY, "it is a directory")
            if ask.if_version is not None and ask.if_version != (found.version if found is not None else 0):
                raise CallError(ErrorCode.CONFLICT, "it has another version: read it again")
            if found is None:
                tree.check_new(place.inner)
            file = found if found is not None else tree.make_file(parent, name, volume.owner, bytearray())
            file.rewritten = file.rewritten or (tree.kept and found is None)
            tree.opened(file)
            try:
                _fill(tree, file, data, append=ask.append)
                if not ask.append:
                    tree.ends(file, ttl_s)
                await volume.publish([file])
            except BaseException:
                if found is None:
                    tree.unlink(file)
                raise
            finally:
                volume.close(file)
            # What others appended meanwhile is not in this tree.
            return {"size": None, "version": None} if file.outdated else {"size": file.size, "version": file.version}

    async def remove(self, caller: Caller, ask: asks.Remove) -> Json:
        """file.remove: a file, or an empty directory if the call says so."""
        place = self._mounts(caller).place(ask.path)
        volume = writable(place)
        async with volume.turn() as tree:
            await volume.remove(tree.check_remove(place.inner, directory=ask.directory))
        return None

    async def rename(self, caller: Caller, ask: asks.Rename) -> Json:
        """file.rename: at once, over a file or an empty directory that has the name, inside one volume."""
        mounts = self._mounts(caller)
        source, target = mounts.place(ask.path), mounts.place(ask.to)
        volume = writable(source)
        if writable(target) is not volume:
            raise CallError(ErrorCode.BAD_REQUEST, "nothing can be renamed from one volume into another")
        async with volume.turn() as tree:
            node, parent, name, over = tree.check_move(source.inner, target.inner)
            self._judge(caller, shown(source.path), ask)
            if isinstance(node, Directory):
                with volume.working():
                    for inner in tree.below(node):
                        below = inner.path[len(source.inner) :]
                        self._judge(caller, shown((*source.path, *below)), ask)
                        self._judge(caller, shown((*target.path, *below)), ask)
            await volume.move(node, parent, name, over)
        return None

    async def mkdir(self, caller: Caller, ask: asks.Mkdir) -> Json:
        """file.mkdir: one directory; the one above it must be there."""
        place = self._mounts(caller).place(ask.path)
        volume = writable(place)
        async with volume.turn() as tree:
            parent, name = tree.check_new(place.inner)
            await volume.make_directory(parent, name)
        return None


def life(ttl_s: float | None, *, allowed: bool) -> float | None:
    """Return how long a file lives. Raises CallError: out of bounds, or not with this kind of call."""
    if ttl_s is None:
        return None
    if not allowed or not 0 < ttl_s <= asks.MAX_TTL_S:
        raise CallError(ErrorCode.BAD_REQUEST, "ttl_s is more than 0 and at most 366 days, and goes with a write")
    return ttl_s


def writable(place: Place) -> Volume:
    """Return the volume of a place that is to be changed. Raises CallError(READ_ONLY)."""
    if place.volume is None or not place.volume.writable:
        raise CallError(ErrorCode.READ_ONLY, "nothing can be changed here")
    return place.volume


def _mounted(place: Place) -> tuple[Volume, tuple[str, ...]]:
    return place.mounted(), place.inner


def _fill(tree: Tree, file: File, data: bytes, *, append: bool) -> None:
    if append:
        content.append(tree, file, data)
    else:
        content.put(tree, file, data)


def _told(volume: Volume, node: Node) -> Json:
    """Return what stat says."""
    if isinstance(node, Directory):
        told: dict[str, Json] = {"type": "directory"}
    else:
        left_s = volume.tree.expires_in_s(node)
        told = {"type": "file", "size": node.size, "version": node.version, "linked": node.linked}
        told |= {"expires_in_s": None if left_s is None else round(left_s, 3)}
    return {**told, "owner": node.owner, "modified_ms": node.modified_ms, "writable": volume.writable}
