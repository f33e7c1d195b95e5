"""What a job could plant below a write grant for the operator's own tools to run: found, and told apart (attack 8).

Called by opener.py before an attempt and after it. Must never follow a link out of the grant, wait for a FIFO, or look
at more than its budget: the tree is written by jobs.

Found are git's configurations and hooks, ``.envrc`` and editor settings, in the granted folder itself and in the
folders up to two levels below it. A mark is a digest of what stands at such a path, or the word for what is not a file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from node_agent.containment import linux

__all__ = ["Plants", "changed", "find", "older"]

#: In a folder of git and in any folder: read-only below a write grant where they exist.
_IN_GIT: Final = ("config", "config.worktree", "hooks")
_PLAIN: Final = (".envrc", ".vscode", ".idea")
#: Where git's hooks are often kept instead: part of the project, so they are told, and stay writable.
_TOLD: Final = (".husky", ".githooks")
#: Folders of git that hold further repositories, one level down.
_NESTED: Final = ("modules", "worktrees")
#: What a folder holds that is a repository without a work tree.
_BARE: Final = frozenset({"HEAD", "objects", "refs"})
_SKIPPED: Final = frozenset({".git", "node_modules", "__pycache__"})
_DEPTH: Final = 2
_MOST_FOLDERS: Final = 2000
_MOST_ENTRIES: Final = 20_000
#: Mounts that one grant may cost.
_MOST_KEPT: Final = 64
#: Content that is read for one mark; larger files are told apart by inode, size and time of change.
_HASHED_BYTES: Final = 64 << 10
_MOST_IN_FOLDER: Final = 500
#: For one search: bytes that are read for marks, and files in folders of settings and hooks.
_MOST_HASHED: Final = 16 << 20
_MOST_FILES: Final = 5000
#: Room for all marks of one grant, in bytes: they travel in one message.
_MARK_ROOM: Final = 48 << 10
_INSIDE: Final = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_MAGICLINKS
_STRICT: Final = _INSIDE | linux.RESOLVE_NO_SYMLINKS
CUT: Final = "(more folders than are looked at)"


@dataclass(slots=True)
class Plants:
    """``kept``: paths below the grant that a mount can keep read-only, with their (device, inode).

    ``marks``: by path below the grant, what stands there. ``cut``: there was more than the budget.
    """

    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass(slots=True)
class _Budget:
    """What one search may still cost: bytes of marks, bytes that are read, and files in settings and hooks."""

    room: int = _MARK_ROOM
    hashed: int = _MOST_HASHED
    files: int = _MOST_FILES


def find(folder: int) -> Plants:
    """Look below an open folder. Never raises for what it finds there: what can't be read has a mark of its own."""
    found, budget = Plants(), _Budget()
    for path in _places(folder, found):
        mark = _mark(folder, path, budget)
        if mark is None or path in found.marks:
            continue
        budget.room -= len(os.fsencode(path)) + len(os.fsencode(mark))
        if budget.room < 0:
            found.cut = True
            break
        if not path.isprintable():
            found.cut = True
            continue
        found.marks[path] = mark
        key = None if path.endswith(_TOLD) else _keepable(folder, path)
        if key is not None and len(found.kept) < _MOST_KEPT:
            found.kept[path] = key
    return found


def changed(folder: int, marks: Mapping[str, str], *, cut: bool = False) -> list[str]:
    """Return the paths that were added, removed or changed since ``marks`` were taken (with ``cut``) of this folder."""
    now, budget = find(folder), _Budget()
    # What was found once is looked at again, whatever hides it from a search by now.
    for path in marks:
        if path not in now.marks and (mark := _mark(folder, path, budget)) is not None:
            now.marks[path] = mark
    paths = sorted(path for path in marks.keys() | now.marks.keys() if marks.get(path) != now.marks.get(path))
    return [*paths, *([CUT] if now.cut and not cut else [])]


