"""What a host can isolate and enforce, as found by really doing it: a value for `doctor`, the node card and admission.

Made by probe.py. Pure. Must never claim what was not tried on this host in this run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from node_agent.containment.plan import Level
from node_agent.containment.promises import Facts, Promise, promises
from runner.wire import record

__all__ = ["HostReport", "Missing", "Rung"]


@dataclass(frozen=True, slots=True)
class Missing:
    """One thing this host lacks. ``fix`` is a command or a line to paste; ``hurts`` says what it costs.

    ``level``: no untrusted job runs. ``totals``: the named total can't be asked for. ``grants``: some path grants are
    refused. ``fence``: one wall of several is not there. ``insecure``: a wall can be walked around.
    """

    what: str
    why: str
    fix: str
    hurts: Literal["level", "totals", "grants", "fence", "insecure"]


@dataclass(frozen=True, slots=True)
class Rung:
    """One level of the ladder, tried here: ``why`` is empty if a detached tree was started, killed and proved gone."""

    level: Level
    why: str = ""
    fix: str = ""
    processes_killed: int = 0
    spawn_ms: float = 0.0
    kill_ms: float = 0.0

    @property
    def works(self) -> bool:
        """Whether jobs can run at this level here."""
        return not self.why


@dataclass(frozen=True, slots=True)
class HostReport:
    """The result of one probe. ``level`` is the strongest that works, at most ``max_level``; ``none`` if none does.

    ``enforces``: kill, freeze, pids, memory, cpu by cgroup. ``idmap``: by file system type, whether a write grant there
    gets the owner's uid (level A). ``job_uids``: first and last, empty where jobs have no uid of their own.
    ``spawn_ms``, ``kill_ms``: of the detached tree that was really started and killed, 0 if none was. ``tried``: every
    level that was tried, the strongest first.
    """

    level: Literal["A", "B", "C", "D", "E", "F", "none"]
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
    tried: tuple[Rung, ...] = ()
    max_level: str = "A"
    v: int = 1

    @property
    def why(self) -> str:
        """Why this host is below B, in one line; empty if it is not."""
        return "; ".join(each.why for each in self._blocking())

    @property
    def fix(self) -> str:
        """What brings it to B or above; empty if nothing is needed."""
        return "; ".join(each.fix for each in self._blocking())

    @property
    def promises(self) -> tuple[Promise, ...]:
        """Every promise, kept or not, at this host's level."""
        return promises(self.facts)

    @property
    def facts(self) -> Facts:
        """What the promises follow from."""
        return Facts(
            level=self.level,
            own_uid=bool(self.job_uids),
            totals=frozenset(self.enforces) & {"pids", "memory", "cpu"},
            freeze="freeze" in self.enforces,
            landlock_abi=self.landlock_abi,
        )

    @property
    def higher(self) -> str:
        """Why the level is not the next higher one, with the fix; empty at the top."""
        above = [rung for rung in self.tried if not rung.works and rung.level < self.level]
        if above:
            return f"not {above[-1].level}: {above[-1].why}; fix: {above[-1].fix}"
        if self.level == "A" or self.level == self.max_level:
            return ""
        return "not A: the agent is an ordinary user; fix: run the agent as root" if self.level == "B" else ""

    def as_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        return record.encode(self)

    def _blocking(self) -> list[Missing]:
        return [each for each in self.missing if each.hurts == "level"]
