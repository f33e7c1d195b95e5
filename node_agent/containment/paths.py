"""Path grants on the host's side: opens, checks and clones what a job may see at the same path in its view.

Called by opener.py (opens and checks, in a process of its own) and the stage (clones). Must never open a path twice:
what was checked is what is cloned. It runs with the agent's rights, so it refuses whatever it does not understand.

A grant's path has no symlink in it, is a folder or a regular file of a real file system, and is clear of the fence.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from node_agent.containment import linux, mounts
from node_agent.containment.errors import GrantRefused
from node_agent.containment.fence import Fence
from node_agent.containment.mounts import MountEntry

__all__ = ["Mode", "Opened", "Protected", "clone_mount", "open_grant"]

Mode = Literal["read", "write"]

#: File systems that are windows into the kernel or into devices: never granted.
PSEUDO = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs"),
        *("efivarfs", "fuse.lxcfs", "fusectl", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs"),
        *("selinuxfs", "smackfs", "sysfs", "tracefs"),
    }
)
UNIT_FOLDERS = ("/etc/systemd", "/run/systemd", "/usr/lib/systemd", "/lib/systemd", "/usr/local/lib/systemd")
STRICT = linux.RESOLVE_NO_MAGICLINKS | linux.RESOLVE_NO_SYMLINKS


@dataclass(frozen=True, slots=True)
class Protected:
    """What no grant may touch. ``closed``: neither read nor write; ``kept``: no write."""

    closed: Fence
    kept: Fence

    @classmethod
    def collect(
        cls,
        *,
        private: Iterable[str | os.PathLike[str]] = (),
        extra: Iterable[str | os.PathLike[str]] = (),
    ) -> Protected:
        """Resolve the protected paths of this host once, at the agent's start.

        ``private``: homes, keystore, keys, store, client.json, policy, trust.toml: no grant of either mode.
        ``extra``: task paths, unit files elsewhere, other daemons' environments: no write grant. This process's Python,
        this package, systemd's unit folders and the cgroup file systems are added by themselves.
        """
        private = list(private)
        return cls(Fence.around_paths(private), Fence.around_paths([*private, *extra, *_own_code(), *_system()]))

    def dump(self) -> dict[str, object]:
        """Return this as plain JSON values, for the opener."""
        return {"closed": self.closed.dump(), "kept": self.kept.dump()}

    @classmethod
    def load(cls, plain: object) -> Protected:
        """Return what ``dump`` wrote."""
        fences = cast("dict[str, object]", plain)
        return cls(Fence.load(fences["closed"]), Fence.load(fences["kept"]))


@dataclass(slots=True)
class Opened:
    """One checked grant: an O_PATH descriptor, and who owns what it names. Close it after the clone."""

    fd: int
    path: str
    real_path: str
    mode: Mode
    kind: Literal["dir", "file"]
    owner_uid: int
    owner_gid: int
    device: int
    inode: int

    def facts(self) -> dict[str, object]:
        """Return everything but the descriptor, as plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "fd"}

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_grant(path: str, mode: Mode, *, protected: Protected) -> Opened:
    """Open a granted path and check what was opened.

    Raises:
        GrantRefused: ``policy`` for a path that is protected or is no plain path, ``unenforceable`` where it can't be
            opened or checked here. The message says what to do.
    """
    _check_form(path)
    fd = _open(path)
    try:
        return _checked(fd, path, mode, protected)
    except OSError as error:
        os.close(fd)
        raise GrantRefused("unenforceable", f"{path}: can't be checked: {os.strerror(error.errno or 0)}") from error
    except BaseException:
        os.close(fd)
        raise


