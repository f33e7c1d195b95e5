"""What the parts of the kernel get from each other and from the node: values and Protocols, no behaviour.

Called by the desk (puts the parts together) and by each part's constructor. Must never import a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from redis.asyncio import Redis

from node_agent.kernel.caller import Caller
from node_agent.kernel.table import Entry
from node_agent.records import Notary, Signed
from node_agent.run import Run
from runner.wire.codec import Json
from runner.wire.keys import Keys

__all__ = ["Around", "Decider", "Part", "Recorder", "Verdict"]


class Recorder(Protocol):
    """The flight recorder (recorder.py)."""

    def write(self, kind: str, attempt: str, **fields: str | int | float | bool | None) -> None:
        """Write one line before the action. Raises CallError(UNRECORDED): then the action must not happen."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What policy says of one call; ``reason`` is for people and names no value."""

    effect: Literal["allow", "deny", "ask"]
    rule: str = ""
    reason: str = ""


class Decider(Protocol):
    """Policy for calls (deciding.py)."""

    def decide(self, caller: Caller, action: str, resource: str, facts: Mapping[str, Json]) -> Verdict:
        """Judge ``action`` (an op's name) on ``resource``. Total: never raises, never waits."""


class Part(Protocol):
    """A part of the kernel: its calls."""

    def entries(self) -> tuple[Entry, ...]:
        """Return every call that this part carries out."""


@dataclass(frozen=True, slots=True)
class Around:
    """What stands around the kernel on its node; one per boot.

    ``redis``: the kernel's one connection (its pool has more, but a part blocks none). ``emit``: stores a signed event
    in a tenant's stream (None: the node's); only for what the node decides, never for what a job can cause at will.
    ``told``: see jobevents.JobEvents.tell: an event of the job's own stream. ``runs``: every attempt of this boot.
    """

    redis: Redis
    keys: Keys
    node: str
    recorder: Recorder
    decider: Decider
    notary: Notary
    emit: Callable[[str | None, Signed], None]
    runs: Callable[[], tuple[Run, ...]] = tuple
    #: Called once when the desk starts and when it stops.
    starting: list[Callable[[], None]] = field(default_factory=list)
    stopping: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    #: Called with its caller once when an attempt that had a session is over.
    ending: list[Callable[[Caller], None]] = field(default_factory=list)
