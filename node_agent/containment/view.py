"""The file tree of a job: what of the host it sees, and where it may write.

Called by the mould (``prepare``, once: the parts that are equal for every attempt) and by the worker (``build``, in its
own mount namespace). Must never follow a link out of a granted tree, and never leave a part out silently: whatever
fails raises, and the attempt is refused.

The mould keeps the host's tree and, in a small read-only tmpfs on STAGE, the prepared parts. The worker copies them
into a fresh tmpfs root, adds its own writable places, the Python paths and the grants, and makes that root its world.
Source: DESIGN §5 "View", pivot_root(2), open_tree(2).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from node_agent.containment import linux
from node_agent.containment.plan import Mount, Plan

__all__ = ["Prepared", "ViewError", "attach_grants", "build", "enter", "prepare"]

#: Where the mould stages its parts, in its own mount namespace: a folder of every host that no view needs.
STAGE: Final = "/sys"
ROOT: Final = f"{STAGE}/root"
_READ_ONLY: Final = linux.RDONLY | linux.NOSUID | linux.NODEV
_SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC: Final = ("ssl", "ca-certificates", "ca-certificates.conf", "alternatives", "localtime", "mime.types")
_ETC_PREFIX: Final = "ld.so."
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_LINKS: Final = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
#: Nothing may be granted at or below these; and not the root itself.
_RESERVED: Final = ("/proc", "/dev", "/sys", "/run")
_SMALL: Final = "size=1m,nr_inodes=4096,mode=0755"
_WRITTEN: Final = {
    "hosts": "127.0.0.1 localhost job\n::1 localhost job\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
    "resolv.conf": "# this job has no name service\n",
    "hostname": "job\n",
}
#: The uid differs from attempt to attempt, so these two point into the attempt's own root.
_PER_ATTEMPT: Final = ("passwd", "group")


class ViewError(Exception):
    """A part of the view can't be made; the message says which."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the mould staged: folders to copy, and links to make, by their name in the root."""

    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def prepare() -> Prepared:
    """Stage the parts that every attempt of this mould shares, all of them read-only. Raises OSError."""
    linux.mount("tmpfs", STAGE, "tmpfs", linux.NOSUID, _SMALL)
    folders, links = [], []
    for name in _SYSTEM:
        host = f"/{name}"
        if os.path.islink(host):
            links.append((name, os.readlink(host)))
        elif os.path.isdir(host):
            _bind(host, f"{STAGE}/{name}")
            folders.append(name)
    _stage_etc(f"{STAGE}/etc")
    _stage_dev(f"{STAGE}/dev")
    os.mkdir(f"{STAGE}/proc")
    linux.mount("proc", f"{STAGE}/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC)
    os.mkdir(ROOT)
    linux.mount_setattr(-1, linux.RDONLY, path=STAGE)
    return Prepared((*folders, "etc", "dev", "proc"), tuple(links))


def build(plan: Plan, prepared: Prepared, own_paths: tuple[str, ...] = ()) -> None:
    """Make the root of one attempt at ROOT and stand in it; grants come next, then ``enter``.

    ``own_paths`` are shown besides the plan's. Raises OSError.
    """
    linux.mount("tmpfs", ROOT, "tmpfs", linux.NOSUID | linux.NODEV, _SMALL)
    os.chdir(ROOT)
    for name in prepared.folders:
        os.mkdir(name)
        _attach(linux.open_tree(f"{STAGE}/{name}", recursive=True), name)
    for name, target in prepared.links:
        os.symlink(target, name)
    os.mkdir("run")
    _write("run/passwd", _passwd(plan))
    _write("run/group", f"root:x:0:\njob:x:{plan.gid}:job\nnogroup:x:65534:\n")
    for name, size_bytes, mode in (
        ("work", plan.disk_bytes, "0700"),
        ("tmp", plan.tmp_bytes, "1777"),
        ("dev/shm", plan.shm_bytes, "1777"),
    ):
        options = f"size={size_bytes},nr_inodes={plan.inodes},mode={mode},uid={plan.uid},gid={plan.gid}"
        if name != "dev/shm":
            os.mkdir(name)
        linux.mount("tmpfs", name, "tmpfs", linux.NOSUID | linux.NODEV, options)
    covered = [f"/{name}" for name in prepared.folders] + [f"/{name}" for name, _ in prepared.links]
    for path in _unique(plan.python_paths + own_paths + plan.task_paths):
        if not _below(path, covered):
            tree = linux.open_tree(path, recursive=True)
            linux.mount_setattr(tree, _READ_ONLY, recursive=True)
            _place(tree, path)
            covered.append(path)


def attach_grants(plan: Plan, fds: Sequence[int]) -> None:
    """Attach every grant at its own path, outer ones first; ``fds`` are in the order of ``plan.mounts``.

    At level A each is a detached, id-mapped mount. At level B each is a checked O_PATH descriptor: the same path is
    opened again in this mount namespace and must be the same file.

    Raises:
        ViewError, OSError: a grant can't be attached exactly as asked.
    """
    for grant, fd in sorted(zip(plan.mounts, fds, strict=True), key=lambda pair: pair[0].path.count("/")):
        _check_place(grant.path)
        tree = fd if plan.level == "A" else _reopened(grant, fd)
        _place(tree, grant.path)
        _protect(grant)


def enter() -> None:
    """Make the built root the root of this process, drop the host's tree and forbid changes to the root."""
    linux.pivot_root(".", ".")
    linux.umount(".", linux.DETACH)
    os.chdir("/")
    linux.mount_setattr(-1, linux.RDONLY, path="/")


def _stage_etc(folder: str) -> None:
    os.mkdir(folder)
    for name in (*_ETC, *(name for name in os.listdir("/etc") if name.startswith(_ETC_PREFIX))):
        host = f"/etc/{name}"
        if os.path.islink(host):
            os.symlink(os.readlink(host), f"{folder}/{name}")
        elif os.path.exists(host):
            _bind(host, f"{folder}/{name}")
    for name, text in _WRITTEN.items():
        _write(f"{folder}/{name}", text)
    for name in _PER_ATTEMPT:
        os.symlink(f"/run/{name}", f"{folder}/{name}")


def _stage_dev(folder: str) -> None:
    os.mkdir(folder)
    os.mkdir(f"{folder}/shm")
    for name in _DEVICES:
        _make_file(f"{folder}/{name}")
        _attach(linux.open_tree(f"/dev/{name}"), f"{folder}/{name}", linux.NOSUID | linux.NOEXEC)
    for name, target in _LINKS.items():
        os.symlink(target, f"{folder}/{name}")


def _bind(source: str, target: str) -> None:
    """Show a path of the host read-only at ``target``, with everything that is mounted below it."""
    tree = linux.open_tree(source, recursive=True)
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.mkdir(target)
    else:
        _make_file(target)
    _attach(tree, target, _READ_ONLY)


def _place(tree: int, path: str) -> None:
    """Attach a detached mount at an absolute path of the root being built, and close it.

    Walks component by component without following links: parts of the way may lie in granted trees, which jobs write.
    Missing parts are made only in the attempt's own tmpfs mounts, never on the host.
    """
    is_folder = stat.S_ISDIR(os.fstat(tree).st_mode)
    own = {os.stat(name).st_dev for name in (".", "work", "tmp")}
    at = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *parents, last = path.strip("/").split("/")
        for part in parents:
            at = _step(at, part, own, is_folder=True)
        at = _step(at, last, own, is_folder=is_folder)
        linux.move_mount(tree, "", at=at)
    finally:
        os.close(at)
        os.close(tree)


def _step(at: int, part: str, own: set[int], *, is_folder: bool) -> int:
    """Return ``part`` below the descriptor ``at``, opened; closes ``at``."""
    rules = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
    flags = os.O_PATH | (os.O_DIRECTORY if is_folder else 0)
    try:
        found = linux.openat2(part, flags, rules, at=at)
    except FileNotFoundError:
        if os.fstat(at).st_dev not in own:
            raise
        if is_folder:
            os.mkdir(part, dir_fd=at)
        else:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=at))
        found = linux.openat2(part, flags, rules, at=at)
    os.close(at)
    return found


