"""What files should do, as a plain dictionary of paths. Called by the stateful test of files (test_vfs_machine.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_agent.kernel.vfs.nodes import ENTRY_BYTES

__all__ = ["Inode", "Model", "No", "Open", "Path"]

Path = tuple[str, ...]


@dataclass(eq=False)
class Inode:
    """A file of the model. ``kept``: what the store has of it, None: nothing."""

    data: bytes = b""
    kept: bytes | None = None
    dirty: bool = True
    linked: bool = True
    opens: int = 0
    ends_s: float | None = None


@dataclass(eq=False)
class Open:
    """A descriptor of the model."""

    inode: Inode
    flags: frozenset[str]
    offset: int = 0
    reads: bool = field(init=False)
    writes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reads = "read" in self.flags
        self.writes = bool(self.flags & {"write", "append"})


class No(Exception):
    """What the model refuses a call with."""


class Model:
    """One volume. ``kept``: the store keeps it, and may refuse a publication. ``now_s``: the clock."""

    kept = False
    total = most = 0

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tree: dict[Path, Inode | None] = {(): None}  # None: a directory
        self.fds: list[dict[int, Open]] = [{}, {}]
        self.orphans: set[Inode] = set()

    def tick(self) -> None:
        for path, node in list(self.tree.items()):
            if node is not None and node.ends_s is not None and node.ends_s <= self.now_s:
                self.unlink(path)

    def used(self) -> int:
        named = sum(ENTRY_BYTES + (0 if node is None else len(node.data)) for path, node in self.tree.items() if path)
        return named + sum(len(node.data) for node in self.orphans)

    def room(self, growth: int) -> None:
        if self.used() + growth > self.total:
            raise No("quota")

    def store_room(self, growth: int) -> None:
        """The store counts what it has, which is not what this attempt sees."""
        if not self.kept:
            return
        files = [node.kept for node in self.tree.values() if node is not None and node.kept is not None]
        dirs = sum(node is None for path, node in self.tree.items() if path)
        if growth > 0 and sum(map(len, files)) + ENTRY_BYTES * (len(files) + dirs) + growth > self.total:
            raise No("quota")

    def change(self, inode: Inode, data: bytes, changed: bool) -> None:
        if not changed:
            return
        if len(data) > self.most:
            raise No("too_large")
        if len(data) > len(inode.data):
            self.room(len(data) - len(inode.data))
        inode.data, inode.dirty = data, True

    def publish(self, inode: Inode) -> None:
        if not (self.kept and inode.linked and inode.dirty):
            return
        self.store_room(len(inode.data) - len(inode.kept or b"") + (ENTRY_BYTES if inode.kept is None else 0))
        inode.kept, inode.dirty = inode.data, False

    def closed(self, inode: Inode) -> None:
        inode.opens -= 1
        if inode.opens:
            return
        self.orphans.discard(inode)
        if self.kept and inode.linked and inode.dirty:
            if inode.kept is None:
                self.unlink(next(path for path, node in self.tree.items() if node is inode))
            else:
                inode.data, inode.dirty = inode.kept, False

    def unlink(self, path: Path) -> None:
        node = self.tree.pop(path)
        if node is not None:
            node.linked = False
            if node.opens:
                self.orphans.add(node)

    def below(self, path: Path) -> list[Path]:
        return [one for one in self.tree if len(one) > len(path) and one[: len(path)] == path]

    def moves(self, source: Path, target: Path) -> bool:
        """Return whether a rename changes anything."""
        if self.look_for(source) == "nothing":
            raise No("not_found")
        there = self.look_for(target)
        if target[: len(source)] == source and len(target) > len(source):
            raise No("bad_request")
        if there == "file" and self.tree[source] is None:
            raise No("not_a_directory")
        if there == "directory" and self.tree[source] is not None:
            raise No("is_a_directory")
        if source != target and there == "directory" and self.below(target):
            raise No("not_empty")
        return source != target

    def path(self, name: str) -> Path:
        return tuple(name.split("/"))

    def look_for(self, path: Path) -> str:
        """Return what is there; the way to it must consist of directories."""
        self.tick()
        for depth in range(1, len(path)):
            if path[:depth] not in self.tree:
                raise No("not_found")
            if self.tree[path[:depth]] is not None:
                raise No("not_a_directory")
        if path not in self.tree:
            return "nothing"
        return "directory" if self.tree[path] is None else "file"

    def descriptor(self, who: int, fd: int) -> Open:
        self.tick()
        if fd not in self.fds[who]:
            raise No("bad_descriptor")
        return self.fds[who][fd]

    def number(self, who: int, fd: int) -> int:
        """Return the descriptor that a drawn number means."""
        there = sorted(self.fds[who])
        return there[fd % len(there)] if there and fd < 14 else fd
