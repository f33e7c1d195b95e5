"""The exact sandbox of one attempt, and what came of it: values only.

Called by node_agent.sandbox (builds a Plan from spec, policy and host), by the agent's side of the containment (carries
it out) and by the worker (reads it as the first record). Must never hold arguments, environment values, argv or
secrets: those go to the restricted worker as the payload (attack 5).
"""

from __future__ import annotations

import marshal
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, Final, Literal, get_args

from runner.wire.errors import RecordError

__all__ = [
    "DOORS",
    "PROXY",
    "DoorName",
    "Level",
    "Mount",
    "Plan",
    "Profile",
    "Usage",
    "Verdict",
    "dumps",
    "loads",
    "needs",
    "of",
    "values",
]

#: Levels of isolation, the strongest first (DESIGN §5).
Level = Literal["A", "B", "C", "D", "E", "F"]

#: Where a job with net grants finds the one thing that it can reach: an address of its own net namespace.
PROXY: Final = ("127.0.0.1", 3128)
DoorName = Literal["net", "service"]
#: Where each listener of an attempt stands in its net namespace.
DOORS: Final[dict[DoorName, tuple[str, int]]] = {"net": PROXY, "service": ("127.0.0.1", 3129)}


@dataclass(frozen=True, slots=True)
class Mount:
    """One granted path in the view: attached at ``path`` (absolute, the same as on the host).

    ``protected``: paths relative to ``path`` that stay read-only below a write grant (``.git/config``, ``.envrc``, …).
    ``identities``: their (device, inode) as the node found them, in the same order; empty = not compared.
    """

    path: str
    mode: Literal["read", "write"]
    kind: Literal["dir", "file"]
    protected: tuple[str, ...] = ()
    identities: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the worker must set up before it may run the job. Sizes in bytes, times in seconds."""

    attempt: str
    kind: Literal["command", "task"]
    level: Level
    uid: int
    gid: int
    cwd: str = "/work"
    mounts: tuple[Mount, ...] = ()
    python_paths: tuple[str, ...] = ()
    task_paths: tuple[str, ...] = ()
    disk_bytes: int = 1 << 30
    tmp_bytes: int = 256 << 20
    shm_bytes: int = 64 << 20
    inodes: int = 65_536
    files: int = 1024
    pids: int = 512
    memory_bytes: int | None = None
    cpus: float | None = None
    data_bytes: int | None = None
    file_bytes: int | None = None
    result_bytes: int = 8 << 20
    allow_unix: bool = True
    allow_exec: bool = True
    nice: int = 0
    broker: bool = False
    reuse: bool = False
    v: int = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """What a mould may be shared for: two attempts with an equal profile may follow each other in one mould.

    ``fresh`` forces a new mould for every attempt.
    """

    tenant: str
    signer: str
    secrets: tuple[str, ...] = ()
    net: tuple[str, ...] = ()
    fresh: bool = False
    service: bool = False

    @property
    def doors(self) -> tuple[DoorName, ...]:
        """The listeners that its attempts need on their own loopback."""
        asked: tuple[tuple[DoorName, bool], ...] = (("net", bool(self.net)), ("service", self.service))
        return tuple(name for name, needed in asked if needed)


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one attempt: its waited-for processes, and the cgroup where there is one.

    ``max_rss_bytes``: peak of the whole tree where a memory cgroup counts it (files in its tmpfs and what it read from
    disk included), else of the largest process.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt's processes ended, told only after the proof that none is left.

    kind: ``exit`` (code), ``signal`` (signal number), ``setup_error`` (step, errno: nothing of the job ran),
    ``killed`` (we killed it), ``worker_died`` (mould gone without a record and without our kill).
    ``limit`` names a limit that was met: memory, pids (the cgroup counts), disk (an own file system was full at a bad
    end). ``kill_ms``: from the kill to the proof.
    ``proved`` is False only for a kill without proof within its time (unconfirmed).
    """

    kind: Literal["exit", "signal", "setup_error", "killed", "worker_died"]
    code: int = 0
    signal: int = 0
    step: str = ""
    errno: int = 0
    detail: str = ""
    limit: Literal["", "memory", "pids", "disk"] = ""
    usage: Usage = Usage()
    method: str = "none"
    kill_ms: float = 0.0
    forced: bool = False
    proved: bool = True


