"""What a mould makes ready for its workers: the rows of script.py that restrict them, in the order of DESIGN §5.

Called by the mould (``make``, once) and by the worker (``view_rows``, ``fence_rows``). Must never leave a step out:
what is equal for all attempts is made ahead, what differs is added, and nothing here decides whether a row is run.

The rows of the view are for a plan without grants (layout.py); view.py builds all others.
"""

from __future__ import annotations

import functools
import os
import resource
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from node_agent.containment import answer, landlock, linux, seccomp, view
from node_agent.containment.known import Known
from node_agent.containment.layout import Trees, in_new_root, in_own_root
from node_agent.containment.script import (
    ANY,
    FIRST_FD,
    RECEIVE_CLOEXEC,
    Memory,
    Row,
    StepError,
    Table,
    close_but,
    copy,
    opened,
    row,
    written,
)
from node_agent.containment.seccomp import Filter
from node_agent.containment.view import Prepared, ViewError
from runner.wire.frames import FD_BROKER, FD_KERNEL, FD_RESULT

__all__ = [
    "BROKER",
    "FIRST_FD",
    "Kit",
    "Outfit",
    "fence_rows",
    "files_row",
    "looked",
    "make",
    "view_rows",
]

#: Added to the number of stdio descriptors of a plan with a channel to the broker, which comes right behind them.
BROKER: Final = 10
#: A command's and a task's descriptors, without and with a channel to the broker.
_STDIO: Final = (2, 3, BROKER + 2, BROKER + 3)
_IDS_BYTES: Final = 48
_PATH_BYTES: Final = 4096 - _IDS_BYTES
#: Questions of prctl: PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS, PR_GET_SECCOMP.
_BOUNDING_READ: Final = 23
_NO_NEW_PRIVS_READ: Final = 39
_SECCOMP_READ: Final = 21
_MOST_CAPABILITIES: Final = 64
#: SECCOMP_MODE_FILTER.
_FILTERED: Final = 2
#: _LINUX_CAPABILITY_VERSION_3.
_CAPABILITY_VERSION: Final = 0x2008_0522
#: No id: a call that is given it changes nothing and returns what is.
_NOBODY: Final = 0xFFFF_FFFF
_SIG_SETMASK: Final = 2
_EXCLUSIVE: Final = os.O_CREAT | os.O_EXCL
#: More than the interpreter waits for before it adapts a function.
_REHEARSALS: Final = 16
_PLAIN: Final = linux.NOSUID | linux.NODEV
_NO_LIMIT: Final = (1 << 64) - 1
_pair: Final = struct.Struct("QQ").pack
#: Limits that no plan changes. A core limit of 0 would not stop a core_pattern that pipes (attack 19).
_FIXED: Final = {
    resource.RLIMIT_CORE: 1,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_NICE: 0,
    # Signals that wait count per user, too: a job must not use up those of its user's timers (attack 39).
    resource.RLIMIT_SIGPENDING: 1024,
}
#: The rights of every job; write grants come on top.
_RULES: Final = (
    (b"/", landlock.READ),
    (b"/dev", landlock.READ | landlock.USE),
    # Not to be written: a job could lower its oom_score_adj to what protects its agent (attack 57).
    (b"/proc", landlock.READ),
    # The job's own tmpfs mounts.
    *((path, landlock.WRITE) for path in (b"/work", b"/tmp", b"/dev/shm")),
)


@dataclass(frozen=True, slots=True)
class Kit:
    """What the zygote made for every worker: the memory that plans arrive in, and the filters.

    ``filters``: by whether Unix sockets and executable files in memory are allowed; three words: its worker is reused.
    """

    filters: dict[tuple[bool, ...], Filter]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Outfit:
    """Rows by when they are run. ``trees``: by the paths and number of stdio descriptors, before and after the mounts.

    ``fences`` come in four parts, because a plan's own rows stand between them; the first by number of descriptors.
    """

    level: str
    prepared: Prepared
    memory: Memory
    opening: Table
    trees: dict[tuple[tuple[str, ...], int], Trees]
    hard: dict[int, int]
    nice: int
    arranged: dict[int, tuple[Row, ...]]
    rights: tuple[Row, ...]
    landlock: tuple[Row, ...]
    restrict: tuple[Row, ...]
    ending: dict[tuple[bool, ...], tuple[Row, ...]]
    answer: tuple[Row, ...]
    #: By number of descriptors, too: after READY.
    shut: dict[int, tuple[Row, ...]]
    #: By the message that brings the plan (Memory.expected).
    known: dict[bytes, Known]