def _attach(tree: int, target: str, attributes: int = 0) -> None:
    try:
        if attributes:
            linux.mount_setattr(tree, attributes, recursive=True)
        linux.move_mount(tree, target)
    finally:
        os.close(tree)


def _reopened(grant: Mount, checked: int) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW
    again = linux.openat2(grant.path, flags, linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS)
    try:
        if not os.path.samestat(os.fstat(again), os.fstat(checked)):
            raise ViewError(f"{grant.path} is not what the node opened: it was replaced meanwhile")
        tree = linux.open_tree("", at=again)
    finally:
        os.close(again)
        os.close(checked)
    attributes = linux.NOSUID | linux.NODEV | (linux.RDONLY if grant.mode == "read" else 0)
    linux.mount_setattr(tree, attributes)
    return tree


def _protect(grant: Mount) -> None:
    """Make the named files below a write grant read-only, where they exist; links in their path are an error."""
    if not grant.protected:
        return
    base = linux.openat2(grant.path.strip("/"), os.O_PATH, linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS)
    try:
        for name in grant.protected:
            rules = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
            try:
                inside = linux.openat2(name, os.O_PATH, rules, at=base)
            except FileNotFoundError:
                continue
            tree = linux.open_tree("", at=inside, recursive=True)
            linux.mount_setattr(tree, _READ_ONLY, recursive=True)
            linux.move_mount(tree, "", at=inside)
            os.close(tree)
            os.close(inside)
    finally:
        os.close(base)


def _check_place(path: str) -> None:
    if not path.startswith("/") or os.path.normpath(path) != path or path == "/" or _below(path, _RESERVED):
        raise ViewError(f"nothing can be granted at {path}")


def _passwd(plan: Plan) -> str:
    return (
        "root:x:0:0:root:/:/usr/sbin/nologin\n"
        f"job:x:{plan.uid}:{plan.gid}:job:/work:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
    )


def _unique(paths: Sequence[str]) -> Iterator[str]:
    """Yield every path once and, where links lead elsewhere, the place they lead to; outer paths first."""
    both = {place for path in paths for place in (path, os.path.realpath(path))}
    return iter(sorted(both, key=lambda path: (path.count("/"), path)))


def _below(path: str, tops: Sequence[str]) -> bool:
    return any(path == top or path.startswith(f"{top}/") for top in tops)


def _make_file(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
