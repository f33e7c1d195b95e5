"""A fresh private folder for each attempt where no file system of its own can be mounted.

Called by the slots of levels C to F. Must never follow a link on the way, reuse a folder, or remove one before the
proof that no process of the attempt is left. Nothing bounds what a job writes here: an asked ``disk`` is refused there.

Under root the folders lie below /var/tmp, because a job's own uid can't pass the agent's private folders.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node_agent.containment import sweep
from node_agent.containment.errors import SpawnError

__all__ = ["Workspaces"]

SHARED: Final = Path("/var/tmp/ringfence")  # noqa: S108 - made and checked below: root's, writable by root alone
_TRIES: Final = 20
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Workspaces:
    """The folders of one agent, all below ``path``."""

    path: Path

    @classmethod
    def of(cls, node_home: Path, *, shared: Path = SHARED) -> Workspaces:
        """Return the place of this agent's workspaces."""
        if os.geteuid() != 0:
            return cls(node_home / "work")
        digest = hashlib.sha256(os.fsencode(os.path.realpath(node_home))).hexdigest()[:16]
        return cls(shared / f"{node_home.name}-{digest}")

    def sweep(self) -> list[str]:
        """Remove what a former agent of this home and name left; say what was found."""
        try:
            parent = self._open()
        except FileNotFoundError:
            return []
        try:
            found = sorted(os.listdir(parent))
            for name in found:
                sweep.remove_tree(name, dir_fd=parent)
        finally:
            os.close(parent)
        return [f"workspace {name}" for name in found]

    def make(self, name: str, uid: int, gid: int) -> int:
        """Make the folder for one attempt and return it, opened. Raises SpawnError."""
        try:
            parent = self._stand()
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
                fd = os.open(name, _FOLDER, dir_fd=parent)
                if os.geteuid() == 0:
                    os.fchown(fd, uid, gid)
                return fd
            finally:
                os.close(parent)
        except OSError as error:
            raise SpawnError(f"no workspace in {self.path}: {error}") from error

    def remove(self, name: str) -> None:
        """Remove the folder of an attempt, after the proof. Raises OSError."""
        parent = self._open()
        try:
            sweep.remove_tree(name, dir_fd=parent)
        finally:
            os.close(parent)

    def close(self) -> None:
        """Remove the place itself if it is empty. Idempotent."""
        for folder in (self.path, self.path.parent) if os.geteuid() == 0 else ():
            try:
                folder.rmdir()
            except OSError:
                return

    def _stand(self) -> int:
        """Make the place and open it; another agent's end may take the shared folder away in between."""
        for left in reversed(range(_TRIES)):
            try:
                self._make_parents()
                return self._open()
            except FileNotFoundError:
                if not left:
                    raise
        raise FileNotFoundError(self.path)

    def _make_parents(self) -> None:
        parents = (self.path.parent, self.path) if os.geteuid() == 0 else (self.path,)
        for folder in parents:
            try:
                folder.mkdir(mode=0o700 if os.geteuid() else 0o711)
            except FileExistsError:
                continue
            folder.chmod(0o700 if os.geteuid() else 0o711)

    def _open(self) -> int:
        """Open the place; under root its parent is world-writable, so what was opened is checked."""
        for folder in (self.path.parent, self.path):
            fd = os.open(folder, _FOLDER)
            info = os.fstat(fd)
            if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o022:
                os.close(fd)
                raise PermissionError(f"{folder} must belong to the agent's user and be writable by it alone")
            if folder != self.path:
                os.close(fd)
        return fd
