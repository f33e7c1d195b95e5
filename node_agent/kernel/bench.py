"""What tool calls run on: what the boot has of it. Values only.

Made by the session, used by toolrun. Must never hold a slot that jobs are claimed for.
"""

from __future__ import annotations

from dataclasses import dataclass

from node_agent.ground import Ground
from node_agent.slotset import SlotSet
from node_agent.stage import Stage

__all__ = ["Bench"]


@dataclass(frozen=True, slots=True)
class Bench:
    """The boot's ground (its policy names the tools), slots and stage."""

    ground: Ground
    slots: SlotSet
    stage: Stage