_NAMES: Final = tuple(field.name for field in fields(Plan))
_TEXT, _NUMBER = (str,), (int,)
_ABSENT: Final = type(None)
#: The types of a plan's fields, in their order.
_FORM: Final[tuple[tuple[type[object], ...], ...]] = (
    *(_TEXT, _TEXT, _TEXT, _NUMBER, _NUMBER, _TEXT, (tuple,), (tuple,), (tuple,)),
    *(_NUMBER,) * 6,
    *((int, _ABSENT), (int, float, _ABSENT), (int, _ABSENT), (int, _ABSENT)),
    *(_NUMBER, (bool,), (bool,), _NUMBER, (bool,), (bool,), _NUMBER),
)
_LEVELS: Final = frozenset(get_args(Level))
#: The types of a plan without limits that hosts may lack; comparing with them is all that most plans need.
_USUAL: Final = [type(getattr(Plan("", "task", "A", 1, 1), name)) for name in _NAMES]
_KIND, _LEVEL, _UID, _GID, _MOUNTS = (_NAMES.index(name) for name in ("kind", "level", "uid", "gid", "mounts"))
_ATTEMPT: Final = _NAMES.index("attempt")
#: What a worker needs of ``values``, in one call.
needs: Final = itemgetter(
    *(_NAMES.index(name) for name in ("kind", "mounts", "python_paths", "task_paths", "uid", "gid", "cwd")),
    *(_NAMES.index(name) for name in ("disk_bytes", "tmp_bytes", "shm_bytes", "inodes", "files", "pids")),
    *(_NAMES.index(name) for name in ("data_bytes", "file_bytes", "result_bytes")),
    *(_NAMES.index(name) for name in ("allow_unix", "allow_exec", "nice", "broker", "reuse")),
)


def dumps(plan: Plan) -> bytes:
    """Return the plan as the values of its fields, the attempt's name left out, as the interpreter writes plain values.

    Agent and worker are the same interpreter, and every worker reads one in memory that it still shares with its mould:
    each object that a parser touches there costs the copy of a page.
    """
    values = [getattr(plan, name) for name in _NAMES]
    values[_ATTEMPT] = ""  # nobody who reads a plan needs it, and without it a plan that comes again is the same bytes
    values[_MOUNTS] = tuple(
        (mount.path, mount.mode, mount.kind, mount.protected, mount.identities) for mount in plan.mounts
    )
    return marshal.dumps(tuple(values))


def loads(data: bytes | memoryview) -> Plan:
    """Return the plan that the agent sent; only for bytes from the agent.

    Raises:
        RecordError: these bytes are no plan, or one that makes a job root.
    """
    return of(values(data))


def of(found: tuple[Any, ...]) -> Plan:
    """Return the plan of ``values``."""
    mounts = tuple(Mount(*mount) for mount in found[_MOUNTS])
    return Plan(*found[:_MOUNTS], mounts, *found[_MOUNTS + 1 :])  # type: ignore[call-arg] # as many as _FORM has


def values(data: bytes | memoryview) -> tuple[Any, ...]:
    """Return the fields of the plan that the agent sent, in their order, with the mounts as plain tuples.

    Raises:
        RecordError: these bytes are no plan, or one that makes a job root.
    """
    try:
        found = marshal.loads(data)  # noqa: S302 - from the agent, which may ask anything of a worker as it is
        fit = [*map(type, found)] == _USUAL or (len(found) == len(_FORM) and all(map(isinstance, found, _FORM)))
    except (EOFError, ValueError, TypeError) as error:
        raise RecordError(f"no plan ({type(error).__name__})") from None
    if not fit or found[_KIND] not in ("command", "task") or found[_LEVEL] not in _LEVELS:
        raise RecordError("no plan: a field has the wrong type, or kind or level is unknown")
    if found[_UID] <= 0 or found[_GID] <= 0:
        raise RecordError("a job never runs as root")
    return found  # type: ignore[no-any-return] # a tuple: it has _FORM
