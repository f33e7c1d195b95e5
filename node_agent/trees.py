"""What lies in the host's trees that every job sees: sockets, and folders in which others could put some.

Called by ground.py at the agent's start, for task paths and the agent's own environment. Must never follow a link, and
never call a tree clean that it could not read to its end.

A read-only mount does not keep a job from connecting to a socket below it (attack 16). So a node with a socket in such
a tree does not start, and where others than root and this user may make one later, jobs get no Unix sockets.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from dataclasses import dataclass

from node_agent.errors import SetupError

__all__ = ["Look", "look"]


@dataclass(frozen=True, slots=True)
class Look:
    """``sockets`` found; ``loose``: by tree the first folder where others than root and this user may write.

    A folder that this user can't list counts as such.
    """

    sockets: tuple[str, ...]
    loose: dict[str, str]


def look(trees: Iterable[str]) -> Look:
    """Walk every tree. Raises SetupError for a folder that can't be read."""
    sockets: list[str] = []
    loose: dict[str, str] = {}
    for tree in trees:
        waiting = [tree]
        while waiting:
            folder = waiting.pop()
            try:
                if _others_write(os.stat(folder)):
                    loose.setdefault(tree, folder)
                _list(folder, waiting, sockets)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone since it was listed; a tree that is not there is told where it is needed
            except PermissionError:
                loose.setdefault(tree, folder)  # what lies there is unknown, and a job may know a name in it
            except OSError as error:
                raise SetupError(f"{folder}, which jobs see, can't be looked through: {error.strerror}") from None
    return Look(tuple(sockets), loose)


def _list(folder: str, folders: list[str], sockets: list[str]) -> None:
    """Add what lies in ``folder``. The kernel tells the kinds with the names: only what is rare is looked at."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif not entry.is_file(follow_symlinks=False) and stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                sockets.append(entry.path)


def _others_write(info: os.stat_result) -> bool:
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & stat.S_IWOTH:
        return True
    return bool(info.st_mode & stat.S_IWGRP) and info.st_gid != 0 and not _own_group(info.st_gid)


def _own_group(gid: int) -> bool:
    """Whether the group is this user's alone: the one of its name that systems make, without members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
