"""What no grant may touch: protected paths, compared by device and inode and by their place in the file system.

Called by paths.py with an opened grant. Must never decide by the spelling of a path alone: a bind mount or a symlink
gives the same folder another one (attack 1).

A grant touches a protected path if it equals it, contains it, or lies inside it. Ancestors count because a job that can
rename one can put a tree of its own in the old place. Two comparisons, either is enough: (device, inode) of the grant
and of its parents, and (device, path inside the file system) as mountinfo tells it, which also knows a bind mount of a
folder *below* a protected one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import cast

from node_agent.containment import mounts
from node_agent.containment.mounts import MountEntry

__all__ = ["Fence", "place_of"]

Key = tuple[int, int]
Place = tuple[str, PurePosixPath]
MAX_LINKS = 40
MAX_DEPTH = 2048


@dataclass(frozen=True, slots=True)
class Fence:
    """A set of protected paths, resolved once. Values are the paths as given, for messages."""

    objects: dict[Key, str]
    around: dict[Key, str]
    places: dict[Place, str]

    @classmethod
    def around_paths(cls, paths: Iterable[str | os.PathLike[str]]) -> Fence:
        """Resolve every path. One that does not exist yet still guards the folders in which it would be made."""
        objects: dict[Key, str] = {}
        around: dict[Key, str] = {}
        places: dict[Place, str] = {}
        known = mounts.table()
        for path in dict.fromkeys(os.path.abspath(each) for each in paths):
            trail, found = _trail(path)
            for key in trail[:-1] if found else trail:
                around.setdefault(key, path)
            if found:
                objects.setdefault(trail[-1], path)
                place = _place_of_path(path, known)
                if place is not None:
                    places.setdefault(place, path)
        return cls(objects, around, places)

    def dump(self) -> dict[str, object]:
        """Return this as plain JSON values: what is known is taken along, no path is resolved a second time."""
        return {
            "objects": [[*key, name] for key, name in self.objects.items()],
            "around": [[*key, name] for key, name in self.around.items()],
            "places": [[device, str(path), name] for (device, path), name in self.places.items()],
        }

    @classmethod
    def load(cls, plain: object) -> Fence:
        """Return what ``dump`` wrote."""
        parts = cast("dict[str, list[tuple[int, int, str]]]", plain)
        places = cast("dict[str, list[tuple[str, str, str]]]", plain)["places"]
        return cls(
            {(device, inode): name for device, inode, name in parts["objects"]},
            {(device, inode): name for device, inode, name in parts["around"]},
            {(device, PurePosixPath(path)): name for device, path, name in places},
        )

    def touched_by(self, fd: int, known: dict[int, MountEntry]) -> str | None:
        """Return the protected path that the opened grant equals, contains or lies in; None if it is clear."""
        info = os.fstat(fd)
        key = (info.st_dev, info.st_ino)
        if key in self.objects or key in self.around:
            return self.objects.get(key) or self.around[key]
        for parent in _parents(fd):
            if parent in self.objects:
                return self.objects[parent]
        place = place_of(fd, known)
        return None if place is None else self._overlap(place)

    def _overlap(self, place: Place) -> str | None:
        device, path = place
        for (other, protected), name in self.places.items():
            if other == device and (path.is_relative_to(protected) or protected.is_relative_to(path)):
                return name
        return None


def place_of(fd: int, known: dict[int, MountEntry]) -> Place | None:
    """Return (device, path inside that file system) of an open descriptor; None if its mount is unknown."""
    entry = mounts.entry_of(fd, known)
    if entry is None:
        return None
    path = PurePosixPath(os.readlink(f"/proc/self/fd/{fd}"))
    if not path.is_relative_to(entry.point):
        return None
    return entry.device, PurePosixPath(entry.root) / path.relative_to(entry.point)


def _place_of_path(path: str, known: dict[int, MountEntry]) -> Place | None:
    try:
        fd = os.open(os.path.realpath(path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return place_of(fd, known)
    finally:
        os.close(fd)


def _trail(path: str) -> tuple[list[Key], bool]:
    """Walk a path like the kernel does, links included; return every object passed and whether the end exists."""
    passed = [_key("/")]
    current = "/"
    todo = [part for part in path.split("/") if part]
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            current = os.path.dirname(current)
            continue
        candidate = os.path.join(current, part)
        try:
            info = os.lstat(candidate)
        except OSError:
            return passed, False
        if stat.S_ISLNK(info.st_mode):
            links += 1
            if links > MAX_LINKS:
                return passed, False
            target = os.readlink(candidate)
            current = "/" if target.startswith("/") else current
            todo = [each for each in target.split("/") if each and each != "."] + todo
            continue
        current = candidate
        passed.append((info.st_dev, info.st_ino))
    return passed, True


def _parents(fd: int) -> list[Key]:
    """(device, inode) of every folder above an opened one, up to the root of this mount namespace.

    A regular file has no ``..``: its folder is opened by name and must still hold this very file. Raises OSError.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    current = os.open("..", flags, dir_fd=fd) if stat.S_ISDIR(os.fstat(fd).st_mode) else _folder_of(fd, flags)
    out = [_key_of(current)]
    try:
        # A bind mount may have the same inode as its parent, so the end is known by its name, not by a repeated key.
        while os.readlink(f"/proc/self/fd/{current}") != "/":
            above = os.open("..", flags, dir_fd=current)
            os.close(current)
            current = above
            out.append(_key_of(current))
            if len(out) > MAX_DEPTH:
                raise OSError(errno.ELOOP, "the folder is nested too deeply, or no longer below the root")
    finally:
        os.close(current)
    return out


def _folder_of(fd: int, flags: int) -> int:
    path = os.readlink(f"/proc/self/fd/{fd}")
    folder = os.open(os.path.dirname(path), flags)
    try:
        if os.path.samestat(os.stat(os.path.basename(path), dir_fd=folder, follow_symlinks=False), os.fstat(fd)):
            return folder
    except BaseException:
        os.close(folder)
        raise
    os.close(folder)
    raise FileNotFoundError(errno.ENOENT, "the file was replaced while it was opened", path)


def _key(path: str) -> Key:
    info = os.stat(path)
    return info.st_dev, info.st_ino


def _key_of(fd: int) -> Key:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