def clone_mount(opened: Opened, mode: Mode, idmap_fd: int | None, *, job_uid: int | None = None) -> int:
    """Return a detached mount of the opened path, without submounts: nosuid, nodev, read-only for ``read`` (level A).

    With ``idmap_fd`` (see idmap.py) the owner of the path appears as the job's uid and the other way round.

    Raises:
        GrantRefused: ``unenforceable``: this file system takes no id map and the path is not the job uid's.
    """
    attributes = linux.NOSUID | linux.NODEV | (linux.RDONLY if mode == "read" else 0)
    try:
        fd = linux.open_tree("", at=opened.fd)
    except OSError as error:
        raise GrantRefused(
            "unenforceable", f"{opened.path}: can't be cloned: {os.strerror(error.errno or 0)}"
        ) from error
    try:
        if not (idmap_fd is not None and mounts.set_idmap(fd, attributes, idmap_fd)):
            _check_unmapped(opened, mode, job_uid)
            mounts.set_attributes(fd, attributes)
    except OSError as error:
        os.close(fd)
        raise GrantRefused(
            "unenforceable", f"{opened.path}: mount attributes: {os.strerror(error.errno or 0)}"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_form(path: str) -> None:
    if not path.startswith("/") or path != os.path.normpath(path) or path.startswith("//") or "\0" in path:
        fix = os.path.normpath("/" + path.replace("\0", "")).replace("//", "/")
        raise GrantRefused("policy", f"{path!r}: a granted path is absolute and has no . or .. in it; meant {fix!r}?")


def _open(path: str) -> int:
    try:
        return linux.openat2(path, os.O_PATH, STRICT)
    except OSError as error:
        if error.errno == errno.ELOOP:
            real = os.path.realpath(path)
            raise GrantRefused("policy", f"{path}: has a symlink in it; grant the real path: {real}") from error
        if error.errno == errno.ENOSYS:
            raise GrantRefused("unenforceable", f"{path}: openat2 is missing (kernel < 5.6 or a filter)") from error
        raise GrantRefused(
            "unenforceable", f"{path}: can't be opened on this node: {os.strerror(error.errno or 0)}"
        ) from error


def _checked(fd: int, path: str, mode: Mode, protected: Protected) -> Opened:
    info = os.fstat(fd)
    known = mounts.table()
    real = os.readlink(f"/proc/self/fd/{fd}")
    if real != path:
        raise GrantRefused("policy", f"{path}: is {real} here; grant that path")
    if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)):
        raise GrantRefused("policy", f"{path}: only folders and regular files can be granted")
    _check_file_system(path, mounts.entry_of(fd, known))
    fence = protected.kept if mode == "write" else protected.closed
    touched = fence.touched_by(fd, known)
    if touched is not None:
        raise GrantRefused("policy", f"{path}: equals, contains or lies in {touched}, which no job may {mode}")
    return Opened(
        fd=fd,
        path=path,
        real_path=real,
        mode=mode,
        kind="dir" if stat.S_ISDIR(info.st_mode) else "file",
        owner_uid=info.st_uid,
        owner_gid=info.st_gid,
        device=info.st_dev,
        inode=info.st_ino,
    )


def _check_file_system(path: str, entry: MountEntry | None) -> None:
    if entry is None:
        raise GrantRefused("unenforceable", f"{path}: its mount is not in this process's table")
    if entry.kind in PSEUDO:
        raise GrantRefused("policy", f"{path}: lies on {entry.kind}, which is never granted")


def _check_unmapped(opened: Opened, mode: Mode, job_uid: int | None) -> None:
    if mode == "write" and opened.owner_uid != job_uid:
        raise GrantRefused(
            "unenforceable",
            f"{opened.path}: this file system takes no id map, so writes would not get the owner's uid; "
            "grant a path on ext4, xfs, btrfs or tmpfs, or give it to the job's uid",
        )


def _own_code() -> list[str]:
    package = Path(__file__).resolve().parents[2]
    own = [str(package / name) for name in ("runner", "node_agent", "broker")]
    return [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.executable, *own, *(each for each in sys.path if each)]


def _system() -> list[str]:
    groups = [entry.point for entry in mounts.table().values() if entry.kind in ("cgroup", "cgroup2")]
    return [*UNIT_FOLDERS, *_user_units(), *groups]


def _user_units() -> list[str]:
    """Return where systemd looks for units of this process's own user: what lies there runs with the user's rights."""
    try:
        folder = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return []
    return [f"{folder}/{part}/systemd" for part in (".config", ".local/share")] if folder.startswith("/") else []
