"""The rows around the mounts of an attempt's view, for a plan without grants; view.py builds all others.

Called by outfit.py in the mould, and in the worker for paths that no plan named before. Must make exactly what view.py
makes: a view that differs between jobs with and without grants would be two sandboxes.

In a mould whose root is the stage (level A) the rows keep that root: a fresh tmpfs on /run hides the staged trees, and
those that the plan names are attached. Elsewhere they copy the parts into a fresh root and enter it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Final, TypeAlias

from node_agent.containment import linux, view
from node_agent.containment.script import AT_FDCWD, Row, row, written
from node_agent.containment.view import Prepared
from runner.wire.frames import FD_KERNEL

__all__ = ["Trees", "in_new_root", "in_own_root"]

#: Rows before and after the mounts of a view, and the descriptor that is free between them.
Trees: TypeAlias = tuple[list[Row], list[Row], int]
#: OPEN_TREE_CLONE, AT_RECURSIVE.
_CLONE_TREE: Final = 1 | os.O_CLOEXEC | 0x8000
_FROM_EMPTY_PATH: Final = 0x04
_EXCLUSIVE: Final = os.O_CREAT | os.O_EXCL
_PLAIN: Final = linux.NOSUID | linux.NODEV


def in_own_root(prepared: Prepared, shown: Sequence[tuple[str, str, bool]], first: int) -> Trees:
    """Take the staged trees before a tmpfs on /run hides them, and attach each where it belongs."""
    before, after = [], []
    made = {"/dev", *(top.rstrip("/") for top in view.FRESH)}
    for fd, (place, tree, is_folder) in enumerate(shown, first):
        before.append(row("view", "open_tree", AT_FDCWD, os.fsencode(tree), _CLONE_TREE, expect=fd))
        if place.startswith(view.FRESH):
            after += _point(place, is_folder, made, first + len(shown))
        after.append(row("view", "move_mount", fd, b"", AT_FDCWD, os.fsencode(place), _FROM_EMPTY_PATH))
    before.append(row("view", "mount", b"tmpfs", b"/run", b"tmpfs", _PLAIN, view.SMALL.encode()))
    after += (row("view", "close_range", first, FD_KERNEL - 1, 0), _read_only(b"/run"))
    return before, after, first + len(shown)


def in_new_root(prepared: Prepared, shown: Sequence[tuple[str, str, bool]], first: int) -> Trees:
    """Copy the staged parts into a fresh root, attach the trees, and make it the root: view.build without grants."""
    root = os.fsencode(f"{prepared.stage}/{view.ROOT}")
    before = [row("view", "mount", b"tmpfs", root, b"tmpfs", _PLAIN, view.SMALL.encode()), row("view", "chdir", root)]
    for name in prepared.folders:
        before.append(row("view", "mkdirat", AT_FDCWD, os.fsencode(name), 0o755))
        before += _attached(f"{prepared.stage}/{name}", name, first)
    before += [row("view", "symlinkat", os.fsencode(to), AT_FDCWD, os.fsencode(name)) for name, to in prepared.links]
    before += [row("view", "mkdirat", AT_FDCWD, name, 0o755) for name in (b"run", b"work", b"tmp")]
    made = {*prepared.folders, *(name for name, _ in prepared.links), "run", "work", "tmp", "dev/shm"}
    after: list[Row] = []
    for place, tree, is_folder in shown:
        after += _point(place[1:], is_folder, made, first)
        after += _attached(tree, place[1:], first)
    after += (
        row("root", "pivot_root", b".", b"."),
        row("root", "umount2", b".", linux.DETACH),
        row("root", "chdir", b"/"),
        _read_only(b"/"),
    )
    return before, after, first


def _attached(tree: str, place: str, fd: int) -> list[Row]:
    return [
        row("view", "open_tree", AT_FDCWD, os.fsencode(tree), _CLONE_TREE, expect=fd),
        row("view", "move_mount", fd, b"", AT_FDCWD, os.fsencode(place), _FROM_EMPTY_PATH),
        row("view", "close", fd),
    ]


def _read_only(path: bytes) -> Row:
    return row("view", "mount_setattr", AT_FDCWD, path, 0, struct.pack("QQQQ", linux.RDONLY, 0, 0, 0), 32)


def _point(place: str, is_folder: bool, made: set[str], fd: int) -> list[Row]:
    """Make a mount point and the folders above it, but for those that are ``made`` already."""
    rows = []
    names = place.split("/")
    for count in range(1, len(names) + is_folder):
        folder = "/".join(names[:count])
        if folder and folder not in made:
            made.add(folder)
            rows.append(row("view", "mkdirat", AT_FDCWD, os.fsencode(folder), 0o755))
    if not is_folder:
        rows += written("view", os.fsencode(place), b"", fd, _EXCLUSIVE)
    return rows