def make(prepared: Prepared, kit: Kit, paths: Sequence[str]) -> Outfit:
    """Make what is equal for all attempts of a mould, in the mould.

    ``paths``: what plans will most often name.
    """
    level = "A" if prepared.rooted else "B"
    memory = kit.memory
    hard = {number: resource.getrlimit(number)[1] & _NO_LIMIT for number in _limited()}
    fixed = tuple(_limit(number, value, hard) for number, value in _FIXED.items())
    allowed, restrict = landlock.rows(_RULES)
    outfit = Outfit(
        level=level,
        prepared=prepared,
        memory=memory,
        opening=Table(_opening(memory)),
        trees={},
        hard=hard,
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        arranged={
            count: (*_arranged(count), *_shut("descriptors", count), row("session", "setsid", expect=ANY), *fixed)
            for count in _STDIO
        },
        rights=_rights(),
        landlock=tuple(allowed),
        restrict=tuple(restrict),
        ending={form: (seccomp.row(ready), *_last_look(memory, level)) for form, ready in kit.filters.items()},
        answer=answer.rows(memory),
        shut={count: tuple(_shut("answer", count)) for count in _STDIO},
        known={},
    )
    for count in range(len(paths) + 1):
        for stdio in (2, 3):
            _trees(outfit, tuple(paths[:count]), stdio)
    _rehearse(outfit)
    return outfit


def view_rows(
    outfit: Outfit, paths: tuple[str, ...], stdio: int, ids: tuple[int, int], sizes: tuple[int, int, int, int]
) -> list[Row]:
    """Return what makes the mould's root the view of one attempt.

    ``paths``: of the node's own, which it shows. ``sizes``: bytes of /work, /tmp, /dev/shm, and inodes of each.
    Raises StepError: a path was not staged.
    """
    before, after, fd = outfit.trees.get((paths, stdio)) or _trees(outfit, paths, stdio)
    uid, gid = ids
    disk, tmp, shm, inodes = sizes
    rest = b",nr_inodes=%d,uid=%d,gid=%d,mode=" % (inodes, uid, gid)
    # All by their names below the root, which the process stands in.
    return [
        *before,
        *written("view", b"run/passwd", view.passwd(uid, gid), fd, _EXCLUSIVE),
        *written("view", b"run/group", view.group(gid), fd, _EXCLUSIVE),
        row("view", "mount", b"tmpfs", b"work", b"tmpfs", _PLAIN, b"size=%d%b0700" % (disk, rest)),
        row("view", "mount", b"tmpfs", b"tmp", b"tmpfs", _PLAIN, b"size=%d%b1777" % (tmp, rest)),
        row("view", "mount", b"tmpfs", b"dev/shm", b"tmpfs", _PLAIN, b"size=%d%b1777" % (shm, rest)),
        *after,
    ]


def fence_rows(
    outfit: Outfit,
    stdio: int,
    ids: tuple[int, int],
    limits: tuple[int, int | None, int | None, int],
    cwd: str,
    *,
    form: tuple[bool, ...],
    writable: Sequence[tuple[str, bool]] = (),
) -> list[Row]:
    """Return what restricts the worker once its view stands.

    ``limits``: processes, bytes of data and of one file, and how much nicer.
    ``form``: which filter. ``writable``: paths of the write grants, and whether each is a folder.
    """
    uid, gid = ids
    pids, data_bytes, file_bytes, nice = limits
    hard = outfit.hard
    rows = [
        *outfit.arranged[stdio],
        # At B the mould counts too: the kernel counts per user namespace and uid. At A the cgroup comes first.
        _limit(resource.RLIMIT_NPROC, pids + 1, hard),
    ]
    if nice:
        rows.append(row("nice", "setpriority", os.PRIO_PROCESS, 0, outfit.nice + nice))
    if data_bytes is not None:
        # Not the address space: programs that reserve much and use little (node, go) would not start.
        rows.append(_limit(resource.RLIMIT_DATA, data_bytes, hard))
    if file_bytes is not None:
        rows.append(_limit(resource.RLIMIT_FSIZE, file_bytes, hard))
    if outfit.level == "A":
        rows.append(row("identity", "setgroups", 0, None))
    rows += (
        row("identity", "setresgid", gid, gid, gid),
        row("identity", "setresuid", uid, uid, uid),
        *outfit.rights,
        row("cwd", "chdir", os.fsencode(cwd)),
        *outfit.landlock,
    )
    for path, is_folder in writable:
        rows += landlock.allowed(os.fsencode(path), landlock.WRITE, is_folder=is_folder)
    rows += outfit.restrict
    rows += outfit.ending[form]
    rows += _own_ids(uid, gid)
    return rows


def _rehearse(outfit: Outfit) -> None:
    """Make rows that nobody runs: the interpreter adapts what it repeats, and a worker does everything once."""
    for _ in range(_REHEARSALS):
        view_rows(outfit, (), 3, (1, 1), (1, 1, 1, 1))
        fence_rows(outfit, 3, (1, 1), (1, None, None, 0), "/work", form=(True, True))


