"""The file tree of a job: what of the host it sees, and where it may write.

Called by the mould (``prepare``, once: the parts that are equal for every attempt) and by the worker (``build``, in its
own mount namespace). Must never follow a link out of a granted tree, and never leave a part out silently: whatever
fails raises, and the attempt is refused.

The mould stages everything that its attempts share in a small read-only tmpfs: the system's folders, and below RUN the
trees of the node's own paths. At level A it then makes that tmpfs its root and drops the host's tree. A worker without
grants keeps this root (its copy of the mount namespace is its own), puts fresh tmpfs mounts on the writable places and
on /run, which hides the staged trees, and attaches those that its plan names. A worker with grants, and every worker at
level B, whose mould keeps the host's tree for grants, copies the parts into a fresh tmpfs root and enters that.
Source: DESIGN §5 "View", pivot_root(2), open_tree(2).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from node_agent.containment import linux
from node_agent.containment.plan import Mount, Plan

__all__ = [
    "FRESH",
    "SECRETS",
    "SMALL",
    "Prepared",
    "ViewError",
    "attach_grants",
    "build",
    "enter",
    "group",
    "passwd",
    "prepare",
]

#: Where the mould stages its parts, in its own mount namespace: a folder of every host that no view needs.
STAGE: Final = "/sys"
#: Below the stage: the trees of the node's own paths, and the root that is being built. Hidden from every job.
TREES: Final = "run/trees"
ROOT: Final = "run/root"
#: Where secrets lie that a job is handed as files.
SECRETS: Final = "run/secrets"
SECRETS_BYTES: Final = 8 << 20
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
#: Places of the node's own paths that lie in an attempt's own tmpfs mounts.
FRESH: Final = ("/work/", "/tmp/", "/run/", "/dev/shm/")  # noqa: S108 - the job's own tmpfs mounts
#: Nothing may be granted at or below these; and not the root itself.
_RESERVED: Final = ("/proc", "/dev", "/sys", "/run")
SMALL: Final = "size=1m,nr_inodes=4096,mode=0755"
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
    """What the mould staged below ``stage``.

    ``folders`` to copy and ``links`` to make, by their name in the root; ``places``: where each of the node's own paths
    appears in a view, with the staged tree of each place. ``rooted``: the stage is the mould's own root.
    """

    stage: str
    rooted: bool
    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    places: dict[str, tuple[tuple[str, str], ...]]

    def shown(self, paths: Sequence[str]) -> list[tuple[str, str]]:
        """Return place and tree of everything that ``paths`` need, outer places first. Raises ViewError."""
        found: dict[str, str] = {}
        for path in paths:
            if path not in self.places:
                raise ViewError(f"{path} was not staged for this attempt")
            found.update(self.places[path])
        out: list[tuple[str, str]] = []
        for place in sorted(found, key=len):
            if not _below(place, [above for above, _ in out]):
                out.append((place, f"{self.stage}/{found[place]}"))
        return out


def prepare(level: str, paths: Sequence[str]) -> Prepared:
    """Stage the parts that every attempt of this mould shares, all of them read-only. Raises OSError.

    ``paths``: the node's own paths (Python, tasks) that plans may name.
    """
    linux.mount("tmpfs", STAGE, "tmpfs", linux.NOSUID | linux.NODEV, SMALL)
    folders, links = [], []
    for name in _SYSTEM:
        host = f"/{name}"
        if os.path.islink(host):
            links.append((name, os.readlink(host)))
            os.symlink(links[-1][1], f"{STAGE}/{name}")
        elif os.path.isdir(host):
            _bind(host, f"{STAGE}/{name}")
            folders.append(name)
    _stage_etc(f"{STAGE}/etc")
    _stage_dev(f"{STAGE}/dev")
    for name in ("proc", "run", TREES, ROOT, "work", "tmp"):
        os.mkdir(f"{STAGE}/{name}")
    # The mould's own entry would show the host's table of mounts: a job sees only what it could trace.
    linux.mount("proc", f"{STAGE}/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC, "hidepid=ptraceable")
    covered = [f"/{name}" for name in (*folders, *(name for name, _ in links))]
    places = _stage_paths(paths, covered)
    rooted = level == "A"
    if rooted:
        os.chdir(STAGE)
        enter()
    else:
        linux.mount_setattr(-1, linux.RDONLY, path=STAGE)
    return Prepared("" if rooted else STAGE, rooted, (*folders, "etc", "dev", "proc"), tuple(links), places)


def build(plan: Plan, prepared: Prepared, own_paths: tuple[str, ...] = ()) -> None:
    """Make a fresh root for one attempt and stand in it; grants come next, then ``enter``.

    ``own_paths`` are shown besides the plan's. Raises OSError, ViewError.
    """
    stage, root = prepared.stage, f"{prepared.stage}/{ROOT}"
    linux.mount("tmpfs", root, "tmpfs", linux.NOSUID | linux.NODEV, SMALL)
    os.chdir(root)
    for name in prepared.folders:
        os.mkdir(name)
        _attach(linux.open_tree(f"{stage}/{name}", recursive=True), name)
    for name, target in prepared.links:
        os.symlink(target, name)
    for name in ("run", "work", "tmp"):
        os.mkdir(name)
    _describe_ids(plan)
    _mount_writable(plan)
    for place, tree in prepared.shown(plan.python_paths + own_paths + plan.task_paths):
        _place(linux.open_tree(tree, recursive=True), place, _own_devices())


def attach_grants(plan: Plan, fds: Sequence[int]) -> None:
    """Attach every grant at its own path, outer ones first; ``fds`` are in the order of ``plan.mounts``.

    At level A each is a detached, id-mapped mount. At level B each is a checked O_PATH descriptor: the same path is
    opened again in this mount namespace and must be the same file.

    Raises:
        ViewError, OSError: a grant can't be attached exactly as asked.
    """
    own = _own_devices()
    for grant, fd in sorted(zip(plan.mounts, fds, strict=True), key=lambda pair: pair[0].path.count("/")):
        _check_place(grant.path)
        tree = fd if plan.level == "A" else _reopened(grant, fd)
        if not plan.allow_exec:
            linux.mount_setattr(tree, linux.NOEXEC)
        _place(tree, grant.path, own)
        _protect(grant)


def enter() -> None:
    """Make the built root the root of this process, drop the host's tree and forbid changes to the root."""
    linux.pivot_root(".", ".")
    linux.umount(".", linux.DETACH)
    os.chdir("/")
    linux.mount_setattr(-1, linux.RDONLY, path="/")


