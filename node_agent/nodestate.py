"""In which state a node is, and whether it claims jobs in it: one decision for what `nodes` shows and what happens.

Called by the session, for each turn and each heartbeat. Pure. Must never let a node claim in a state that says it
doesn't, nor show ``ready`` for one that claims nothing for long. ``lost`` is not here: others say it of a node whose
lease has run out, and it can't say or do anything then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["NodeFacts", "NodeState", "state_of"]

#: Degraded states in which only some jobs are left to others: those that need a broker.
_SERVES_REST: Final = "broker"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node knows of itself. ``phase``: starting, ready or stopping. ``operator``: draining, drained or empty.

    ``lease``: it stands. ``unproved``: a kill waits for its proof. ``record``: the flight recorder can write. ``disk``:
    the node's own disk has room. ``store``: the last heartbeat reached it. ``broker``: it answers, or isn't needed.
    """

    phase: str = "ready"
    operator: str = ""
    lease: bool = True
    unproved: bool = False
    record: bool = True
    disk: bool = True
    store: bool = True
    broker: bool = True


@dataclass(frozen=True, slots=True)
class NodeState:
    """``name``: as `nodes` shows it. ``claims``: whether jobs are claimed; lanes of jobs may still be closed."""

    name: str
    claims: bool


def state_of(facts: NodeFacts) -> NodeState:
    """Return the state: what is worst is shown, and each reason that stops claims does so whatever else is."""
    if facts.unproved:
        return NodeState("unhealthy", claims=False)
    if facts.operator:
        return NodeState(facts.operator, claims=False)
    if facts.phase != "ready":
        return NodeState(facts.phase, claims=False)
    for reason, well in (("recorder", facts.record), ("disk", facts.disk)):
        if not well:
            return NodeState(f"degraded({reason})", claims=False)
    if not facts.lease or not facts.store:
        # Until the lease has lapsed nobody else may run its jobs, and a turn that the store answers is valid.
        return NodeState("degraded(store)", claims=facts.lease)
    if not facts.broker:
        return NodeState(f"degraded({_SERVES_REST})", claims=True)
    return NodeState("ready", claims=True)
