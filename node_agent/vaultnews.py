"""What the fleet hears of a node's broker: that it is away or back, and that a job waits for a person's word.

Called by the vault desk and by the control loop's decisions. Must never name more of a secret than its name, and never
leave the lanes of jobs that need a broker closed once it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from node_agent.lanes import Lanes
from node_agent.records import Notary, Signed
from runner.wire.event import EventType
from runner.wire.spec import JobSpec

__all__ = ["VaultNews"]

_AWAY: Final = (
    "the vault broker does not answer: jobs with secrets wait for it or go to other nodes; `ringfence broker` starts "
    "it, `ringfence vault doctor` looks at it"
)
_BACK: Final = "the vault broker answers"
_FIX: Final = "ringfence vault approve JOB NAME, or ringfence vault deny JOB NAME"


class VaultNews:
    """One boot's. ``emit``: sends a signed event; ``wake``: there may be work that can be claimed now."""

    def __init__(
        self, notary: Notary, emit: Callable[[str | None, Signed], None], lanes: Lanes, wake: Callable[[], None]
    ) -> None:
        self._notary, self._emit, self._lanes, self._wake = notary, emit, lanes, wake

    def broker(self, *, away: bool) -> None:
        """The broker got lost, or answers again."""
        if self._lanes.broker_away == away:
            return
        self._lanes.broker_away = away
        kind = EventType.NODE_DEGRADED if away else EventType.NODE_HEALTHY
        self._emit(None, self._notary.event(kind, detail={"what": _AWAY if away else _BACK}))
        if not away:
            self._wake()

    def pending(self, spec: JobSpec, number: int, names: Sequence[str]) -> None:
        """A job's attempt got a lease in which some secrets wait for a person."""
        for name in names:
            event = self._notary.event(
                EventType.SECRET_PENDING, job=spec.id, attempt=number, detail={"secret": name, "next": _FIX}
            )
            self._emit(spec.tenant, event)

    def leaked(self, spec: JobSpec, number: int, name: str, where: str, *, killed: bool) -> None:
        """A job's output or result held a value, which was masked; ``killed``: the job ends for it."""
        detail: dict[str, str | int | float | bool] = {"secret": name, "where": where, "killed": killed}
        self._emit(spec.tenant, self._notary.event(EventType.SECRET_LEAKED, job=spec.id, attempt=number, detail=detail))

    def decided(self, spec: JobSpec, number: int, name: str, *, approved: bool, by: str) -> None:
        """A person has decided from afar."""
        kind = EventType.SECRET_APPROVED if approved else EventType.SECRET_DENIED
        self._emit(
            spec.tenant, self._notary.event(kind, job=spec.id, attempt=number, detail={"secret": name, "by": by})
        )
