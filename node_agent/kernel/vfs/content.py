"""Bytes of an open file: read, write, append, cut. Pure; all or nothing.

Called by the files part for descriptors. Must never change a file that it then refuses, and never grow a volume beyond
its bounds.
"""

from __future__ import annotations

from node_agent.kernel.errors import CallError
from node_agent.kernel.vfs.nodes import File
from node_agent.kernel.vfs.tree import Tree
from runner.wire.calls import ErrorCode

__all__ = ["append", "fill", "loaded", "put", "read", "truncate", "write"]


def loaded(file: File) -> bytearray:
    """Return the content. Raises CallError: the store had it, and somebody took it away there."""
    if file.content is None:
        raise CallError(ErrorCode.CONFLICT, "the file was removed or changed elsewhere: open it again")
    return file.content


def read(file: File, offset: int, count: int) -> bytes:
    """Return up to ``count`` bytes from ``offset`` on; none at the end."""
    return bytes(loaded(file)[offset : offset + count])


def write(tree: Tree, file: File, offset: int, data: bytes) -> None:
    """Put bytes at ``offset``; a gap before it is filled with zeros. Raises CallError(QUOTA, TOO_LARGE)."""
    if not data:
        return
    content = loaded(file)
    end = max(file.size, offset + len(data))
    _check(tree, file, end, end - file.size)
    with tree.counted(file):
        if offset > len(content):
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data
        file.size = len(content)
        file.tail.clear()
        _changed(tree, file)


def append(tree: Tree, file: File, data: bytes) -> None:
    """Add bytes at the end, in one piece. Raises CallError(QUOTA, TOO_LARGE)."""
    if not data:
        return
    tails = tree.kept and not file.rewritten and file.version > 0
    _check(tree, file, file.size + len(data), len(data) * (2 if tails and file.content is not None else 1))
    with tree.counted(file):
        if file.content is not None:
            file.content += data
        if tails:
            file.tail += data
        file.size += len(data)
        _changed(tree, file, rewritten=not tails)


def truncate(tree: Tree, file: File, size: int) -> None:
    """Cut the file, or fill it up with zeros. Raises CallError(QUOTA, TOO_LARGE)."""
    content = loaded(file) if size else bytearray()
    _check(tree, file, size, max(0, size - file.size))
    with tree.counted(file):
        if not size:
            file.content = content
        del content[size:]
        content.extend(bytes(size - len(content)))
        file.size = size
        file.tail.clear()
        _changed(tree, file)


def put(tree: Tree, file: File, data: bytes) -> None:
    """Replace the whole content. Raises CallError(QUOTA, TOO_LARGE)."""
    _check(tree, file, len(data), max(0, len(data) - file.held))
    with tree.counted(file):
        file.content, file.size = bytearray(data), len(data)
        file.tail.clear()
        _changed(tree, file)


def fill(tree: Tree, file: File, content: bytes) -> None:
    """Hold what the store has of a file, with what was appended since. Raises CallError(QUOTA): too much is open."""
    if tree.held_bytes + len(content) + len(file.tail) > tree.bounds.held_bytes:
        raise CallError(ErrorCode.QUOTA, "too much is open at once: close some files first")
    with tree.counted(file):
        file.content = bytearray(content) + file.tail
        file.size = len(file.content)


def _check(tree: Tree, file: File, size: int, more: int) -> None:
    """Raise CallError unless the file may have ``size`` bytes and the volume hold ``more`` in memory."""
    if size > tree.bounds.file_bytes:
        raise CallError(ErrorCode.TOO_LARGE, f"a file has at most {tree.bounds.file_bytes} bytes here")
    tree.tick()
    if size > file.size:
        tree.check_room(size - file.size)
    if tree.held_bytes + more > tree.bounds.held_bytes:
        raise CallError(ErrorCode.QUOTA, "too much is open at once: close or sync some files first")


def _changed(tree: Tree, file: File, *, rewritten: bool = True) -> None:
    file.rewritten = tree.kept and (file.rewritten or rewritten)
    if not tree.kept:
        file.version = next(tree.count)
    file.changes += 1
    file.modified_ms = tree.wall()
