"""Port: redis, its type alone. What the parts of the kernel get from each other and the node: values and Protocols.

Called by the desk (puts the parts together) and by each part's constructor. Must never import a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from redis.asyncio import Redis

from node_agent.containment.plan import Usage
from node_agent.dependencies import Dependencies
from node_agent.doornews import Metered
from node_agent.kernel.bench import Bench
from node_agent.kernel.caller import Caller
from node_agent.kernel.table import Entry
from node_agent.policycalls import Verdict
from node_agent.policyloop import LoopRule
from node_agent.records import Notary, Signed
from node_agent.run import Run
from runner.wire.codec import Json
from runner.wire.event import EventType
from runner.wire.keys import Keys

__all__ = ["Around", "Decider", "Part", "Recorder", "Spending", "Verdict"]


class Recorder(Protocol):
    """The flight recorder (recorder.py)."""

    def write(self, kind: str, attempt: str, **fields: str | int | float | bool | None) -> None:
        """Write one line before the action. Raises CallError(UNRECORDED): then the action must not happen."""

    def about(self, kind: str, attempt: str, **fields: str | int | float | bool | None) -> None:
        """Write one line about an attempt that it has not caused itself. Raises CallError(UNRECORDED), as above."""


class Decider(Protocol):
    """Policy for calls (deciding.py)."""

    def decide(self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json]) -> Verdict:
        """Judge ``action`` (an op's name) on ``resource``. Total: never raises, never waits."""

    async def permit(
        self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json], verdict: Verdict
    ) -> Callable[[], None]:
        """Carry a verdict out that is not ``plain``: take its quotas, have a person decide.

        Return what gives back the places that the call holds; call it when the handler is done. Raises CallError.
        """


class Spending(Protocol):
    """Budgets (budgets.py)."""

    async def begin(self, run: Run) -> None:
        """Return once a job may run, as far as its budget goes, or is told to end. A job without one: at once."""

    def ended(self, run: Run, usage: Usage | None) -> None:
        """Charge what an attempt used that was not charged yet."""

    def metered(self, told: Metered) -> None:
        """Charge what went through an attempt's door."""

    async def spend(self, caller: Caller, unit: str, amount: float = 1.0) -> None:
        """Charge before something is done, and return once there was room for it. Raises CallError(ENDED)."""

    def entries(self) -> tuple[Entry, ...]:
        """Return the calls about budgets."""


class Part(Protocol):
    """A part of the kernel: its calls."""

    def entries(self) -> tuple[Entry, ...]:
        """Return every call that this part carries out."""


async def _none(run: Run) -> None:
    """Nothing was parked, where nothing parks."""


def _nobody(job: str, attempt: int, kind: EventType, detail: dict[str, str | int | float | bool]) -> None:
    """Hear of an event, where no stream stands."""


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around the kernel on its node; one per boot.

    ``redis``: the kernel's one connection (its pool has more, but a part blocks none). ``emit``: stores a signed event
    in a tenant's stream (None: the node's); only for what the node decides, never for what a job can cause at will:
    that is ``told`` (job, attempt, type, detail), an event of the job's own stream, bounded there. ``runs``: every
    attempt of this boot. ``noting``: called after every call with its caller, op, resource, outcome (``ok`` or the
    error's code) and milliseconds.
    """

    redis: Redis
    keys: Keys
    node: str
    recorder: Recorder
    decider: Decider
    notary: Notary
    emit: Callable[[str | None, Signed], None]
    told: Callable[[str, int, EventType, dict[str, str | int | float | bool]], object] = _nobody
    runs: Callable[[], tuple[Run, ...]] = tuple
    #: Of child jobs: this node's card, the fleet's public key, and who verifies how other jobs ended.
    card: bytes = b""
    fleet: str | None = None
    ends: Dependencies | None = None
    #: What tool calls run on; None: nothing here runs any.
    bench: Bench | None = None
    #: What counts as a loop.
    loop: LoopRule = LoopRule()  # noqa: RUF009 - frozen
    #: See parking.Parking.parks.
    parks: Callable[[Run], Awaitable[None]] = _none
    #: What jobs spend; None: no job with a budget is let in (tests).
    spending: Spending | None = None
    #: Told before a tool call, with its name and its arguments as canonical JSON: equal ones may be a loop.
    repeating: list[Callable[[Run, str, bytes], Awaitable[None]]] = field(default_factory=list)
    #: Told what the egress process tells of an attempt's requests.
    metering: list[Callable[[Metered], None]] = field(default_factory=list)
    noting: list[Callable[[Caller, str, str, str, float], None]] = field(default_factory=list)
    #: Called once when the desk starts and when it stops.
    starting: list[Callable[[], None]] = field(default_factory=list)
    stopping: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    #: Called with its caller once when an attempt that had a session is over.
    ending: list[Callable[[Caller], None]] = field(default_factory=list)