def older(path: str, marks: Mapping[str, str], before: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return the marks of a grant at ``path`` as another attempt, which is still alive, found them at ``before``.

    Else two jobs could pass a changed file on to each other, each of which starts with what the other one left.
    """
    out: dict[str, str] = {}
    for name, mark in marks.items():
        whole = f"{path}/{name}"
        if not whole.startswith(f"{before}/"):
            out[name] = mark
            continue
        there = whole[len(before) + 1 :]
        if there in known:
            out[name] = known[there]
        elif not _in_reach(there):
            out[name] = mark
    for there, mark in known.items():
        whole = f"{before}/{there}"
        if whole.startswith(f"{path}/"):
            out.setdefault(whole[len(path) + 1 :], mark)
    return out


def _in_reach(path: str) -> bool:
    """Whether ``find`` looks at this path below its folder."""
    parts = path.split("/")
    above = parts.index(".git") if ".git" in parts else len(parts) - 1
    return above <= _DEPTH


def _places(folder: int, found: Plants) -> Iterator[str]:
    """Yield every path to look at: of the granted folder first, then level by level."""
    yield from _of_repository(folder, ".git")
    yield from _PLAIN + _TOLD
    level, entries = [""], 0
    for depth in range(_DEPTH + 1):
        below: list[str] = []
        for number, at in enumerate(level):
            names, folders = _list(folder, at, _MOST_ENTRIES - entries)
            entries += len(names)
            if number >= _MOST_FOLDERS or entries >= _MOST_ENTRIES:
                found.cut = True
                return
            if names >= _BARE:
                yield from (f"{at}{name}" for name in _IN_GIT)
            if at:
                yield from _of_repository(folder, f"{at}.git")
                yield from (f"{at}{name}" for name in _PLAIN + _TOLD if name in names)
            below += [f"{at}{name}/" for name in folders if name not in _SKIPPED]
        level = sorted(below) if depth < _DEPTH else []


def _of_repository(folder: int, git: str) -> Iterator[str]:
    """Yield what git reads of one repository and of those inside it; ``git`` itself where it is a file or a link."""
    yield git
    yield from (f"{git}/{name}" for name in _IN_GIT)
    for group in _NESTED:
        _, names = _list(folder, f"{git}/{group}/", _MOST_IN_FOLDER)
        yield from (f"{git}/{group}/{name}/{each}" for name in names for each in _IN_GIT)


def _list(folder: int, at: str, most: int) -> tuple[set[str], list[str]]:
    """Return at most ``most`` names of a folder below ``folder``, and which of them are folders; links are none."""
    names: set[str] = set()
    folders: list[str] = []
    try:
        fd = linux.openat2(at or ".", os.O_RDONLY | os.O_DIRECTORY, _STRICT, at=folder)
    except OSError:
        return names, folders
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if len(names) >= most:
                    break
                names.add(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    except OSError:
        pass
    finally:
        os.close(fd)
    return names, sorted(folders)


def _mark(folder: int, path: str, budget: _Budget, *, follow: bool = True) -> str | None:
    """Return what stands at ``path``; None for nothing, and for a ``.git`` that is an ordinary folder."""
    try:
        fd = linux.openat2(path, os.O_PATH | os.O_NOFOLLOW, _INSIDE, at=folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"error {error.errno}"
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISLNK(kind):
            return f"link {os.readlink('', dir_fd=fd)!r} {_followed(folder, path, budget) if follow else ''}"
        if stat.S_ISDIR(kind):
            return None if path.endswith(".git") else _folder_mark(fd, budget)
        return _file_mark(fd, budget)
    finally:
        os.close(fd)


def _followed(folder: int, path: str, budget: _Budget) -> str:
    """Return what a link inside the grant leads to, inside the grant."""
    try:
        fd = linux.openat2(path, os.O_PATH, _INSIDE, at=folder)
    except OSError:
        return "nowhere"
    try:
        return _folder_mark(fd, budget) if stat.S_ISDIR(os.fstat(fd).st_mode) else _file_mark(fd, budget)
    finally:
        os.close(fd)


def _folder_mark(folder: int, budget: _Budget) -> str:
    """Return one digest of a folder: names and marks of all that is in it, two levels down."""
    digest = hashlib.sha256()
    todo = [""]
    seen = 0
    for at in todo:
        names, folders = _list(folder, at, _MOST_IN_FOLDER)
        for name in sorted(names):
            seen += 1
            budget.files -= 1
            if seen > _MOST_IN_FOLDER or budget.files < 0:
                return f"folder cut {digest.hexdigest()}"
            # Links are not followed in here: one could lead back to its own folder.
            mark = "folder" if name in folders else _mark(folder, f"{at}{name}", budget, follow=False)
            digest.update(f"{at}{name!r} {mark}\n".encode())
        if at.count("/") < _DEPTH:
            todo += [f"{at}{name}/" for name in folders]
    return f"folder {digest.hexdigest()}"


def _file_mark(fd: int, budget: _Budget) -> str:
    info = os.fstat(fd)
    what = f"{stat.S_IFMT(info.st_mode):o} {stat.S_IMODE(info.st_mode) & 0o111:o}"
    if stat.S_ISREG(info.st_mode) and info.st_size <= min(_HASHED_BYTES, budget.hashed):
        budget.hashed -= info.st_size
        try:
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            pass
        else:
            try:
                return f"{what} {hashlib.sha256(os.read(again, _HASHED_BYTES + 1)).hexdigest()}"
            finally:
                os.close(again)
    return f"{what} {info.st_ino} {info.st_size} {info.st_ctime_ns}"


def _keepable(folder: int, path: str) -> tuple[int, int] | None:
    """Return (device, inode) of a file or folder that no link leads to; None for all else."""
    try:
        fd = linux.openat2(path, os.O_PATH, _STRICT, at=folder)
    except OSError:
        return None
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    fits = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
    return (info.st_dev, info.st_ino) if fits else None