def _describe_ids(plan: Plan) -> None:
    """Write the attempt's own accounts below the root that the process stands in."""
    _write("run/passwd", passwd(plan.uid, plan.gid).decode())
    _write("run/group", group(plan.gid).decode())


def _mount_writable(plan: Plan) -> None:
    """Mount the attempt's own writable places below the root that the process stands in."""
    rest = f",nr_inodes={plan.inodes},uid={plan.uid},gid={plan.gid},mode="
    flags = linux.NOSUID | linux.NODEV | (0 if plan.allow_exec else linux.NOEXEC)
    linux.mount("tmpfs", "work", "tmpfs", flags, f"size={plan.disk_bytes}{rest}0700")
    linux.mount("tmpfs", "tmp", "tmpfs", flags, f"size={plan.tmp_bytes}{rest}1777")
    linux.mount("tmpfs", "dev/shm", "tmpfs", flags, f"size={plan.shm_bytes}{rest}1777")
    if plan.broker:
        os.mkdir(SECRETS)
        size = f"size={SECRETS_BYTES},nr_inodes=128,uid={plan.uid},gid={plan.gid},mode=0700"
        linux.mount("tmpfs", SECRETS, "tmpfs", linux.NOSUID | linux.NODEV | linux.NOEXEC, size)


def _stage_paths(paths: Sequence[str], covered: Sequence[str]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Stage each path and, where links lead elsewhere, the place they lead to; ``covered`` is in every view already."""
    trees: dict[str, str] = {}
    places: dict[str, tuple[tuple[str, str], ...]] = {}
    for path in paths:
        both = [place for place in dict.fromkeys((path, os.path.realpath(path))) if not _below(place, covered)]
        if not all(os.path.exists(place) for place in both):
            continue  # an attempt that needs it will say so
        for place in both:
            if place not in trees:
                trees[place] = f"{TREES}/{len(trees)}"
                _bind(place, f"{STAGE}/{trees[place]}")
                if not place.startswith(FRESH):
                    _make_point(f"{STAGE}{place}", place)
        places[path] = tuple((place, trees[place]) for place in both)
    return places


def _make_point(place: str, tree: int | str) -> None:
    """Make a mount point for ``tree`` and the folders above it; nothing here was written by a job."""
    if os.path.isdir(tree):
        os.makedirs(place, 0o755, exist_ok=True)
        return
    os.makedirs(os.path.dirname(place), 0o755, exist_ok=True)
    _make_file(place)


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


def _own_devices() -> set[int]:
    """The devices of the attempt's own tmpfs mounts. Ask before a grant is attached: it may cover one of them."""
    return {os.stat(name).st_dev for name in (".", "work", "tmp")}


def _place(tree: int, path: str, own: set[int]) -> None:
    """Attach a detached mount at an absolute path of the root being built, and close it.

    Walks component by component without following links: parts of the way may lie in granted trees, which jobs write.
    Missing parts are made only in the attempt's own tmpfs mounts, never on the host.
    """
    is_folder = stat.S_ISDIR(os.fstat(tree).st_mode)
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
    except OSError as error:
        if error.errno == errno.EINVAL:
            what = "holds mounts of the host, and at level B the kernel gives no folder without the mounts in it"
            raise ViewError(f"{grant.path} {what}; grant folders beside them") from error
        raise
    finally:
        os.close(again)
        os.close(checked)
    attributes = linux.NOSUID | linux.NODEV | (linux.RDONLY if grant.mode == "read" else 0)
    linux.mount_setattr(tree, attributes)
    return tree


def _protect(grant: Mount) -> None:
    """Make the named files below a write grant read-only; links in their path are an error.

    So is one that is gone, or is another file than the node found: another job with this grant may have moved it away
    for the moment, to have it back later without its mount (attack 8).
    """
    if not grant.protected:
        return
    base = linux.openat2(grant.path.strip("/"), os.O_PATH, linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS)
    rules = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
    try:
        for number, name in enumerate(grant.protected):
            try:
                inside = linux.openat2(name, os.O_PATH, rules, at=base)
            except FileNotFoundError:
                if not grant.identities:
                    continue
                raise ViewError(f"{grant.path}/{name} is gone since the node opened the grant") from None
            info = os.fstat(inside)
            if grant.identities and (info.st_dev, info.st_ino) != grant.identities[number]:
                raise ViewError(f"{grant.path}/{name} was replaced since the node opened the grant")
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


def passwd(uid: int, gid: int) -> bytes:
    """Return the accounts of a view."""
    return (
        b"root:x:0:0:root:/:/usr/sbin/nologin\n"
        b"job:x:%d:%d:job:/work:/bin/sh\n"
        b"nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n" % (uid, gid)
    )


def group(gid: int) -> bytes:
    """Return the groups of a view."""
    return b"root:x:0:\njob:x:%d:job\nnogroup:x:65534:\n" % gid


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
