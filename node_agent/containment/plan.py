"""The exact sandbox of one attempt, and what came of it: values only.

Called by node_agent.sandbox (builds a Plan from spec, policy and host), by the agent's side of the containment (carries
it out) and by the worker (reads it as the first record). Must never hold arguments, environment values, argv or
secrets: those go to the restricted worker as the payload (attack 5).
"""

from __future__ import annotations

import marshal
from dataclasses import dataclass, fields
from typing import Final, Literal

from runner.wire.errors import RecordError

__all__ = ["Mount", "Plan", "Profile", "Usage", "Verdict", "dumps", "loads"]


@dataclass(frozen=True, slots=True)
class Mount:
    """One granted path in the view: attached at ``path`` (absolute, the same as on the host).

    ``protected``: paths relative to ``path`` that stay read-only below a write grant (``.git/config``, ``.envrc``, …).
    """

    path: str
    mode: Literal["read", "write"]
    kind: Literal["dir", "file"]
    protected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the worker must set up before it may run the job. Sizes in bytes, times in seconds."""

    attempt: str
    kind: Literal["command", "task"]
    level: Literal["A", "B"]
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
    address_space_bytes: int | None = None
    file_bytes: int | None = None
    result_bytes: int = 8 << 20
    allow_unix: bool = True
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


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one attempt: its waited-for processes, and the cgroup where there is one."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    max_rss_bytes: int = 0
    processes: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt's processes ended, told only after the proof that none is left.

    kind: ``exit`` (code), ``signal`` (signal number), ``setup_error`` (step, errno: nothing of the job ran),
    ``killed`` (we killed it), ``worker_died`` (mould gone without a record and without our kill).
    ``limit`` names a limit that the cgroup saw broken: memory, pids. ``kill_ms``: from the kill to the proof.
    ``proved`` is False only for a kill without proof within its time (unconfirmed).
    """

    kind: Literal["exit", "signal", "setup_error", "killed", "worker_died"]
    code: int = 0
    signal: int = 0
    step: str = ""
    errno: int = 0
    detail: str = ""
    limit: Literal["", "memory", "pids"] = ""
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
    *(_NUMBER, (bool,), _NUMBER),
)
_MOUNTS: Final = _NAMES.index("mounts")


def dumps(plan: Plan) -> bytes:
    """Return the plan as the values of its fields, in the interpreter's own form for plain values.

    Agent and worker are the same interpreter, and every worker reads one in memory that it still shares with its mould:
    each object that a parser touches there costs the copy of a page.
    """
    values = [getattr(plan, name) for name in _NAMES]
    values[_MOUNTS] = tuple((mount.path, mount.mode, mount.kind, mount.protected) for mount in plan.mounts)
    return marshal.dumps(tuple(values))


def loads(data: bytes) -> Plan:
    """Return the plan that the agent sent; only for bytes from the agent.

    Raises:
        RecordError: these bytes are no plan, or one that makes a job root.
    """
    try:
        values = marshal.loads(data)  # noqa: S302 - from the agent, which may ask anything of a worker as it is
        fit = len(values) == len(_FORM) and all(map(isinstance, values, _FORM))
        if values[_MOUNTS]:
            mounts = tuple(Mount(*mount) for mount in values[_MOUNTS])
            values = (*values[:_MOUNTS], mounts, *values[_MOUNTS + 1 :])
        plan = Plan(*values)
    except (EOFError, ValueError, TypeError) as error:
        raise RecordError(f"no plan ({type(error).__name__})") from None
    if not fit or plan.kind not in ("command", "task") or plan.level not in ("A", "B"):
        raise RecordError("no plan: a field has the wrong type, or kind or level is unknown")
    if plan.uid <= 0 or plan.gid <= 0:
        raise RecordError("a job never runs as root")
    return plan