def _opening(memory: Memory) -> tuple[Row, ...]:
    """Up to the arrival of the plan: nothing of the mould's stays open, and nothing is known yet."""
    return (
        *close_but("plan", FD_KERNEL),
        row("plan", "rt_sigprocmask", _SIG_SETMASK, bytes(8), None, 8),
        row("plan", "umask", 0o022, expect=ANY),
        row("plan", "unshare", linux.NEWNS | linux.NEWIPC | linux.NEWCGROUP),
        row("plan", "recvmsg", FD_KERNEL, memory.address, RECEIVE_CLOEXEC, expect=ANY),
    )


def _trees(outfit: Outfit, paths: tuple[str, ...], stdio: int) -> Trees:
    """Return, and keep, the rows around the mounts of a view that shows ``paths``."""
    try:
        shown = [(place, tree, os.path.isdir(tree)) for place, tree in outfit.prepared.shown(paths)]
    except ViewError as error:
        raise StepError("view", 0, str(error)) from None
    make = in_own_root if outfit.prepared.rooted else in_new_root
    first = FIRST_FD + stdio % BROKER + (stdio > BROKER)
    made = outfit.trees[paths, stdio] = make(outfit.prepared, shown, first)
    return made


def _arranged(stdio: int) -> list[Row]:
    """Give every descriptor its fixed number and close all others."""
    broker, stdio = stdio > BROKER, stdio % BROKER
    step, null = "descriptors", FIRST_FD + stdio + broker
    rows = [
        opened(step, b"/dev/null", os.O_RDWR, null),
        copy(step, null, 0),
        copy(step, FIRST_FD, 1),
        copy(step, FIRST_FD + 1, 2),
    ]
    if stdio > 2:
        rows.append(copy(step, FIRST_FD + 2, FD_RESULT))
    if broker:
        rows.append(copy(step, FIRST_FD + stdio, FD_BROKER))
    return rows


def _shut(step: str, stdio: int) -> list[Row]:
    """Close all that is not the job's own, whatever it is: that nothing else is open is the kernel's word then."""
    return close_but(
        step, FD_KERNEL, *((FD_BROKER,) if stdio > BROKER else ()), *((FD_RESULT,) if stdio % BROKER > 2 else ())
    )


def _rights() -> tuple[Row, ...]:
    return (
        row("capabilities", "prctl", *linux.CLEAR_AMBIENT),
        row("capabilities", "capset", struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)),
    )


def _last_look(memory: Memory, level: str) -> list[Row]:
    """Have the kernel say what is left: no right, no_new_privs and a filter; ids and the folder go into ``memory``.

    An ambient capability can't be without a permitted one. What is asked lies as ``looked`` returns it.
    """
    at = memory.address
    rows = [
        # Its own /proc entries are the job's to read, which nothing but this process is yet.
        row("dumpable", "prctl", *linux.BE_DUMPABLE),
        *(row("check", "prctl", _BOUNDING_READ, number) for number in _capabilities()),
        row("check", "prctl", _NO_NEW_PRIVS_READ, 0, 0, 0, 0, expect=1),
        row("check", "prctl", _SECCOMP_READ, expect=_FILTERED),
        row("check", "capget", struct.pack("Ii", _CAPABILITY_VERSION, 0), at),
        row("check", "getresuid", at + 24, at + 28, at + 32),
        row("check", "getresgid", at + 36, at + 40, at + 44),
        row("check", "getcwd", at + _IDS_BYTES, _PATH_BYTES, expect=ANY),
    ]
    if level == "A":
        rows.append(row("check", "getgroups", 0, None))
    return rows


def _capabilities() -> range:
    """Return the numbers of the capabilities that this kernel has."""
    ask = functools.partial(linux.raw, row("", "prctl")[2], _BOUNDING_READ)
    return range(
        next((number for number in range(_MOST_CAPABILITIES) if ask(number, 0, 0, 0, 0) < 0), _MOST_CAPABILITIES)
    )


def _own_ids(uid: int, gid: int) -> list[Row]:
    """Have the kernel say that files are reached under these ids, too: what the calls set that nobody can set."""
    return [
        row("check", "setfsuid", _NOBODY, expect=uid),
        row("check", "setfsgid", _NOBODY, expect=gid),
    ]


def looked(uid: int, gid: int) -> bytes:
    """Return how ``memory`` begins after the last look: three sets of capabilities, all ids, a folder in the view."""
    return bytes(24) + struct.pack("6I", uid, uid, uid, gid, gid, gid) + b"/"


def files_row(outfit: Outfit, files: int) -> Row:
    """Return the last limit, of open files, which comes after READY.

    At level B descriptors in flight count per user, and who sends any is measured by its own limit: a job that keeps
    many in flight must neither use up the agent's, nor stop another job's READY (attack 34).
    """
    hard = outfit.hard
    if outfit.level == "B":
        files = min(files, hard[resource.RLIMIT_NOFILE] // 4)
    return _limit(resource.RLIMIT_NOFILE, files, hard)


def _limited() -> set[int]:
    return {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}


def _limit(number: int, value: int, hard: dict[int, int]) -> Row:
    least = min(value, hard[number])
    return row("limits", "prlimit64", 0, number, _pair(least, least), None)
