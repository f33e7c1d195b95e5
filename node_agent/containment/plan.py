"""The exact sandbox of one attempt, and what came of it: values only.

Called by node_agent.plan (builds a Plan from spec, policy and host), by the agent's side of the containment (carries it
out) and by the worker (reads it as the first record). Must never hold arguments, environment values, argv or secrets:
those go to the restricted worker as the payload (attack 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Mount", "Plan", "Profile", "Usage", "Verdict"]


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
