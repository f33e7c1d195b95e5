"""One volume as a tree of files and directories: POSIX rules for names, one count of everything it holds. Pure.

Called by the volumes. Each change of names has a check, which changes nothing, and a deed, so that the store can be
asked in between. Must never hold more than its bounds, and never show a file whose time is over.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs.nodes import ENTRY_BYTES, Bounds, Directory, File, Node
from node_agent.kernel.vfs.paths import MAX_DEPTH, MAX_PATH_BYTES, Parts, shown
from runner.wire.calls import ErrorCode

__all__ = ["Tree"]

#: What the longest mount adds to a path that begins in its tree.
_MOUNT_NAMES: Final = 2
_MOUNT_BYTES: Final = 16


class Tree:
    """A tree. ``fixed``: directories that are always there. ``clock``: seconds, never back; ``wall``: Unix ms."""

    def __init__(
        self,
        bounds: Bounds,
        clock: Callable[[], float],
        wall: Callable[[], int],
        *,
        fixed: tuple[str, ...] = (),
        kept: bool = False,
    ) -> None:
        self.bounds = bounds
        self.wall = wall
        self.clock = clock
        self.kept = kept
        self._fixed = fixed
        self.root = self._bare()
        self.used_bytes = 0
        self.held_bytes = 0
        self.entries = 0
        self._ends: list[tuple[float, int, File]] = []
        self.count = itertools.count(1)
        #: Files with open descriptors.
        self.open: set[File] = set()

    # Looking

    def find(self, parts: Parts) -> Node:
        """Return what is there. Raises CallError(NOT_FOUND, NOT_A_DIRECTORY)."""
        self.tick()
        node: Node = self.root
        for index, part in enumerate(parts):
            if isinstance(node, File):
                raise CallError(ErrorCode.NOT_A_DIRECTORY, f"{shown(parts[:index])} is a file")
            child = node.children.get(part)
            if child is None:
                raise CallError(ErrorCode.NOT_FOUND, f"there is no {shown(parts[: index + 1])}")
            node = child
        return node

    def file(self, parts: Parts) -> File:
        """Return the file that is there. Raises CallError."""
        node = self.find(parts)
        if isinstance(node, Directory):
            raise CallError(ErrorCode.IS_A_DIRECTORY, f"{shown(parts)} is a directory")
        return node

    def directory(self, parts: Parts) -> Directory:
        """Return the directory that is there. Raises CallError."""
        node = self.find(parts)
        if isinstance(node, File):
            raise CallError(ErrorCode.NOT_A_DIRECTORY, f"{shown(parts)} is a file")
        return node

    def place(self, parts: Parts) -> tuple[Directory, str, Node | None]:
        """Return where a name is or would be: directory, name, what has it now. Raises CallError: no such directory."""
        if not parts:
            return self.root, "", self.root
        parent = self.directory(parts[:-1])
        return parent, parts[-1], parent.children.get(parts[-1])

    def expires_in_s(self, file: File) -> float | None:
        """How long the file is there yet, in seconds; None: no end."""
        return None if file.expires_s is None else max(0.0, file.expires_s - self.clock())

    def below(self, top: Directory) -> Iterator[Node]:
        """Everything below a directory, directories before what is in them."""
        waiting = [top]
        while waiting:
            for child in waiting.pop().children.values():
                yield child
                if isinstance(child, Directory):
                    waiting.append(child)

    def tick(self) -> None:
        """Take away the files whose time is over."""
        now = self.clock()
        while self._ends and self._ends[0][0] <= now:
            end, _, file = heapq.heappop(self._ends)
            if file.linked and file.expires_s == end:
                self.unlink(file)

    # Checks of changes of names: they change nothing

    def check_room(self, growth: int, entries: int = 0) -> None:
        """Raise CallError(QUOTA) unless the volume takes ``growth`` more bytes and ``entries`` more entries."""
        if self.used_bytes + growth + entries * ENTRY_BYTES > self.bounds.total_bytes:
            raise CallError(ErrorCode.QUOTA, f"the volume holds at most {self.bounds.total_bytes} bytes")
        if self.entries + entries > self.bounds.entries:
            raise CallError(ErrorCode.QUOTA, f"the volume holds at most {self.bounds.entries} files and directories")

    def check_new(self, parts: Parts) -> tuple[Directory, str]:
        """Return where a new entry goes. Raises CallError: it exists, its directory does not, or there is no room."""
        parent, name, found = self.place(parts)
        if found is not None:
            raise CallError(ErrorCode.EXISTS, f"{shown(parts)} exists")
        self.check_room(0, 1)
        return parent, name

    def check_remove(self, parts: Parts, *, directory: bool) -> Node:
        """Return what may be removed. Raises CallError: of the other kind, not empty, or always there."""
        node = self.directory(parts) if directory else self.file(parts)
        if isinstance(node, Directory):
            if node.fixed:
                raise CallError(ErrorCode.READ_ONLY, f"{shown(parts)} is always there")
            if node.children:
                raise CallError(ErrorCode.NOT_EMPTY, f"{shown(parts)} is not empty")
        return node

    def check_move(self, source: Parts, target: Parts) -> tuple[Node, Directory, str, Node | None]:
        """Return (what moves, new directory, new name, what it replaces). Raises CallError. Source: rename(2)."""
        node = self.find(source)
        parent, name, found = self.place(target)
        if (isinstance(node, Directory) and node.fixed) or (isinstance(found, Directory) and found.fixed):
            raise CallError(ErrorCode.READ_ONLY, "a mount can't be moved or replaced")
        if len(target) > len(source) and target[: len(source)] == source:
            raise CallError(ErrorCode.BAD_REQUEST, "a directory can't be moved into itself")
        if isinstance(node, Directory) and isinstance(found, File):
            raise CallError(ErrorCode.NOT_A_DIRECTORY, f"{shown(target)} is a file")
        if isinstance(node, File) and isinstance(found, Directory):
            raise CallError(ErrorCode.IS_A_DIRECTORY, f"{shown(target)} is a directory")
        if isinstance(found, Directory) and found is not node and found.children:
            raise CallError(ErrorCode.NOT_EMPTY, f"{shown(target)} is not empty")
        levels, size = _reach(node) if isinstance(node, Directory) else (0, 0)
        too_deep = len(target) + levels > MAX_DEPTH - _MOUNT_NAMES
        if levels and (too_deep or len(shown(target).encode()) + size > MAX_PATH_BYTES - _MOUNT_BYTES):
            raise CallError(ErrorCode.BAD_REQUEST, "what is in the directory would get too long a path")
        return node, parent, name, found

    # Deeds

    def make_file(self, parent: Directory, name: str, owner: str, content: bytearray | None) -> File:
        """Put a new file there; ``content`` None: the store has it."""
        file = File(name, parent, owner, self.wall(), content, 0 if content is None else len(content))
        parent.children[name] = file
        self.entries += 1
        self.used_bytes += ENTRY_BYTES + file.size
        self.held_bytes += file.held
        if not self.kept:
            file.version = next(self.count)
        return file

    def make_directory(self, parent: Directory, name: str, owner: str) -> Directory:
        """Put a new directory there."""
        made = Directory(name, parent, owner, self.wall())
        parent.children[name] = made
        self.entries += 1
        self.used_bytes += ENTRY_BYTES
        return made

    def unlink(self, node: Node) -> None:
        """Take the name of a file or an empty directory away; a file that is open is counted until it is closed."""
        if node.parent is None or node.parent.children.get(node.name) is not node:
            return
        del node.parent.children[node.name]
        self.entries -= 1
        self.used_bytes -= ENTRY_BYTES
        if isinstance(node, File):
            node.linked = False
            if node.opens == 0:
                self._forget(node)

    def move(self, node: Node, parent: Directory, name: str) -> None:
        """Give a node another place, over what is there."""
        replaced = parent.children.get(name)
        if replaced is node or node.parent is None:
            return
        if replaced is not None:
            self.unlink(replaced)
        del node.parent.children[node.name]
        node.parent, node.name = parent, name
        parent.children[name] = node

    def ends(self, file: File, ttl_s: float | None) -> None:
        """Let a file end in ``ttl_s`` seconds, or (None) never."""
        file.expires_s = None if ttl_s is None else self.clock() + ttl_s
        self._remember_end(file)

    def opened(self, file: File) -> None:
        """One descriptor more."""
        file.opens += 1
        self.open.add(file)

    def closed(self, file: File) -> None:
        """One descriptor less; the last one lets go of what has no name, and of what the store has, too."""
        file.opens -= 1
        if file.opens > 0:
            return
        self.open.discard(file)
        if not file.linked:
            self._forget(file)
        elif self.kept:
            self._drop(file)

    def renew(self) -> None:
        """Begin an empty tree in place of this one; who calls it gives the open files their places again (merge.py)."""
        self.root = self._bare()
        self.entries = self.used_bytes = self.held_bytes = 0
        self._ends = []

    def adopt(self, file: File, parent: Directory) -> None:
        """Give an open file of before ``renew`` its place again."""
        file.parent = parent
        parent.children[file.name] = file
        self.entries += 1
        self.used_bytes += ENTRY_BYTES + file.size
        self.held_bytes += file.held
        self._remember_end(file)

    @contextmanager
    def counted(self, file: File) -> Iterator[None]:
        """Around every change of a file's content and size: the volume's counts follow."""
        size, held = file.size, file.held
        yield
        self.used_bytes += file.size - size
        self.held_bytes += file.held - held

    def _drop(self, file: File) -> None:
        """Leave a kept file to the store; what was not published is gone, and one that never was goes with it."""
        with self.counted(file):
            file.size -= len(file.tail)
            file.content = None
            file.tail.clear()
            file.rewritten = False
        if file.version == 0:
            self.unlink(file)

    def _forget(self, file: File) -> None:
        """Nobody can reach the file any more."""
        with self.counted(file):
            file.content, file.size = bytearray(), 0
            file.tail.clear()
            file.rewritten = False

    def _bare(self) -> Directory:
        root = Directory("", None, "", self.wall(), fixed=True)
        root.children = {name: Directory(name, root, "", root.modified_ms, fixed=True) for name in self._fixed}
        return root

    def _remember_end(self, file: File) -> None:
        if file.expires_s is None:
            return
        heapq.heappush(self._ends, (file.expires_s, next(self.count), file))
        if len(self._ends) > 4 * self.bounds.entries:
            self._ends = [one for one in self._ends if one[2].linked and one[2].expires_s == one[0]]
            heapq.heapify(self._ends)


def _reach(top: Directory) -> tuple[int, int]:
    """Return how many levels, and how many bytes, the paths below a directory have more than its own at most."""
    levels = size = 0
    waiting = [(top, 0, 0)]
    while waiting:
        directory, depth, length = waiting.pop()
        for name, child in directory.children.items():
            longer = length + 1 + len(name.encode())
            levels, size = max(levels, depth + 1), max(size, longer)
            if isinstance(child, Directory):
                waiting.append((child, depth + 1, longer))
    return levels, size
