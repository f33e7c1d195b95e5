"""What a host can isolate and enforce, as found by really doing it: a value for `doctor`, the node card and admission.

Made by probe.py. Pure. Must never claim what was not tried on this host in this run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.wire import record

__all__ = ["HostReport", "Missing"]


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing this host lacks. ``fix`` is a command or a line to paste; ``hurts`` says what it costs.

    ``level``: no untrusted job runs. ``totals``: the named total can't be asked for. ``grants``: some path grants are
    refused. ``fence``: one wall of several is not there.
    """

    what: str
    why: str
    fix: str
    hurts: Literal["level", "totals", "grants", "fence"]


@dataclass(frozen=True, slots=True)
class HostReport:
    """The result of one probe. ``level`` is ``none`` below B; ``enforces``: kill, freeze, pids, memory, cpu.

    ``idmap``: by file system type, whether a write grant there gets the owner's uid (level A). ``job_uids``: first and
    last, empty at B. ``spawn_ms``, ``kill_ms``: of the detached tree that was really started and killed, 0 if none was.
    """

    level: Literal["A", "B", "none"]
    kernel: str
    machine: str
    python: str
    user: int
    cgroup: Literal["v2", "hybrid", "v1", "none"] = "none"
    enforces: tuple[str, ...] = ()
    landlock_abi: int = 0
    userns: bool = False
    idmap: dict[str, bool] | None = None
    job_uids: str = ""
    processes_killed: int = 0
    spawn_ms: float = 0.0
    kill_ms: float = 0.0
    missing: tuple[Missing, ...] = ()
    v: int = 1

    @property
    def why(self) -> str:
        """Why this host is below B, in one line; empty if it is not."""
        return "; ".join(each.why for each in self._blocking())

    @property
    def fix(self) -> str:
        """What brings it to B or above; empty if nothing is needed."""
        return "; ".join(each.fix for each in self._blocking())

    def as_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        return record.encode(self)

    def _blocking(self) -> list[Missing]:
        return [each for each in self.missing if each.hurts == "level"]
