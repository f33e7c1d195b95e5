"""Whether a claimed job has room on this node now, by the memory and the processors that it asks for. Pure.

Called by the supervisor before an attempt is built, and by the session (what may be claimed). Must never let the
attempts together weigh more than the node has, nor let a heavy job wait for ever behind light ones.

A job weighs the memory it asked for, else the share of a slot, and the processors it asked for, else none. One that has
no room goes back to the head of its lane, where any other node may take it; this node claims nothing until an attempt
here has ended, and then one job at a time until one has found room. A job that weighs more than the whole node runs
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.wire.spec import JobSpec

__all__ = ["Placing"]


@dataclass(slots=True)
class Placing:
    """``memory_bytes``, ``cpus``: what the node has, None = not counted. ``share_bytes``: of one that asks for none."""

    memory_bytes: int | None = None
    cpus: float | None = None
    share_bytes: int = 0
    #: A job found no room, and nothing has ended since: nothing is claimed.
    blocked: bool = False
    #: A job found no room, and none has found some since: one job is claimed at a time.
    sparing: bool = False
    _placed: dict[str, tuple[int, float]] = field(default_factory=dict)

    def place(self, job: str, spec: JobSpec) -> bool:
        """Take the room that a job asks for; False if there is not enough now."""
        memory, cpus = spec.grants.memory_bytes or self.share_bytes, spec.grants.cpus or 0.0
        if self._placed and (
            (self.memory_bytes is not None and self._memory() + memory > self.memory_bytes)
            or (self.cpus is not None and cpus > 0 and self._cpus() + cpus > self.cpus)
        ):
            self.blocked = self.sparing = True
            return False
        self._placed[job] = (memory, cpus)
        self.sparing = False
        return True

    def leave(self, job: str) -> None:
        """Give back what a job took; nothing for one that took none."""
        if self._placed.pop(job, None) is not None:
            self.blocked = False

    @property
    def free(self) -> dict[str, float]:
        """What is left of each that is counted, as `nodes` shows it."""
        found: dict[str, float] = {}
        if self.memory_bytes is not None:
            found["memory_bytes"] = max(0, self.memory_bytes - self._memory())
        if self.cpus is not None:
            found["cpus"] = round(max(0.0, self.cpus - self._cpus()), 3)
        return found

    def _memory(self) -> int:
        return sum(memory for memory, _ in self._placed.values())

    def _cpus(self) -> float:
        return sum(cpus for _, cpus in self._placed.values())
